"""A decode step on a CPU, in few operations: each, even a view, costs mlx 2 to 3 microseconds.

Elementwise operations of a layer are compiled into one, results that all layers of a pass need are
computed once, and sums are part of products (`mx.addmm`). Each function's docstring names what it
replaces; results differ only by the order of sums.

For each compiled operation mlx runs a C++ compiler, once per boot of the machine, for half a
second. So few operations are compiled.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g

from mlx_mtp.kernels.activations import elementwise, silu_times, softmax
from mlx_mtp.kernels.gdn_types import GDNShape, PendingWindow, ShortConvWeights
from mlx_mtp.kernels.portable import EPS, silu_of_sum
from mlx_mtp.kernels.topk import Router
from mlx_mtp.kernels.view import to_arrays

P = ParamSpec("P")
T = TypeVar("T")

MOST_BYTES = 1 << 23  # of weights to copy; reading larger ones takes longer than mlx's overhead
_OUTPUTS = 256  # of a block of `BlockedLinear`
_MANY = 1 << 13  # elements from which a norm in more but simpler operations is faster


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of arrays and numbers: the layers of a pass share its result.

    The latest result is returned again as long as the arguments are the same array objects.
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
    """`mx.fast.rms_norm` of float32, which takes eight operations on a CPU."""
    numbers = _numbers(x.shape[-1], eps)
    if x.size < _MANY:
        return _normed(x, _squares(x), weight, *numbers)
    return x * _inverse_root_mean(mx.square(x) @ _ones(x.shape[-1]), *numbers) * weight


def gated_norm(x: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Returns the RMS norm of x with a weight, times silu of z."""
    return silu_times(z, rms_norm(x, weight, eps))


def _squares(x: mx.array) -> mx.array:
    return mx.square(x).sum(axis=-1, keepdims=True)


@functools.lru_cache(maxsize=8)
def _ones(dim: int) -> mx.array:
    return _made(mx.ones((dim, 1)))


@elementwise
def _inverse_root_mean(squares: mx.array, share: mx.array, eps: mx.array) -> mx.array:
    return mx.rsqrt(squares * share + eps)


@elementwise
def _normed(
    x: mx.array, squares: mx.array, weight: mx.array, share: mx.array, eps: mx.array
) -> mx.array:
    return x * mx.rsqrt(squares * share + eps) * weight


class BlockedLinear(nn.Linear):
    """A linear layer with many outputs, in blocks: OpenBLAS copies a larger matrix first."""

    def __call__(self, x: mx.array) -> mx.array:
        weight: mx.array = self.weight
        if len(weight) % _OUTPUTS:  # A `DraftVocabulary` has replaced the weight by some rows.
            return super().__call__(x)
        of, blocks = self.__dict__.get("_blocks", (None, None))
        if of is not weight:
            by_input = weight.reshape(-1, _OUTPUTS, weight.shape[1]).swapaxes(1, 2)
            blocks = _made(mx.contiguous(by_input))
            self.__dict__["_blocks"] = weight, blocks
        parts = x.reshape(-1, x.shape[-1]) @ blocks
        return parts.swapaxes(0, 1).reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def serves(layer: nn.Module) -> bool:
        """Returns whether a layer is a small float32 one that can be cut into blocks."""
        if type(layer) is not nn.Linear or "bias" in layer or layer.weight.dtype != mx.float32:
            return False
        return layer.weight.nbytes <= MOST_BYTES and len(layer.weight) % _OUTPUTS == 0


class TokenWeights(NamedTuple):
    """A GatedDeltaNet layer's weights between its projections and its output norm."""

    shape: GDNShape
    taps: list[mx.array]  # of the convolution, each [C]
    scale: mx.array  # of the norms of q and k, [2 * Hk, 1]
    log_decay: mx.array  # [Hv]
    dt_bias: mx.array  # [Hv]

    @classmethod
    def of(cls, shape: GDNShape, convolution: ShortConvWeights) -> "TokenWeights":
        weight, log_decay, dt_bias = convolution
        taps = [_made(mx.contiguous(weight[:, i, 0])) for i in range(convolution.size)]
        # Scales that turn RMS norms into l2 norms; the queries' include the factor Dk^-1/2.
        key = shape.key_dim**-0.5
        scale = mx.repeat(mx.array([key / math.sqrt(shape.key_dim), key]), shape.key_heads)[:, None]
        return cls(shape, taps, _made(scale), _made(log_decay.astype(mx.float32)), dt_bias)


