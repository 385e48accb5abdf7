"""What kernels share: the backend, building and launching, the check before their use."""

import contextlib
import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar

import mlx.core as mx
import platformdirs

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Backend = Literal["metal", "cuda"]

Output = tuple[tuple[int, ...], mx.Dtype]  # shape and type

LONGEST_WINDOW = 17  # maximum positions of a row in a decode step; more are a prompt's
# Passes of up to this many tokens are computed as decode steps: outside `decode_pass`, and if they
# are a prompt's. For longer prompts it is faster to expand the weights.
MOST_ROWS, MOST_PROMPT_ROWS = 128, 64
LANES = 32  # of a warp (a simdgroup on Metal)
_WARPS = 4  # of a threadgroup, by default
# Maximum error relative to the largest float32 result (see `self_check.difference`): a wrong
# kernel is off by far more, another order of sums by far less.
TOLERANCE = 1e-4

refused: set[str] = set()
"""Names of operations whose kernels do not work here for at least one shape."""

slower: set[str] = set()
"""Names of mlx's own operations that could be used here but are not: they are slower or wrong."""

_of_step: ContextVar[bool | None] = ContextVar("of_step", default=None)

_HEADERS: dict[Backend, str] = {
    "metal": """
#define SHUFFLE_XOR(value, other) simd_shuffle_xor(value, other)
#define BITS_OF(value) as_type<int>(value)
#define FLOAT_OF(bits) as_type<float>(bits)
#define THREADGROUP(type, name, size) threadgroup type name[size]
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define DEVICE_BARRIER threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup)
""",
    "cuda": """
#define SHUFFLE_XOR(value, other) __shfl_xor_sync(0xffffffffu, value, other)
#define BITS_OF(value) __float_as_int(value)
#define FLOAT_OF(bits) __int_as_float(bits)
#define THREADGROUP(type, name, size) __shared__ type name[size]
#define BARRIER __syncthreads()
#define DEVICE_BARRIER __syncthreads()
""",
}
# A grid is (32 lanes times X, Y, Z), with threadgroups of (32, warps, 1).
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


@functools.cache  # A step asks some hundred times.
def backend() -> Backend | None:
    """Returns the backend of the default device if that is a GPU, else None."""
    if mx.default_device().type != mx.gpu:
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


def launch_early(*arrays: Any, on_gpu: bool = False) -> None:
    """Launch arrays before the rest of a graph is built: on a CPU, and on a GPU if `on_gpu`.

    Takes nested lists and tuples of arrays, as `mx.async_eval`. The device computes them while the
    host builds the rest. In most places of a decode step on a GPU, the launch takes the host longer
    than that saves.
    """
    if on_gpu or backend() is None:
        mx.async_eval(*arrays)


# Kilobytes of shared memory per block, by architecture; 99 on others.
_SHARED = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}


@functools.cache
def shared_memory() -> int:
    """Returns the bytes of shared memory per block on this CUDA GPU."""
    return 1024 * _SHARED.get(str(mx.device_info().get("architecture")), 99)


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of arrays and numbers: on a GPU mlx compiles it.

    Its small operations then take few launches. On the CPU it stays as it is, as mlx would run a
    C++ compiler. No array may be empty: on CUDA mlx would end the process.
    """
    compiled = mx.compile(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        result: T = (function if backend() is None else compiled)(*args, **kwargs)
        return result

    return call


of_step: Callable[[], bool | None] = _of_step.get
"""Returns whether this pass is a decode step; None outside `decode_pass`."""


def few(rows: int) -> bool:
    """Returns whether a pass of `rows` tokens is computed as a decode step.

    In a decode step a row's bits do not depend on other rows.
    """
    is_step = of_step()
    most = MOST_PROMPT_ROWS if is_step is False else MOST_ROWS
    return rows > 0 and (rows <= most or bool(is_step))


@contextlib.contextmanager
def decode_pass(is_step: bool = True) -> Iterator[None]:
    """Treat all passes within this context as decode steps of any size, or else as prompts."""
    token = _of_step.set(is_step)
    try:
        yield
    finally:
        _of_step.reset(token)


@functools.cache
def zeros(*shape: int) -> mx.array:
    """Returns int32 zeros, made once: in a step they would take a launch."""
    array = mx.zeros(shape, dtype=mx.int32)
    mx.eval(array)
    return array


def _aliases(of: dict[str, str], body: str) -> str:
    """Returns declarations of a body's names that are another input."""
    lines = ""
    for name, other in of.items():
        for suffix in ("", "_shape", "_strides") if name != other else ():
            if f"{name}{suffix}" in body:
                lines += f"    const auto {name}{suffix} = {other}{suffix};\n"
    return lines


def _kernel_name(name: str, *source: str) -> str:
    """Returns a name unique to a source: mlx caches compiled CUDA kernels on disk by name only."""
    return f"mlx_mtp_{name}_{hashlib.sha256(''.join(source).encode()).hexdigest()[:12]}"


def lean(source: str) -> str:
    """Returns a source without comments and indentation: mlx hashes it at each launch."""
    lines = (line.partition("//")[0].strip() for line in source.split("\n"))
    return "".join(f"{line}\n" for line in lines if line)


