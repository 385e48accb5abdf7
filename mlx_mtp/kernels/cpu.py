"""A decode step on a CPU, in few operations: each costs mlx two to three microseconds, views too.

What is elementwise is compiled into one operation, what all layers need of a pass is computed once,
and sums go into products. Beside each function is what it replaces; the results agree but for the
order of sums.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.gated_delta import compute_g

from mlx_mtp.kernels.gdn_types import GDNShape, ShortConvWeights
from mlx_mtp.kernels.portable import EPS, silu_of_sum

P = ParamSpec("P")
T = TypeVar("T")

_elementwise = functools.partial(mx.compile, shapeless=True)


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of arrays and numbers, so that the layers of a pass share its result.

    The latest result is kept, as long as it is asked for the same array objects.
    """
    latest: list[tuple[tuple[object, ...], T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for known, result in latest[-1:]:
            if len(known) == len(args) and all(map(_same, known, args)):
                return result
        result = function(*args, **kwargs)
        latest[:] = [(args, result)]
        return result

    return call


def _same(a: object, b: object) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, mx.array) and a == b)


@functools.lru_cache(maxsize=64)
def _numbers(dim: int, eps: float) -> tuple[mx.array, mx.array]:
    # Arrays, as a number would be compiled into the operation.
    return _made(mx.array(1 / dim)), _made(mx.array(eps))


def _made(array: mx.array) -> mx.array:
    mx.eval(array)
    return array


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """`mx.fast.rms_norm` of float32, which is eight operations here."""
    return _normed(x, _squares(x), weight, *_numbers(x.shape[-1], eps))