def run_token(
    qkv: mx.array,  # q, k and v of one token per row, concatenated: [B, 1, C]
    a: mx.array,  # of the decay, [B, 1, Hv]
    b: mx.array,  # of the write strength, [B, 1, Hv]
    weights: TokenWeights,
    state: mx.array,  # float32 [B, Hv, Dv, Dk]
    history: mx.array,  # earlier inputs: K-1, then the P of the last window, [B, K-1+P, C]
    num_kept: mx.array | None,  # of these P inputs that each row keeps, int32 [B]; None: P is 0
    keep: mx.array,  # 1 if the row keeps this token, else 0, int32 [B]
) -> tuple[mx.array, mx.array, mx.array]:
    """`short_conv` and `run_window` of a single token.

    Returns outputs [B, 1, Hv, Dv], the new state, and the new history.
    """
    hk, _, hv, *_ = weights.shape
    rows = len(qkv)
    unit, v, history = _convolve(qkv, weights, history, num_kept)
    q, k = mx.split(unit.reshape(rows, 2 * hk, -1, 1), 2, axis=1)  # [B, Hk, Dk, 1]
    alive, alive_of_heads = _alive(keep)
    decay = _decay(a, weights.log_decay, weights.dt_bias, alive)
    decayed = (state * decay.reshape(rows, hv, 1, 1)).reshape(rows, hk, -1, state.shape[-1])
    known = (decayed @ k).reshape(v.shape)
    delta = _delta(v, known, mx.sigmoid(b)[..., None], alive_of_heads)
    after = mx.addmm(decayed, delta.reshape(rows, hk, -1, 1), k.swapaxes(-1, -2))
    return (after @ q).reshape(v.shape), after.reshape(state.shape), history