def _included(name: str, source: str) -> str:
    """Returns a line of CUDA that includes a source, to give mlx less to hash at each launch."""
    # Not in a temporary folder: mlx compiles a kernel for new constants days later, too.
    folder = platformdirs.user_cache_path("mlx-mtp") / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, beside = folder / f"{name}.cuh", folder / f"{name}.{os.getpid()}"
        beside.write_text(source)
        beside.replace(file)
    except OSError:
        return source
    return f'#include "{file}"\n'


# Bounded, as launches of attention vary with the sizes of all buffers.
@functools.lru_cache(maxsize=4096)
def launcher(
    kernel: Any,  # mlx's kernel
    template: tuple[tuple[str, Any], ...],
    grid: tuple[int, int, int],  # warps in x, y and z
    warps: int,  # of a threadgroup, along y
    outputs: tuple[Output, ...],
) -> Callable[..., list[mx.array]]:
    """Returns a function that launches a kernel, compiled by mlx.

    A plain call of a custom kernel assembles its source each time: most of the host's time.
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

    Its body, written once for CUDA and Metal, can use lane, warp (of its threadgroup), grid_x,
    grid_y, grid_z and the macros. With `shared` the body is for CUDA only and has none of these.
    """

    name: str
    inputs: list[str]
    outputs: list[str]
    body: str
    headers: dict[Backend, str] = field(default_factory=dict)  # declarations beside the macros
    contiguous: bool = False  # mlx copies strided inputs; if False, the body uses their strides
    # Inputs that are often columns of the same array: each input takes the host time in a step.
    columns: Sequence[str] = ()
    shared: int | None = None  # bytes of CUDA's dynamic shared memory; inputs are contiguous
    _built: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def build(self, same: tuple[int, ...] = ()) -> Any:
        """Returns mlx's kernel for the backend in use; the first call builds it.

        `same` has, for each input, the index of the first input that is the same array; () if none
        is. An array is passed once, and the other names are declared as the first one.
        """
        where = backend()
        assert where is not None
        if (where, same) not in self._built:
            make: Any = mx.fast.metal_kernel if where == "metal" else mx.fast.cuda_kernel
            of = dict(zip(self.inputs, (self.inputs[i] for i in same), strict=bool(same)))
            names = [name for name in self.inputs if of.get(name, name) == name]
            header, source = self.headers.get(where, ""), _aliases(of, self.body) + self.body
            if self.shared is None:
                header, source = _HEADERS[where] + header, _PROLOGUES[where] + source
                options: dict[str, Any] = {"ensure_row_contiguous": self.contiguous}
            else:
                options = {"shared_memory": self.shared}
            header, source = lean(header), lean(source)
            name = _kernel_name(self.name, header, source, str(options))
            if where == "cuda":
                # mlx passes a kernel the shapes and strides that its source names.
                named = dict.fromkeys(re.findall(r"\w+_(?:shape|strides|ndim)\b", source))
                header = _included(f"{name}_header", header)
                source = f"// {' '.join(named)}\n{_included(name, source)}"
            self._built[where, same] = make(
                name=name,
                input_names=names,
                output_names=self.outputs,
                header=header,
                source=source,
                **options,
            )
        return self._built[where, same]

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: dict[str, Any],  # constants and types
        grid: tuple[int, int, int],  # warps in x, y and z
        outputs: Sequence[Output],
        warps: int = _WARPS,  # of a threadgroup, along y
    ) -> list[mx.array]:
        same = self._same(inputs) if self.columns else ()
        given = [array for i, array in enumerate(inputs) if not same or same[i] == i]
        constants, threads = tuple(template.items()), (grid, min(warps, grid[1]))
        return launcher(self.build(same), constants, *threads, tuple(outputs))(*given)

    def _same(self, inputs: Sequence[mx.array]) -> tuple[int, ...]:
        first: dict[int, int] = {}
        return tuple(
            first.setdefault(id(array), i) if name in self.columns else i
            for i, (name, array) in enumerate(zip(self.inputs, inputs, strict=True))
        )


@dataclass(eq=False)
class Operation:
    """An operation that kernels compute in place of mlx's operations, compared before its use.

    A shape is any value that the kernels are compiled for, such as a `GDNShape`.
    """

    title: str  # names the kernels and their reference
    name: str
    # The largest difference from the reference at a shape and type (see `self_check.difference`).
    error: Callable[[Any, mx.Dtype], float]
    # Whether the kernels support a shape and type.
    applies: Callable[[Any, mx.Dtype], bool]
    # For timing: the kernels, their reference in mlx operations, and a function that makes random
    # arguments for both, of one row with the given number of tokens.
    run_kernel: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    arguments: Callable[[Any, mx.Dtype, int], Sequence[Any]] | None = None
    for_metal: bool = True  # else for CUDA only
    _works: dict[tuple[Backend, Any, mx.Dtype], bool] = field(default_factory=dict)

    def is_for(self, where: Backend | None) -> bool:
        """Returns whether there are kernels for a backend."""
        return where == "cuda" or (where == "metal" and self.for_metal)

    def works(self, shape: Any, dtype: mx.Dtype) -> bool:
        """Returns whether the kernels support a shape and type, and were correct when first tried.

        If they support the shape but fail, a warning says why.
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
