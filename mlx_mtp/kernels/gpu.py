"""What kernels share: the backend, building and launching, the check before their use."""

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar

import mlx.core as mx

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Backend = Literal["metal", "cuda"]

Output = tuple[tuple[int, ...], mx.Dtype]  # shape and type

LONGEST_WINDOW = 17  # positions of a row in a decode step; more are a prompt's
# Tokens that are computed as a decode step's where nothing says what they are, and of a prompt:
# with more of a prompt's it is faster to expand the weights.
MOST_ROWS, MOST_PROMPT_ROWS = 128, 64
LANES = 32
_WARPS = 4  # of a threadgroup, where a kernel does not say
# Of the largest float32 result (see `self_check.difference`): a wrong kernel is off by far more,
# another order of sums by far less.
TOLERANCE = 1e-4

refused: set[str] = set()
"""Names of operations whose kernels do not work here for at least one shape."""

slower: set[str] = set()
"""Names of operations of mlx's that might be used here, and are not: others are faster or right."""

_of_step: ContextVar[bool | None] = ContextVar("of_step", default=None)

_HEADERS: dict[Backend, str] = {
    "metal": """
#define SHUFFLE_XOR(value, other) simd_shuffle_xor(value, other)
#define THREADGROUP(type, name, size) threadgroup type name[size]
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define DEVICE_BARRIER threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup)
""",
    "cuda": """
#define SHUFFLE_XOR(value, other) __shfl_xor_sync(0xffffffffu, value, other)
#define THREADGROUP(type, name, size) __shared__ type name[size]
#define BARRIER __syncthreads()
#define DEVICE_BARRIER __syncthreads()
""",
}
# A grid is (32 lanes times X, Y, Z) with a threadgroup of (32, some, 1).
_PROLOGUES: dict[Backend, str] = {
    "metal": """
    const int lane = thread_position_in_threadgroup.x;
    const int warp = thread_position_in_threadgroup.y;
    const int grid_x = threadgroup_position_in_grid.x;
    const int grid_y = thread_position_in_grid.y;
    const int grid_z = thread_position_in_grid.z;
""",
    "cuda": """
    const int lane = threadIdx.x;
    const int warp = threadIdx.y;
    const int grid_x = blockIdx.x;
    const int grid_y = blockIdx.y * blockDim.y + threadIdx.y;
    const int grid_z = blockIdx.z;
""",
}


def backend() -> Backend | None:
    """The GPU backend that work goes to by default, if any."""
    if mx.default_device().type != mx.gpu:
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


# Kilobytes of shared memory per block, by architecture; 99 on others.
_SHARED = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}


