"""Host time of a decode step, and the operations that it launches; needs no GPU."""

import io
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from benchmarks import Row, Rows, row
from benchmarks.cores import core_of, decode, row_of
from benchmarks.shapes import build, shape_of
from mlx_mtp.engine import runner as runner_module
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.step import InFlightStep
from mlx_mtp.errors import UsageError
from mlx_mtp.kernels import gpu
from mlx_mtp.models.gemm import measure as gemm
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.speculative.drafter import MTPDrafter

_SIZES = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 32}
_SIZES |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_SIZES |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 256)
_PROMPTS = gpu.MOST_ROWS  # tokens of all prompts; longer passes would really compute, on the CPU
_WARM_STEPS = 48  # enough to include steps that write the deferred entries of an idle head
_VIEWS = (
    "View|AsStrided|Broadcast|ExpandDims|Squeeze|Reshape|Flatten|Unflatten|Slice|Split|Transpose"
)
_Place = tuple[Any, Callable[..., Any]]  # a function and its owner
_PARTS: dict[str, _Place] = {
    "schedule": (Scheduler, Scheduler.schedule),
    "trunk": (LoadedModel, LoadedModel.hidden),
    "lm_head": (LoadedModel, LoadedModel.logits),
    "draw": (runner_module, runner_module._sample),
    "draft": (MTPDrafter, MTPDrafter.propose),
    "launch": (mx, mx.async_eval),
    "read": (InFlightStep, InFlightStep.read),
    "update": (Scheduler, Scheduler.update),
    "step": (ModelRunner, ModelRunner._decode),
}
_COUNTED = ("trunk", "draw", "draft")  # lm_head is counted with the draw
_BUNDLED = "bundled"
_PHASES = {
    "scheduling": ("schedule", "update"),
    "launching": ("launch",),
    "reading": ("read",),
}  # all other parts build the step's graph


