"""The kernels against the portable code; without a GPU, the portable code against the reference."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_mtp.cache.specs import AttentionSpec, GatedDeltaSpec
from mlx_mtp.kernels import cases, gpu, portable
from mlx_mtp.kernels.cases import KernelCase
from mlx_mtp.kernels.gdn_types import QWEN3_NEXT_80B, GDNShape
from mlx_mtp.kernels.self_check import RandomInputs
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.selftest.timing import microseconds

_LENGTH, _ROWS = 90, 3  # size of windows for the portable code: two chunks, the second one short
_TOKENS = 4  # tokens with which a kernel is timed: a window of three drafts


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One comparison of a kernel at a shape."""

    name: str
    shape: str
    dtype: str
    ok: bool
    difference: float | None = None  # largest error, in float32's measure
    problem: str | None = None  # why there is no difference
    applies: bool = True  # False: the kernel isn't made for this shape, and portable code runs
    microseconds: float | None = None  # time of `_TOKENS` tokens with the kernel
    portable: float | None = None  # the same for the code that would run without it


def check_model(model: LoadedModel) -> list[KernelCheck]:
    """Compare kernels at the shapes of the model's layers and at those of Qwen3-Next-80B."""
    recurrent = [spec for spec in model.layer_specs if isinstance(spec, GatedDeltaSpec)]
    shapes = {"this model": recurrent[0].shape} if recurrent else {}
    checks = check_kernels({**shapes, "80B": QWEN3_NEXT_80B})
    if gpu.backend() is None:
        return checks
    checks += check_cases("this model", cases.layer_cases(model.causal_lm.args, model.dtype))
    own = next(spec for spec in model.layer_specs if isinstance(spec, AttentionSpec))
    heads = {"this model": (own.heads, own.kv_heads, own.head_dim), "80B": (16, 2, 256)}
    for shape, each in heads.items():
        checks += check_cases(shape, cases.attention_cases(each, mx.bfloat16))
    return checks


def check_kernels(shapes: Mapping[str, GDNShape]) -> list[KernelCheck]:
    """Compare the recurrence at these shapes."""
    checks = []
    on_gpu = gpu.backend() is not None
    for name, shape in shapes.items():
        for dtype in (mx.float32, mx.bfloat16) if on_gpu else ():
            checks += check_cases(name, cases.recurrence_cases(shape, dtype))
        if not on_gpu:  # the portable code computes in float32, whatever the input's type
            for form, error in (("chunkwise", _chunkwise), ("fold", _fold)):
                what = f"{form} / mlx-lm's loop", name, name_of(mx.float32)
                checks.append(_check(what, error, shape))
    return checks


def check_cases(shape: str, cases: Iterable[KernelCase]) -> list[KernelCheck]:
    """Compare and time each case; `shape` is the name of the cases' shape."""
    checks = []
    for case in cases:
        what = case.operation.title, shape, name_of(case.dtype)
        if case.applies:
            checks.append(_check(what, case.error, launches=case.launches(_TOKENS)))
        else:
            checks.append(KernelCheck(*what, ok=True, applies=False))
    return checks


def name_of(dtype: mx.Dtype) -> str:
    """Returns the name of a type, such as "float32"."""
    return str(dtype).removeprefix("mlx.core.")


def _check(
    what: tuple[str, str, str],
    error: Callable[..., float],
    *arguments: Any,
    launches: Iterable[Callable[[], Any]] = (),
) -> KernelCheck:
    try:
        difference = error(*arguments)
        times = [microseconds(launch) for launch in launches]
    except Exception as problem:
        lines = str(problem).strip().splitlines() or [type(problem).__name__]
        return KernelCheck(*what, ok=False, problem=lines[0][:200])
    ok = difference < gpu.TOLERANCE  # NaN is wrong.
    return KernelCheck(*what, ok, difference, None, True, *times)


def _chunkwise(shape: GDNShape) -> float:
    inputs = RandomInputs(0, shape, mx.float32)
    q, window = inputs.window(_ROWS, _LENGTH)
    state, lengths = inputs.state(_ROWS), inputs.counts(_ROWS, _LENGTH)
    y, after, _ = portable.run_chunked(q, window.masked(lengths), state)
    true_y, true_after = portable.loop(q, window, state, lengths)
    kept = (mx.arange(_LENGTH) < lengths[:, None])[..., None, None]
    return max(_largest(mx.where(kept, y - true_y, 0)), _largest(after - true_after))


def _fold(shape: GDNShape) -> float:
    inputs = RandomInputs(1, shape, mx.float32)
    q, window = inputs.window(_ROWS, 5)
    state, kept = inputs.state(_ROWS), inputs.counts(_ROWS, 5)
    _, _, pending = portable.run_chunked(q, window, state, advance=False)
    folded = portable.fold(pending, kept, state)
    return _largest(folded - portable.loop(q, window, state, kept)[1])


def _largest(difference: mx.array) -> float:
    return float(mx.abs(difference.astype(mx.float32)).max())