def gated_norm(x: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMS norm of x by a weight, times silu of z."""
    return _gated(x, _squares(x), weight, z, *_numbers(x.shape[-1], eps))


def _squares(x: mx.array) -> mx.array:
    return mx.square(x).sum(axis=-1, keepdims=True)


@_elementwise
def _normed(
    x: mx.array, squares: mx.array, weight: mx.array, share: mx.array, eps: mx.array
) -> mx.array:
    return x * mx.rsqrt(squares * share + eps) * weight


@_elementwise
def _gated(
    x: mx.array, squares: mx.array, weight: mx.array, z: mx.array, share: mx.array, eps: mx.array
) -> mx.array:
    return x * mx.rsqrt(squares * share + eps) * weight * nn.silu(z)


class TokenWeights(NamedTuple):
    """A GatedDeltaNet layer's weights between its projections and its output, for `run_token`."""

    shape: GDNShape
    taps: list[mx.array]  # of the convolution, each [C]
    scale: mx.array  # of the norms of q and k, [2 * Hk, 1]
    log_decay: mx.array  # [Hv]
    dt_bias: mx.array  # [Hv]

    @classmethod
    def of(cls, shape: GDNShape, convolution: ShortConvWeights) -> "TokenWeights":
        weight, log_decay, dt_bias = convolution
        taps = [_made(mx.contiguous(weight[:, i, 0])) for i in range(convolution.size)]
        # l2 norms by RMS norms; queries are scaled by Dk^-1/2 too.
        key = shape.key_dim**-0.5
        scale = mx.repeat(mx.array([key / math.sqrt(shape.key_dim), key]), shape.key_heads)[:, None]
        return cls(shape, taps, _made(scale), _made(log_decay.astype(mx.float32)), dt_bias)


def run_token(
    qkv: mx.array,  # q, k and v of a token a row, side by side: [B, C]
    a: mx.array,  # of the decay, [B, Hv]
    b: mx.array,  # of the write strength, [B, Hv]
    weights: TokenWeights,
    state: mx.array,  # float32 [B, Hv, Dv, Dk]
    history: mx.array,  # of the convolution, [B, K-1+P, C]
    num_kept: mx.array | None,  # of the P, int32 [B]; None: P is 0
    keep: mx.array,  # 1 if the row keeps this token, else 0, int32 [B]
) -> tuple[mx.array, mx.array, mx.array]:
    """`short_conv` and `run_window` of a single token: outputs [B, Hv, Dv], state, history."""
    hk, dk, hv, dv, size = weights.shape
    rows, before = len(qkv), history
    if num_kept is not None:
        places = _tail_places(num_kept, rows, history.shape[1], size - 1)
        before = mx.take(history.reshape(-1, history.shape[2]), places, axis=0)
    history = mx.concatenate([before, qkv[:, None]], axis=1)
    mixed = silu_of_sum(*mx.split(history, size, axis=1), *weights.taps)
    keyed, v = mx.split(mixed, [2 * hk * dk], axis=-1)
    heads = keyed.reshape(rows, 2 * hk, dk)
    unit = _normed(heads, _squares(heads), weights.scale, *_numbers(dk, EPS / dk))
    q, k = mx.split(unit[..., None], 2, axis=1)  # [B, Hk, Dk, 1]

    alive, alive_of_heads = _alive(keep)
    decay = _decay(a, weights.log_decay, weights.dt_bias, alive)
    by_key_head = rows, hk, -1, dk
    decayed = (state * decay[..., None, None]).reshape(by_key_head)
    known = (decayed @ k).reshape(rows, hv, dv)
    delta = _delta(v.reshape(rows, hv, dv), known, b[..., None], alive_of_heads)
    after = mx.addmm(decayed, delta.reshape(rows, hk, -1, 1), k.swapaxes(-1, -2))
    return (after @ q).reshape(rows, hv, dv), after.reshape(state.shape), history


@once
def _tail_places(num_kept: mx.array, rows: int, length: int, tail: int) -> mx.array:
    """Which of B * `length` inputs of the convolution precede the next token: int32 [B, tail]."""
    return num_kept[:, None] + _offsets(rows, length, tail)


@functools.lru_cache(maxsize=64)
def _offsets(rows: int, length: int, tail: int) -> mx.array:
    firsts = mx.arange(0, rows * length, length)[:, None]
    return _made(firsts + mx.arange(tail))


@once
def _alive(keep: mx.array) -> tuple[mx.array, mx.array]:
    alive = (keep > 0)[:, None]
    return alive, alive[..., None]


@_elementwise
def _decay(a: mx.array, log_decay: mx.array, dt_bias: mx.array, alive: mx.array) -> mx.array:
    return mx.where(alive, compute_g(log_decay, a, dt_bias), 1.0)


@_elementwise
def _delta(v: mx.array, known: mx.array, b: mx.array, alive: mx.array) -> mx.array:
    return mx.where(alive, (v - known) * mx.sigmoid(b), 0.0)


class Router(NamedTuple):
    """How a mixture chooses experts."""

    num_chosen: int
    normalize: bool


def add_mixture(
    x: mx.array,  # [N, H]
    normed: mx.array,  # [N, H]
    parts: Sequence[mx.array],  # logits of the experts, of the shared one; its gate, its up
    experts: tuple[mx.array, mx.array],  # gate and up, [E, H, 2 * I]; down, [E, I, H]
    shared_down: mx.array,  # [I', H]
    router: Router,
) -> mx.array:
    """x plus a mixture of experts of its norm, [N, H]: mlx-lm's module and the sum behind it."""
    logits, share, gate, up = parts
    count = router.num_chosen
    scores = logits if router.normalize else mx.softmax(logits, axis=-1, precise=True)
    chosen = mx.argpartition(logits, kth=-count, axis=-1)[..., -count:]
    scores = mx.take_along_axis(scores, chosen, axis=-1)
    if router.normalize:
        scores = mx.softmax(scores, axis=-1, precise=True)
    tokens, pairs = _lhs_indices(len(x), count)
    both = mx.gather_mm(normed[:, None], experts[0], lhs_indices=tokens, rhs_indices=chosen)
    inner = swiglu(*mx.split(both, 2, axis=-1))
    outputs = mx.gather_mm(
        inner.reshape(-1, 1, inner.shape[-1]), experts[1], lhs_indices=pairs, rhs_indices=chosen
    )
    routed = scores[:, None] @ outputs.squeeze(2)
    return _added(x, routed.squeeze(1), swiglu(gate, up) @ shared_down, share)


@functools.lru_cache(maxsize=64)
def _lhs_indices(rows: int, count: int) -> tuple[mx.array, mx.array]:
    pairs = mx.arange(rows * count, dtype=mx.uint32).reshape(rows, count)
    return _made(pairs // count), _made(pairs)


@_elementwise
def _added(x: mx.array, routed: mx.array, shared: mx.array, share: mx.array) -> mx.array:
    return x + (routed + mx.sigmoid(share) * shared)


def rotated(x: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    """RoPE of [N, heads, D] by the angles of each token, [N, 1, rotated / 2]."""
    half = cosines.shape[-1]
    first, second, *rest = mx.split(x, [half, 2 * half], axis=-1)
    return mx.concatenate([*_turned(first, second, cosines, sines), *rest], axis=-1)


@_elementwise
def _turned(a: mx.array, b: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
    return a * cos - b * sin, a * sin + b * cos


@once
def angles(positions: mx.array, dims: int, base: float, scale: float) -> tuple[mx.array, mx.array]:
    """Cosines and sines of RoPE at positions int32 [N], each [N, 1, dims / 2]."""
    theta = positions[:, None, None] * _frequencies(dims, base, scale)
    return mx.cos(theta), mx.sin(theta)


@functools.lru_cache(maxsize=8)
def _frequencies(dims: int, base: float, scale: float) -> mx.array:
    steps = mx.arange(0, -(dims // 2), -1, dtype=mx.float32)
    return _made(mx.exp(steps * (math.log(base) / (dims // 2))) * scale)