def host(
    shape: tuple[str, ...] = ("Qwen3-Next-80B-A3B-Instruct",),
    layers: int = 0,
    cases: tuple[tuple[int, int], ...] = ((1, 0), (1, 1), (1, 3), (4, 0), (4, 3), (16, 0), (16, 3)),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    steps: int = 64,
    parts: bool = False,
) -> Rows:
    """Host time of a decode step, and the operations that it launches; needs no GPU.

    A model has the shape's layers and small sizes. Where there is no GPU, a stand-in that computes
    nothing takes its place: layers are compiled and kernels launched as on CUDA, and each launch is
    an mlx operation that does nothing. "bundled" is the bundled model, which does compute. Times
    are CPU microseconds of the thread that runs the steps. They exclude mlx's encoding of launches
    on a GPU (4 to 5 us each on an H200's host) and the CPU's computations, except for "process",
    the time of all threads. "building" is the time of Python and of building mlx's graph, and
    "calls" counts calls of Python functions, not of mlx's. "launches" excludes operations that only
    change a shape. Counts don't depend on the machine's load. Delivery to clients is not measured.

    Args:
        shape: published shapes, or "bundled"
        cases: rows x drafts
        steps: number of measured steps
        parts: also show times and operations by part
    """
    if _BUNDLED in shape and len(shape) > 1:
        raise UsageError("The bundled model computes, so measure it in a run of its own.")
    if gpu.backend() is None and _BUNDLED not in shape:
        _use_idle_gpu()
    for name in shape:
        model = _model(name, layers)
        for rows, drafts in cases:
            core = core_of(model, drafts, max_num_seqs=rows, prefill_step_size=512)
            sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            prompts = [(row,) * (_PROMPTS // rows) for row in range(rows)]
            decode(core, [row_of(str(n), ids, seed=n, **sampling) for n, ids in enumerate(prompts)])
            for _ in range(_WARM_STEPS):
                core.step()
            yield from _measured(
                core, steps, parts, row("shape | rows | drafts", name, rows, drafts)
            )


def _model(name: str, layers: int) -> LoadedModel:
    if name == _BUNDLED:
        return load_model(BUNDLED_MODEL, enable_mtp=True)
    config = shape_of(name, layers)
    inner = config.get("text_config", config)
    inner |= {name: size for name, size in _SIZES.items() if name in inner}
    return build(config)[0]


def _measured(core: EngineCore, steps: int, parts: bool, line: Row) -> Iterator[Row]:
    laps, process = [], []
    for _ in range(steps):
        watch, began = _Parts(), time.process_time()
        with watch.watched(_PARTS):
            core.step()
        watch.lap()
        laps.append(watch.seconds)
        process.append(time.process_time() - began)
    us = {n: 1e6 * statistics.median(lap[n] for lap in laps) for n in [*_PARTS, "rest"]}
    total = 1e6 * statistics.median(sum(lap.values()) for lap in laps)
    phases = {phase: sum(us[part] for part in of) for phase, of in _PHASES.items()}
    counts = _count(core)
    every = sum(counts.values(), Counter[str]())
    line |= row("us a step | building", total, total - sum(phases.values())) | phases
    names = "process | calls | operations | launches"
    figures = 1e6 * statistics.median(process), _calls(core), every.total(), _launches(every)
    yield line | row(names, *figures)
    for name in [*_PARTS, "rest"] if parts else ():
        of = counts.get(name, Counter())
        yield row("part | us | operations | launches", name, us[name], of.total(), _launches(of))


def _calls(core: EngineCore) -> int:
    """Returns the number of calls of Python and C functions in one step on this thread."""
    kinds = Counter[str]()
    sys.setprofile(lambda _, kind, __: kinds.update((kind,)))
    try:
        core.step()
    finally:
        sys.setprofile(None)
    return kinds["call"] + kinds["c_call"]


def _use_idle_gpu() -> None:
    """Patch mlx so that there seems to be a CUDA GPU, whose kernels compute nothing."""
    nothing = cache(lambda shape, dtype: mx.zeros(shape, dtype))

    def one(shape: Any, dtype: mx.Dtype, *inputs: mx.array | None) -> mx.array:
        output = nothing(tuple(shape), dtype)
        mx.eval(output)
        given = [each for each in inputs if each is not None]
        launched: mx.array = mx.depends([output], given)[0]
        return launched

    def dequantize(w: mx.array, scales: mx.array, biases: Any = None, **how: Any) -> mx.array:
        size = w.shape[-1] * 32 // how["bits"]
        return one((*w.shape[:-1], size), scales.dtype, w, scales, biases)

    def kernel(**_: Any) -> Callable[..., list[mx.array]]:
        def launch(
            *, inputs: list[mx.array], output_shapes: Any, output_dtypes: Any, **_: Any
        ) -> list[mx.array]:
            outputs = [nothing(tuple(s), d) for s, d in zip(output_shapes, output_dtypes)]
            mx.eval(outputs)
            launched: list[mx.array] = mx.depends(outputs, inputs)
            return launched

        return launch

    patched: Any = mx
    patched.default_device = lambda: mx.Device(mx.gpu)
    patched.cuda.is_available = lambda: True
    patched.fast.cuda_kernel = kernel
    patched.fast.rms_norm = lambda x, weight, _: one(x.shape, x.dtype, x, weight)
    patched.dequantize = dequantize
    gpu.backend.cache_clear()
    gemm._problem = lambda *_: None
    gemm._is_worth_it = lambda *_: True
    gemm._choose_expansion = lambda *_: None
    gpu.Operation._is_right = lambda *_: True  # type: ignore[method-assign]


class _Parts:
    """Times the parts of a step, excluding the parts nested in each, and keeps their results."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.returned: dict[str, Any] = {}
        self._stack = ["rest"]
        self._at = time.thread_time()

    def lap(self) -> None:
        """Add the time since the last call to the part that runs."""
        now = time.thread_time()
        self.seconds[self._stack[-1]] += now - self._at
        self._at = now

    @contextmanager
    def watched(self, places: dict[str, _Place]) -> Iterator[None]:
        """Time the calls of functions in the context; `places` has them by the names of parts."""
        for name, (owner, function) in places.items():
            setattr(owner, function.__name__, self._timed(name, function))
        yield
        for owner, function in places.values():
            setattr(owner, function.__name__, function)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.lap()
            self._stack.append(name)
            try:
                self.returned[name] = result = call(*args, **kwargs)
                return result
            finally:
                self.lap()
                self._stack.pop()

        return timed


def _count(core: EngineCore) -> dict[str, Counter[str]]:
    """Returns the operations of one step by part, excluding those of earlier parts."""
    parts, counts, launch = _Parts(), [Counter[str]()], mx.async_eval

    def counted(*arrays: Any) -> None:
        if not parts.returned.keys() >= {*_COUNTED}:
            return  # Not launched early: evaluated arrays vanish from the graph.
        returned = [parts.returned[name] for name in _COUNTED]
        counts.extend(_operations(returned[: n + 1]) for n in range(len(returned)))
        counts.append(_operations([returned, arrays]))
        launch(*arrays)

    with parts.watched({name: _PARTS[name] for name in _COUNTED}):
        mx.async_eval = counted
        core.step()
        mx.async_eval = launch
    return dict(zip([*_COUNTED, "rest"], (now - before for before, now in pairwise(counts))))


def _operations(arrays: Any) -> Counter[str]:
    """Returns the number of operations of each kind that compute `arrays`."""
    text = io.StringIO()
    mx.export_to_dot(text, [a for _, a in tree_flatten(arrays) if isinstance(a, mx.array)])
    return Counter(re.findall(r'label ="(\w+)[^"]*", shape=rectangle', text.getvalue()))


def _launches(counts: Counter[str]) -> int:
    """Returns the number of operations that are launches."""
    return sum(n for name, n in counts.items() if not re.fullmatch(_VIEWS, name))