@functools.cache
def shared_memory() -> int:
    """Bytes of shared memory per block on this CUDA GPU."""
    return 1024 * _SHARED.get(str(mx.device_info().get("architecture")), 99)


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of arrays and numbers, so that mlx compiles it on a GPU.

    Its small operations then take few launches. On the CPU mlx would call a C++ compiler. No array
    may be empty: on CUDA mlx then ends the process.
    """
    compiled = mx.compile(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        result: T = (function if backend() is None else compiled)(*args, **kwargs)
        return result

    return call


def of_step() -> bool | None:
    """Whether this pass is a decode step (see `step`); None outside `step`."""
    return _of_step.get()


def few(rows: int) -> bool:
    """Whether a pass of this many tokens is computed as a decode step.

    There a row's bits do not depend on other rows.
    """
    is_step = of_step()
    most = MOST_PROMPT_ROWS if is_step is False else MOST_ROWS
    return rows > 0 and (rows <= most or bool(is_step))


@contextlib.contextmanager
def decode_pass(is_step: bool = True) -> Iterator[None]:
    """Within it passes are a decode step's, however many tokens they have; or else a prompt's."""
    token = _of_step.set(is_step)
    try:
        yield
    finally:
        _of_step.reset(token)


@functools.cache
def zeros(rows: int) -> mx.array:
    """int32 [B], made once: in a step it would be a launch."""
    array = mx.zeros(rows, dtype=mx.int32)
    mx.eval(array)
    return array


def _kernel_name(name: str, *source: str) -> str:
    """A name for mlx, which keeps compiled CUDA kernels on disk by their names alone."""
    return f"mlx_mtp_{name}_{hashlib.sha256(''.join(source).encode()).hexdigest()[:12]}"


def lean(source: str) -> str:
    """The source without comments and indentation: mlx hashes it at each launch on CUDA."""
    lines = (line.partition("//")[0].strip() for line in source.split("\n"))
    return "".join(f"{line}\n" for line in lines if line)


# Launches of attention differ by the sizes of all buffers, so that old ones must go.
@functools.lru_cache(maxsize=4096)
def launcher(
    kernel: Any,  # what mlx made of a source
    template: tuple[tuple[str, Any], ...],
    grid: tuple[int, int, int],  # warps in x, y and z
    warps: int,  # of a threadgroup, along y
    outputs: tuple[Output, ...],
) -> Callable[..., list[mx.array]]:
    """A launch compiled by mlx.

    A plain call of a custom kernel assembles its source anew, most of the host's time.
    """

    def launch(*inputs: mx.array) -> list[mx.array]:
        launched: list[mx.array] = kernel(
            inputs=list(inputs),
            template=list(template),
            grid=(LANES * grid[0], *grid[1:]),
            threadgroup=(LANES, warps, 1),
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )
        return launched

    return mx.compile(launch)


@dataclass(eq=False)
class Kernel:
    """A kernel for the backend in use, built when it is first called.

    Its body, written once for CUDA and Metal, may use lane, warp (of its threadgroup), grid_x,
    grid_y, grid_z and the macros; with `shared` it is for CUDA alone, and has none of these.
    """

    name: str
    inputs: list[str]
    outputs: list[str]
    body: str
    headers: dict[Backend, str] = field(default_factory=dict)  # declarations beside the macros
    contiguous: bool = False  # mlx copies inputs that are not; else the body uses their strides
    shared: int | None = None  # bytes of CUDA's dynamic shared memory; inputs are contiguous
    _built: dict[Backend, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """mlx's kernel."""
        where = backend()
        assert where is not None
        if where not in self._built:
            make: Any = mx.fast.metal_kernel if where == "metal" else mx.fast.cuda_kernel
            header, source = self.headers.get(where, ""), self.body
            if self.shared is None:
                header, source = _HEADERS[where] + header, _PROLOGUES[where] + source
                options: dict[str, Any] = {"ensure_row_contiguous": self.contiguous}
            else:
                header, options = lean(header), {"shared_memory": self.shared}
            source = lean(source)
            self._built[where] = make(
                name=_kernel_name(self.name, header, source, str(options)),
                input_names=self.inputs,
                output_names=self.outputs,
                header=header,
                source=source,
                **options,
            )
        return self._built[where]

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: dict[str, Any],  # constants and types
        grid: tuple[int, int, int],  # warps in x, y and z
        outputs: Sequence[Output],
        warps: int = _WARPS,  # of a threadgroup, along y
    ) -> list[mx.array]:
        run = launcher(
            self.build(), tuple(template.items()), grid, min(warps, grid[1]), tuple(outputs)
        )
        return run(*inputs)


@dataclass(eq=False)
class Operation:
    """What kernels compute in place of operations of mlx, compared with those before its use.

    A shape is what the kernels are compiled for, whatever its type is.
    """

    title: str  # the kernels and their reference
    name: str
    # The largest difference from the reference at a shape and type (see `self_check.difference`).
    error: Callable[[Any, mx.Dtype], float]
    # Whether the kernels are made for a shape and type.
    applies: Callable[[Any, mx.Dtype], bool]
    # To time it: by the kernels, in operations of mlx, and random arguments for both, of one row
    # with some tokens.
    run_kernel: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    arguments: Callable[[Any, mx.Dtype, int], Sequence[Any]] | None = None
    for_metal: bool = True  # else for CUDA alone
    _works: dict[tuple[Backend, Any, mx.Dtype], bool] = field(default_factory=dict)

    def is_for(self, where: Backend | None) -> bool:
        """Whether there are kernels for a backend."""
        return where == "cuda" or (where == "metal" and self.for_metal)

    def works(self, shape: Any, dtype: mx.Dtype) -> bool:
        """Whether the kernels can be used here: made for it, and right when first tried.

        A warning says why a kernel that is made for a shape can't be used.
        """
        where = backend()
        if where is None:
            return False
        known = self._works.get((where, shape, dtype))
        if known is None:
            known = (
                self.is_for(where)
                and self.applies(shape, dtype)
                and self._is_right(where, shape, dtype)
            )
            self._works[where, shape, dtype] = known
        return known

    def _is_right(self, where: Backend, shape: Any, dtype: mx.Dtype) -> bool:
        try:
            error = self.error(shape, dtype)
            fault = "" if error < TOLERANCE else f"it is off by {error:.1e}"
        except Exception as problem:
            fault = f"{type(problem).__name__}: {problem}"
        if fault:
            refused.add(self.name)
            message = "The %s kernel is not used on %s, slower code is used: %s"
            logger.warning(message, self.name.replace("_", " "), where, fault)
        return not fault
