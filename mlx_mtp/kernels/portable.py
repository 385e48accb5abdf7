"""The gated delta rule and its inputs in mlx operations.

`run_chunked` computes the rule in matrix products, a chunk of positions at a time. Within a chunk
let c_t be the product of the decays up to t, D_ti = c_t / c_i for i <= t, and delta_t what position
t writes along its key. Unrolled from the state S before the chunk,

    delta_t = beta_t (v_t - c_t S k_t - sum_{i<t} D_ti (k_t . k_i) delta_i)
    y_t     = c_t S q_t + sum_{i<=t} D_ti (q_t . k_i) delta_i

(q scaled by Dk^-1/2), so with A_ti = beta_t D_ti (k_t . k_i) for i < t, all deltas of a chunk are

    delta = (I + A)^-1 (beta v) - (I + A)^-1 (beta c k) S^T

and only the small products with S run chunk after chunk (the WY form of Yang et al., "Gated Delta
Networks", 2024, section 3.3). A verify window is one short chunk.
"""

import functools

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g, gated_delta_ops

from mlx_mtp.kernels import activations, gpu
from mlx_mtp.kernels.gdn_types import (
    CHUNK,
    GDNProjections,
    GDNWindow,
    PendingWindow,
    ShortConvWeights,
)
from mlx_mtp.kernels.view import Operand, to_arrays

EPS = 1e-6  # of the l2 norm of q and k, added to their sum of squares


def run_window(
    q: Operand,
    window: GDNWindow,
    state: mx.array,
    previous: PendingWindow | None,
    num_kept: mx.array | None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array, PendingWindow | None]:
    """As `recurrence.run_window`."""
    if previous is not None and num_kept is not None:
        state = fold(previous, num_kept, state)
    if lengths is None:
        outputs, _, pending = run_chunked(q, window, state, advance=False)
        return outputs, state, pending
    if window.length == 1:
        return *loop(q, window, state, lengths), None
    return *run_chunked(q, window.masked(lengths), state)[:2], None


def run_chunked(
    q: Operand,  # queries, l2-normalised, [B, T, Hk, Dk]
    window: GDNWindow,
    state: mx.array,  # float32 [B, Hv, Dv, Dk]
    *,
    advance: bool = True,
) -> tuple[mx.array, mx.array, PendingWindow]:
    """Run a window; returns outputs [B, T, Hv, Dv], the state after it, and what folding it needs.

    Without `advance` the returned state is meaningless.
    """
    batch, length, key_heads, _ = q.shape
    heads, value_dim = window.v.shape[2:]
    size = min(length, CHUNK)
    # [B, Hk, R, N, C, D]: R value heads share a key head, N chunks of C positions.
    queries, keys, values, g, beta = (
        _chunks(a, key_heads, size, fill)
        for a, fill in zip(to_arrays([q, *window]), (0, 0, 0, 1, 0), strict=True)
    )
    queries = queries * q.shape[-1] ** -0.5
    decay = _decay(g[..., 0])
    total = decay[..., :1] * g[..., :1, :]
    alike = keys @ keys.swapaxes(-1, -2)
    # A power series in A would need no LAPACK, but overflows where keys resemble each other.
    mixing = mx.where(_lower(size, -1), beta * decay * alike, mx.eye(size))
    solve = mx.linalg.tri_inv(mixing, stream=mx.cpu)
    written = solve @ (beta * values)
    erased = solve @ (beta * total * keys)
    attend = decay * (queries @ keys.swapaxes(-1, -2))
    remaining = decay[..., -1:, :].swapaxes(-1, -2)

    current = state.reshape(batch, key_heads, -1, value_dim, state.shape[-1])
    outputs, deltas = [], []
    count = keys.shape[3]
    for n in range(count):
        turned = current.swapaxes(-1, -2)
        delta = written[:, :, :, n] - erased[:, :, :, n] @ turned
        from_state = (total[:, :, :, n] * queries[:, :, :, n]) @ turned
        outputs.append(from_state + attend[:, :, :, n] @ delta)
        deltas.append(delta)
        if advance or n + 1 < count:
            weighted = remaining[:, :, :, n] * keys[:, :, :, n]
            kept = total[:, :, :, n, -1:] * current
            current = kept + delta.swapaxes(-1, -2) @ weighted

    def rows(parts: list[mx.array]) -> mx.array:
        joined = mx.concatenate(parts, axis=3) if len(parts) > 1 else parts[0]
        flat = joined.reshape(batch, heads, -1, value_dim)[:, :, :length]
        return flat.swapaxes(1, 2)

    pending = PendingWindow(window.k, rows(deltas), window.g)
    return rows(outputs).astype(q.dtype), current.reshape(state.shape), pending


def fold(pending: PendingWindow, num_kept: mx.array, state: mx.array) -> mx.array:
    """Returns the state after the first `num_kept[b]` (int32 [B]) positions of a window."""
    batch, length, key_heads, _ = pending.k.shape
    kept = (mx.arange(length) < num_kept[:, None])[..., None]
    k, delta, g = to_arrays(pending)
    delta = mx.where(kept[..., None], delta, 0)
    keys, deltas, g = (
        _chunks(a, key_heads, length, 0)[:, :, :, 0] for a in (k, delta, mx.where(kept, g, 1))
    )
    # The product of the decays after each position; with the first decay it is the state's.
    after = _decay(g[..., 0])[..., -1:, :].swapaxes(-1, -2)
    current = state.reshape(batch, key_heads, -1, *state.shape[2:])
    remembered = after[..., :1, :] * g[..., :1, :] * current
    folded = remembered + deltas.swapaxes(-1, -2) @ (after * keys)
    return folded.reshape(state.shape)