def run_window(
    qkv: mx.array,  # q, k and v of a verify window, concatenated: [B, T, C]
    a: mx.array,  # [B, T, Hv]
    b: mx.array,
    weights: TokenWeights,
    state: mx.array,  # before the window
    history: mx.array,
    num_kept: mx.array | None,
) -> tuple[mx.array, PendingWindow, mx.array]:
    """`short_conv` and `run_window` of a few positions, as one chunk (see `portable.run_chunked`).

    Returns outputs [B, T, Hv, Dv], what folding the window needs, and the new history.
    """
    hk, dk, hv, dv, _ = weights.shape
    rows, length, _ = qkv.shape
    unit, v, history = _convolve(qkv, weights, history, num_kept)
    g = _decay(a, weights.log_decay, weights.dt_bias, _always())
    by_head = unit.reshape(rows, length, 2, hk, dk).transpose(0, 3, 2, 1, 4)
    both = by_head.reshape(rows, hk, 2 * length, dk)
    keys = by_head[:, :, 1]
    # [B, Hk, 1, T, T]: queries by keys, keys by keys.
    alike = list(mx.split((both @ keys.swapaxes(-1, -2))[:, :, None], 2, axis=3))
    seen = both @ state.reshape(rows, hk, -1, dk).swapaxes(-1, -2)
    seen = seen.reshape(rows, hk, 2, length, hv // hk, dv).transpose(2, 0, 1, 4, 3, 5)
    steps = rows, length, hk, hv // hk, -1
    parts = v, g, mx.sigmoid(b)
    values, decays, strengths = (x.reshape(steps).transpose(0, 2, 3, 1, 4) for x in parts)
    below, diagonal, lower = _triangles(length)
    decay = mx.cumprod(mx.where(below, decays, 1), axis=-2)  # D_ti of `portable`
    total = decay[..., :1] * decays[..., :1, :]
    mixing = mx.where(below, strengths * decay * alike[1], diagonal)
    written = _delta(values, total * seen[1], strengths, _always())
    delta = mx.linalg.tri_inv(mixing, stream=mx.cpu) @ written
    attending = mx.where(lower, decay * alike[0], 0)
    outputs = mx.addmm(total * seen[0], attending, delta)
    y, delta = (x.transpose(0, 3, 1, 2, 4).reshape(v.shape) for x in (outputs, delta))
    return y, PendingWindow(unit[:, :, hk:], delta, g), history


def fold(pending: PendingWindow, num_kept: mx.array, state: mx.array) -> mx.array:
    """As `portable.fold`."""
    k, delta, g = to_arrays(pending)
    rows, length, hk, dk = k.shape
    kept = _kept(num_kept, length)
    decays = mx.where(kept, g, 1)
    later = mx.cumprod(decays, axis=1, reverse=True, inclusive=False)
    everything = (later[:, 0] * decays[:, 0])[..., None, None]
    weighted = delta * mx.where(kept, later, 0)[..., None]
    writes = weighted.reshape(rows, length, hk, -1).transpose(0, 2, 3, 1)
    before = (state * everything).reshape(rows, hk, -1, dk)
    return mx.addmm(before, writes, k.swapaxes(1, 2)).reshape(state.shape)


def _convolve(
    qkv: mx.array, weights: TokenWeights, history: mx.array, num_kept: mx.array | None
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns normed and scaled q and k [B, T, 2 * Hk, Dk], v [B, T, Hv, Dv], and new history."""
    hk, dk, hv, dv, size = weights.shape
    rows, length, channels = qkv.shape
    before = history
    if num_kept is not None:
        places = _tail_places(num_kept, rows, history.shape[1], size - 1)
        before = mx.take(history.reshape(-1, channels), places, axis=0)
    history = mx.concatenate([before, qkv], axis=1)
    shifted = [history[:, i : i + length] for i in range(size)]
    if length == 1:
        shifted = list(mx.split(history, size, axis=1))
    keyed, v = mx.split(silu_of_sum(*shifted, *weights.taps), [2 * hk * dk], axis=-1)
    heads = keyed.reshape(rows, length, 2 * hk, dk)
    unit = _normed(heads, _squares(heads), weights.scale, *_numbers(dk, EPS / dk))
    return unit, v.reshape(rows, length, hv, dv), history


@once
def _tail_places(num_kept: mx.array, rows: int, length: int, tail: int) -> mx.array:
    """Returns the indices, among B * `length` inputs, of the next token's last: int32 [B, tail]."""
    return num_kept[:, None] + _offsets(rows, length, tail)


@functools.lru_cache(maxsize=64)
def _offsets(rows: int, length: int, tail: int) -> mx.array:
    firsts = mx.arange(0, rows * length, length)[:, None]
    return _made(firsts + mx.arange(tail))


@once
def _alive(keep: mx.array) -> tuple[mx.array, mx.array]:
    alive = (keep > 0)[:, None, None]
    return alive, alive[..., None]


@functools.cache
def _always() -> mx.array:
    return _made(mx.array(True))


@once
def _kept(num_kept: mx.array, length: int) -> mx.array:
    """Returns which positions of a window are kept: bool [B, T, 1]."""
    return (mx.arange(length) < num_kept[:, None])[..., None]


@functools.lru_cache(maxsize=64)
def _triangles(size: int) -> tuple[mx.array, mx.array, mx.array]:
    """Returns [T, T]: bool below the diagonal, the identity, bool on and below the diagonal."""
    below, lower = (mx.tri(size, k=k, dtype=mx.bool_) for k in (-1, 0))
    return _made(below), _made(mx.eye(size)), _made(lower)


@elementwise
def _decay(a: mx.array, log_decay: mx.array, dt_bias: mx.array, alive: mx.array) -> mx.array:
    return mx.where(alive, compute_g(log_decay, a, dt_bias), 1.0)


@elementwise
def _delta(v: mx.array, known: mx.array, strength: mx.array, alive: mx.array) -> mx.array:
    return mx.where(alive, (v - known) * strength, 0.0)


def add_mixture(
    x: mx.array,  # [N, H]
    normed: mx.array,  # [N, H]
    parts: Sequence[mx.array],  # logits of experts, logit of the shared one, and its gate and up
    experts: tuple[mx.array, mx.array],  # gate and up, [E, H, 2 * I]; down, [E, I, H]
    shared_down: mx.array,  # [I', H]
    router: Router,
) -> mx.array:
    """Returns x plus a mixture of experts of `normed`, [N, H]: mlx-lm's module and the addition."""
    logits, share, gate, up = parts
    count = router.chosen
    scores = logits if router.normalize else mx.softmax(logits, axis=-1, precise=True)
    chosen = mx.argpartition(logits, kth=-count, axis=-1)[..., -count:]
    scores = mx.take_along_axis(scores, chosen, axis=-1)
    if router.normalize:
        scores = mx.softmax(scores, axis=-1, precise=True)
    tokens, pairs = _lhs_indices(len(x), count)
    both = mx.gather_mm(normed[:, None], experts[0], lhs_indices=tokens, rhs_indices=chosen)
    inner = silu_times(*mx.split(both, 2, axis=-1))
    outputs = mx.gather_mm(
        inner.reshape(-1, 1, inner.shape[-1]), experts[1], lhs_indices=pairs, rhs_indices=chosen
    )
    routed = scores[:, None] @ outputs.squeeze(2)
    return _added(x, routed.squeeze(1), silu_times(gate, up) @ shared_down, mx.sigmoid(share))


@functools.lru_cache(maxsize=64)
def _lhs_indices(rows: int, count: int) -> tuple[mx.array, mx.array]:
    pairs = mx.arange(rows * count, dtype=mx.uint32).reshape(rows, count)
    return _made(pairs // count), _made(pairs)


@elementwise
def _added(x: mx.array, routed: mx.array, shared: mx.array, share: mx.array) -> mx.array:
    return x + (routed + share * shared)


class HeadNorms(NamedTuple):
    """How the heads of an attention layer are normed, and rotated by RoPE."""

    weights: mx.array  # of each head, [heads, D]
    eps: float
    dims: int  # dimensions that RoPE rotates
    base: float
    scale: float  # factor of positions


def turned_heads(x: mx.array, norms: HeadNorms, positions: mx.array) -> mx.array:
    """Returns heads x [N, heads, D] after their norms, and RoPE at positions int32 [N]."""
    cosines, sines = _angles(positions, norms.dims, norms.base, norms.scale)
    normed, half = rms_norm(x, norms.weights, norms.eps), norms.dims // 2
    first, second, *rest = mx.split(normed, [half, 2 * half], axis=-1)
    turned = first * cosines - second * sines, first * sines + second * cosines
    return mx.concatenate([*turned, *rest], axis=-1)


@once
def _angles(positions: mx.array, dims: int, base: float, scale: float) -> tuple[mx.array, mx.array]:
    """Returns the cosines and sines at positions int32 [N], each [N, 1, dims / 2]."""
    theta = positions[:, None, None] * _frequencies(dims, base, scale)
    return mx.cos(theta), mx.sin(theta)


@functools.lru_cache(maxsize=8)
def _frequencies(dims: int, base: float, scale: float) -> mx.array:
    steps = mx.arange(0, -(dims // 2), -1, dtype=mx.float32)
    return _made(mx.exp(steps * (math.log(base) / (dims // 2))) * scale)


def attend(
    queries: mx.array,  # of a window, already scaled, [B, T, heads, D]
    kv: mx.array,  # [2, slots, KV heads, capacity, D]; row b has slot b
    bias: mx.array,  # 0 at positions that a query attends to, else -inf: [B, 1, T * R, limit]
) -> mx.array:
    """Returns the attention of each token, [B, T, heads, D]; R heads of queries share a KV head."""
    rows, length, _, dim = queries.shape
    limit = bias.shape[-1]
    keys, values = kv[0, :rows, :, :limit], kv[1, :rows, :, :limit]
    by_head = queries.reshape(rows, length, keys.shape[1], -1, dim).swapaxes(1, 2)
    joined = by_head.reshape(rows, keys.shape[1], -1, dim)
    attended = softmax(mx.addmm(bias, joined, keys.swapaxes(-1, -2))) @ values
    return attended.reshape(by_head.shape).swapaxes(1, 2).reshape(queries.shape)
