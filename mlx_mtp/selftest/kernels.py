"""The kernels against the portable code; without a GPU, the portable code against the reference."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_mtp.cache.specs import AttentionSpec, GatedDeltaSpec
from mlx_mtp.kernels import gated_delta, gpu, norms, portable, short_conv, topk
from mlx_mtp.kernels.cuda import decode_attention, flash_attention, gated_delta_chunks
from mlx_mtp.kernels.gdn_types import QWEN3_NEXT_80B, Shape
from mlx_mtp.kernels.self_check import Cases
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.selftest.timing import TimedLaunch, microseconds

_LENGTH, _ROWS = 90, 3  # Of windows for the portable code: two chunks, the second one short.
_TOKENS = 4  # that a kernel is timed with: what three drafts verify


class _Case(NamedTuple):
    name: str
    compare: Callable[[], float]
    applies: bool  # The kernel is made for the shape.
    timed: tuple[TimedLaunch, TimedLaunch] | None = (
        None  # The kernel, and what would run without it.
    )


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One comparison of a kernel at a shape."""

    name: str
    shape: str
    dtype: str
    ok: bool
    difference: float | None = None  # The largest, in float32's measure.
    problem: str | None = None  # Why there is no difference.
    applies: bool = True  # False: the kernel isn't made for this shape, and portable code runs.
    microseconds: float | None = None  # Of four tokens, and of what would run without the kernel.
    portable: float | None = None


def check_model(model: LoadedModel) -> list[KernelCheck]:
    """Compare at the shape of the model's GatedDeltaNet layers and at that of Qwen3-Next-80B."""
    recurrent = [spec for spec in model.layer_specs if isinstance(spec, GatedDeltaSpec)]
    shapes = {"this model": recurrent[0].shape} if recurrent else {}
    checks = check_kernels({**shapes, "80B": QWEN3_NEXT_80B})
    if gpu.backend() is not None:
        checks += [_check("this model", model.dtype, case) for case in _fused_cases(model)]
    if gpu.backend() != "cuda":
        return checks
    own = next(spec for spec in model.layer_specs if isinstance(spec, AttentionSpec))
    heads = {"this model": (own.heads, own.kv_heads, own.head_dim), "80B": (16, 2, 256)}
    both = check_attention, check_chunk_attention
    return checks + [check(called, *each) for check in both for called, each in heads.items()]


def check_attention(called: str, heads: int, kv_heads: int, dim: int) -> KernelCheck:
    """Compare the attention kernel with float32; attention in float32 is mlx's own."""
    compare = partial(decode_attention.error, heads, kv_heads, dim, mx.bfloat16)
    case = _Case("attention kernel / float32", compare, dim in decode_attention.DIMS)
    return _check(called, mx.bfloat16, case, decode_attention.TOLERANCE)


def check_chunk_attention(called: str, heads: int, kv_heads: int, dim: int) -> KernelCheck:
    """The same for the kernel of prompts' chunks."""
    compare = partial(flash_attention.error, heads, kv_heads, mx.bfloat16)
    applies = dim == flash_attention.DIM and flash_attention.hopper()
    case = _Case("chunk attention kernel / float32", compare, applies)
    return _check(called, mx.bfloat16, case, flash_attention.TOLERANCE)


def check_kernels(shapes: Mapping[str, Shape]) -> list[KernelCheck]:
    """Compare at these shapes; portable code computes in float32 whatever it is given."""
    on_gpu = gpu.backend() is not None
    dtypes = (mx.float32, mx.bfloat16) if on_gpu else (mx.float32,)
    return [
        _check(called, dtype, case)
        for (called, shape), dtype in itertools.product(shapes.items(), dtypes)
        for case in (_gpu_cases(shape, dtype) if on_gpu else _cpu_cases(shape))
    ]


def name_of(dtype: mx.Dtype) -> str:
    """The name of a type, such as "float32"."""
    return str(dtype).removeprefix("mlx.core.")


def _check(
    called: str, dtype: mx.Dtype, case: _Case, tolerance: float = gpu.TOLERANCE
) -> KernelCheck:
    what = (case.name, called, name_of(dtype))
    if not case.applies:
        return KernelCheck(*what, ok=True, applies=False)
    try:
        difference = case.compare()
        times = [microseconds(launch) for launch in case.timed or ()]
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return KernelCheck(*what, ok=False, problem=lines[0][:200])
    ok = difference < tolerance  # NaN is wrong.
    return KernelCheck(*what, ok, difference, None, True, *times)


