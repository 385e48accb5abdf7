"""From a layer's projections to the recurrence's inputs, in mlx operations."""

from __future__ import annotations

import functools

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g

from mlx_mtp.kernels.window import Convolution, Projected, Window

# Of the l2 norm of q and k, added to their sum of squares.
EPS = 1e-6


def prepare(
    projected: Projected, convolution: Convolution, history: mx.array, num_kept: mx.array | None
) -> tuple[mx.array, Window, mx.array]:
    """As `inputs.prepare`."""
    batch, length, key_heads, key_dim = projected.q.shape
    per_head = (batch, length, projected.v.shape[2] * projected.v.shape[3])
    flat = [t.reshape(batch, length, -1) for t in projected[:3]]
    tail = convolution.size - 1
    before = conv_tail(history, num_kept, tail)
    conv_input = mx.concatenate([before, mx.concatenate(flat, axis=-1)], axis=1)
    mixed = _convolve(conv_input, convolution.weight, length)

    keyed = mixed[..., : 2 * key_heads * key_dim].reshape(batch, length, 2 * key_heads, key_dim)
    # x / sqrt(sum x^2 + eps), by a kernel that takes the mean.
    unit = mx.fast.rms_norm(keyed, _scale(key_dim, keyed.dtype), EPS / key_dim)
    v = mixed[..., 2 * key_heads * key_dim :].reshape(*per_head, -1)
    by_key_head = projected.a.shape[2:]
    log_decay, dt_bias = (w.reshape(by_key_head) for w in convolution[1:])
    g, beta = _gates(projected.a, projected.b, log_decay, dt_bias)
    window = Window(unit[:, :, key_heads:], v, g.reshape(per_head), beta.reshape(per_head))
    return unit[:, :, :key_heads], window, conv_input


def conv_tail(history: mx.array, num_kept: mx.array | None, tail: int) -> mx.array:
    """The last `tail` (K-1) inputs that each row keeps of `prepare`'s history: [B, tail, C]."""
    if num_kept is None:
        return history
    where = num_kept[:, None] + mx.arange(tail)
    return mx.take_along_axis(history, where[..., None], axis=1)


def _convolve(conv_input: mx.array, weight: mx.array, length: int) -> mx.array:
    """silu of the depthwise causal convolution, fused: [B, T, C]."""
    taps = range(weight.shape[1])
    shifted = (conv_input[:, i : i + length] for i in taps)
    return _silu_of_sum(*shifted, *(weight[:, i, 0] for i in taps))


@functools.partial(mx.compile, shapeless=True)
def _silu_of_sum(*inputs: mx.array) -> mx.array:
    """silu(x0 w0 + x1 w1 + ..) of all x, then all w; summed in float32."""
    half = len(inputs) // 2
    total = inputs[0].astype(mx.float32) * inputs[half].astype(mx.float32)
    for x, w in zip(inputs[1:half], inputs[half + 1 :], strict=True):
        total = total + x.astype(mx.float32) * w.astype(mx.float32)
    return (total * mx.sigmoid(total)).astype(inputs[0].dtype)


@functools.partial(mx.compile, shapeless=True)
def _gates(
    a: mx.array, b: mx.array, log_decay: mx.array, dt_bias: mx.array
) -> tuple[mx.array, mx.array]:
    """Decay, float32, and write strength."""
    return compute_g(log_decay, a, dt_bias), mx.sigmoid(b)


@functools.cache
def _scale(dim: int, dtype: mx.Dtype) -> mx.array:
    scale = mx.full((dim,), dim**-0.5, dtype=dtype)
    mx.eval(scale)
    return scale