def loop(
    q: Operand, window: GDNWindow, state: mx.array, lengths: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """mlx-lm's loop, the slow reference; ignores positions from `lengths[b]` (int32 [B]) on."""
    mask = None if lengths is None else mx.arange(window.length) < lengths[:, None]
    queries, *others = to_arrays([q, *window])
    return gated_delta_ops(queries * q.shape[-1] ** -0.5, *others, state, mask)


def _chunks(x: mx.array, key_heads: int, size: int, fill: float) -> mx.array:
    """Reshape [B, T, H, D] or [B, T, H] to float32 [B, Hk, H/Hk, N, C, D], padded at the end."""
    batch, length, heads = x.shape[:3]
    x = x.astype(mx.float32).reshape(batch, length, heads, -1)
    missing = -length % size
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)], constant_values=fill)
    x = mx.contiguous(x.swapaxes(1, 2))
    return x.reshape(batch, key_heads, heads // key_heads, -1, size, x.shape[-1])


def _decay(g: mx.array) -> mx.array:
    """Returns D_ti, the product of the decays after i up to t, 0 for i > t: [.., C] to [.., C, C].

    It is multiplied from i on, as a quotient of two products from the start would lose digits.
    """
    size = g.shape[-1]
    later = mx.where(_lower(size, -1), g[..., None], 1)
    return mx.where(_lower(size, 0), mx.cumprod(later, axis=-2), 0)


def _lower(size: int, diagonal: int) -> mx.array:
    return mx.tri(size, k=diagonal, dtype=mx.bool_)


def short_conv(
    projected: GDNProjections,
    convolution: ShortConvWeights,
    history: mx.array,
    num_kept: mx.array | None,
) -> tuple[mx.array, GDNWindow, mx.array]:
    """As `short_conv.convolve`."""
    *qkv, a, b = to_arrays(projected)
    batch, length, key_heads, key_dim = qkv[0].shape
    per_head = (batch, length, a.shape[2] * a.shape[3])
    flat = [t.reshape(batch, length, -1) for t in qkv]
    before = conv_tail(history, num_kept, convolution.size - 1)
    conv_input = mx.concatenate([before, mx.concatenate(flat, axis=-1)], axis=1)
    taps = range(convolution.size)
    shifted = [conv_input[:, i : i + length] for i in taps]
    mixed = silu_of_sum(*shifted, *(convolution.weight[:, i, 0] for i in taps))

    keyed = mixed[..., : 2 * key_heads * key_dim].reshape(batch, length, 2 * key_heads, key_dim)
    # x / sqrt(sum x^2 + eps), by the RMS norm, which takes the mean.
    unit = mx.fast.rms_norm(keyed, _scale(key_dim, keyed.dtype), EPS / key_dim)
    v = mixed[..., 2 * key_heads * key_dim :].reshape(*per_head, -1)
    by_key_head = a.shape[2:]
    log_decay, dt_bias = (w.reshape(by_key_head) for w in convolution[1:])
    g, beta = _gates(a, b, log_decay, dt_bias)
    window = GDNWindow(unit[:, :, key_heads:], v, g.reshape(per_head), beta.reshape(per_head))
    return unit[:, :, :key_heads], window, conv_input


def conv_tail(history: mx.array, num_kept: mx.array | None, tail: int) -> mx.array:
    """Returns the last `tail` (K-1) inputs of `short_conv` that each row keeps, [B, tail, C]."""
    if num_kept is None:
        return history
    rows, length, channels = history.shape
    # An array: a Python scalar would be compiled into the fused kernel, once for each length.
    firsts = mx.arange(0, rows * length, length)
    where = num_kept[:, None] + mx.arange(tail) + firsts[:, None]
    return history.reshape(-1, channels)[where]  # one index for all channels of an input


def silu_of_sum(*inputs: mx.array) -> mx.array:
    """Returns silu(x0 w0 + x1 w1 + ..), summed in float32; `inputs` are all x, then all w."""
    if gpu.backend() is None:  # There mlx's sigmoid would take most of the time.
        return activations.silu(_compiled_sum(*inputs)).astype(inputs[0].dtype)
    return _silu_of_sum(*inputs)


@functools.partial(mx.compile, shapeless=True)
def _silu_of_sum(*inputs: mx.array) -> mx.array:
    total = _sum_of_products(*inputs)
    return (total * mx.sigmoid(total)).astype(inputs[0].dtype)


def _sum_of_products(*inputs: mx.array) -> mx.array:
    half = len(inputs) // 2
    total = inputs[0].astype(mx.float32) * inputs[half].astype(mx.float32)
    for x, w in zip(inputs[1:half], inputs[half + 1 :], strict=True):
        total = total + x.astype(mx.float32) * w.astype(mx.float32)
    return total


_compiled_sum = mx.compile(_sum_of_products, shapeless=True)


@functools.partial(mx.compile, shapeless=True)
def _gates(
    a: mx.array, b: mx.array, log_decay: mx.array, dt_bias: mx.array
) -> tuple[mx.array, mx.array]:
    return compute_g(log_decay, a, dt_bias), mx.sigmoid(b)


@functools.cache
def _scale(dim: int, dtype: mx.Dtype) -> mx.array:
    scale = mx.full((dim,), dim**-0.5, dtype=dtype)
    mx.eval(scale)
    return scale