def _gpu_cases(shape: Shape, dtype: mx.Dtype) -> Iterator[_Case]:
    cases = Cases(0, shape, dtype)
    given = *cases.window(1, _TOKENS), cases.state(1), None, None
    both = partial(gated_delta.launch, *given), partial(portable.step, *given)
    yield _case("gated delta kernel / portable", gated_delta.KERNEL, shape, dtype, *both)
    before = cases.projected(1, _TOKENS), cases.convolution(), cases.history(1, 0), None
    pair = partial(short_conv.launch, *before), partial(portable.prepare, *before)
    yield _case("inputs kernel / portable", short_conv.KERNEL, shape, dtype, *pair)
    if gpu.backend() == "cuda":
        compare = partial(gated_delta_chunks.error, shape, dtype)
        applies = gated_delta_chunks.applies(shape, dtype)
        yield _Case("gated delta of prompts / portable", compare, applies)


def _fused_cases(model: LoadedModel) -> Iterator[_Case]:
    args, dtype = model.causal_lm.args, model.dtype
    width = norms.Shape(args.hidden_size, args.rms_norm_eps)
    heads = args.num_attention_heads, args.num_key_value_heads
    rotated = int(args.head_dim * args.partial_rotary_factor)
    values, keys = args.linear_num_value_heads, args.linear_num_key_heads
    gated = width._replace(dim=args.linear_value_head_dim, heads=values, ratio=values // keys)
    rotation = norms.Shape(args.head_dim, width.eps, *heads, rotated, args.rope_theta)
    shapes = [(norms.ADD_NORM, width), (norms.GATED_NORM, gated), (norms.ROTATE, rotation)]
    if getattr(args, "num_experts", 0):
        chosen = args.num_experts_per_tok
        kind = topk.Router(args.num_experts, chosen, args.norm_topk_prob)
        logits = mx.random.normal((_TOKENS, kind.experts + 1), key=mx.random.key(0)).astype(dtype)
        given = logits[:, :-1], logits[:, -1:], kind
        routed = partial(topk.launch, *given), partial(topk.portable, *given)
        yield _case("router kernel / mlx", topk.KERNEL, kind, dtype, *routed)
        # Of a step with the shared expert, of a prompt without.
        shapes += [(norms.MIX_NORM, width._replace(chosen=n)) for n in (chosen + 1, chosen)]
    for each, shape in shapes:
        name, drawn = each.name.replace("_", " "), each.drawn(shape, dtype, _TOKENS)
        both = partial(each.launch, shape, *drawn), partial(each.portable, shape, *drawn)
        yield _case(f"{name} kernel / mlx", each.kernel, shape, dtype, *both)


def _case(
    name: str,
    kernel: gpu.Kernel,
    shape: Any,
    dtype: mx.Dtype,
    ours: TimedLaunch,
    theirs: TimedLaunch,
) -> _Case:
    compare = partial(kernel.check, shape, dtype)
    return _Case(name, compare, kernel.applies(shape), (ours, theirs))


def _cpu_cases(shape: Shape) -> Iterator[_Case]:
    yield _Case("chunkwise / mlx-lm's loop", lambda: _chunkwise(shape), True)
    yield _Case("fold / mlx-lm's loop", lambda: _fold(shape), True)


def _chunkwise(shape: Shape) -> float:
    cases = Cases(0, shape, mx.float32)
    q, window = cases.window(_ROWS, _LENGTH)
    state, lengths = cases.state(_ROWS), cases.counts(_ROWS, _LENGTH)
    y, after, _ = portable.run(q, window.cut(lengths), state)
    true_y, true_after = portable.loop(q, window, state, lengths)
    kept = (mx.arange(_LENGTH) < lengths[:, None])[..., None, None]
    return max(_largest(mx.where(kept, y - true_y, 0)), _largest(after - true_after))


def _fold(shape: Shape) -> float:
    cases = Cases(1, shape, mx.float32)
    q, window = cases.window(_ROWS, 5)
    state, kept = cases.state(_ROWS), cases.counts(_ROWS, 5)
    _, _, pending = portable.run(q, window, state, advance=False)
    folded = portable.fold(pending, kept, state)
    return _largest(folded - portable.loop(q, window, state, kept)[1])


def _largest(difference: mx.array) -> float:
    return float(mx.abs(difference.astype(mx.float32)).max())
