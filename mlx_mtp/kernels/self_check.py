"""Small random cases on which a kernel is compared with the portable code in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_mtp.kernels import chunkwise, portable_inputs
from mlx_mtp.kernels.window import Convolution, Pending, Projected, Window

Verify = Callable[..., tuple[mx.array, mx.array, Pending]]
Advance = Callable[..., tuple[mx.array, mx.array]]
Prepare = Callable[..., tuple[mx.array, Window, mx.array]]

# Half a unit in the last place of results near 1, over that of float32.
_COARSER = {mx.float32: 1, mx.float16: 1 << 13, mx.bfloat16: 1 << 16}


def gated_delta(
    verify: Verify, advance: Advance, shape: tuple[int, int, int, int], dtype: mx.Dtype
) -> float:
    """Run two windows through the kernel, the second on top of a part of the first.

    Args:
        verify, advance: the kernel's `fold_and_verify` and `fold_and_advance`.
        shape: Hk, Dk, Hv, Dv.
        dtype: of q, k, v and beta.

    Returns:
        The largest difference, in float32's measure.
    """
    draw = _Draw()
    (first_q, first), (q, second) = (_window(draw, length, shape, dtype) for length in (2, 3))
    _, key_dim, heads, value_dim = shape
    state = draw.normal(2, heads, value_dim, key_dim)
    kept = mx.array([1, 2], dtype=mx.int32)
    mx.eval(first_q, first, q, second, state, kept)

    _, folded, pending = verify(first_q, first, state, None, None)
    y, folded, after = verify(q, second, folded, pending, kept)
    _, advanced = advance(q, second, state, pending, kept, kept)
    mx.eval(y, folded, after, advanced)
    with mx.stream(mx.cpu):
        _, _, true_pending = chunkwise.run(first_q, first, state)
        true_folded = chunkwise.fold(true_pending, kept, state)
        true_y, _, true_after = chunkwise.run(q, second, true_folded)
        _, true_advanced, _ = chunkwise.run(q, second.cut(kept), true_folded)
    ours, true = [folded, after.delta, advanced], [true_folded, true_after.delta, true_advanced]
    return max(_difference(ours, true), _difference([y], [true_y]))


def inputs(prepare: Prepare, shape: tuple[int, int, int, int], size: int, dtype: mx.Dtype) -> float:
    """Run two windows through the kernel that prepares the recurrence's inputs.

    Args:
        prepare: the kernel's.
        shape: Hk, Dk, Hv, Dv.
        size: K of the convolution.
        dtype: of the projections.

    Returns:
        The largest difference, in float32's measure.
    """
    draw = _Draw()
    key_heads, key_dim, heads, value_dim = shape
    channels = 2 * key_heads * key_dim + heads * value_dim
    convolution = Convolution(
        draw.normal(channels, size, 1).astype(dtype), draw.normal(heads), draw.normal(heads)
    )
    ratio = heads // key_heads

    def projected(length: int) -> Projected:
        q, k = (draw.normal(2, length, key_heads, key_dim).astype(dtype) for _ in range(2))
        v = draw.normal(2, length, key_heads, ratio, value_dim).astype(dtype)
        a, b = (draw.normal(2, length, key_heads, ratio).astype(dtype) for _ in range(2))
        return Projected(q, k, v, a, b)

    first, second = projected(2), projected(3)
    history = draw.normal(2, size - 1, channels).astype(dtype)
    kept = mx.array([1, 2], dtype=mx.int32)
    mx.eval(convolution, first, second, history, kept)

    def both(run: Prepare) -> list[mx.array]:
        _, _, conv_input = run(first, convolution, history, None)
        q, window, conv_input = run(second, convolution, conv_input, kept)
        return [q, *window, conv_input]

    ours = both(prepare)
    mx.eval(ours)
    with mx.stream(mx.cpu):
        return _difference(ours, both(portable_inputs.prepare))


class _Draw:
    """Normal numbers, the same ones each time."""

    def __init__(self) -> None:
        self._keys = iter(mx.random.split(mx.random.key(0), 64))

    def normal(self, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(self._keys))


def _window(
    draw: _Draw, length: int, shape: tuple[int, int, int, int], dtype: mx.Dtype
) -> tuple[mx.array, Window]:
    key_heads, key_dim, heads, value_dim = shape
    q, k = (draw.normal(2, length, key_heads, key_dim) for _ in range(2))
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = draw.normal(2, length, heads, value_dim)
    g, beta = (mx.sigmoid(draw.normal(2, length, heads)) for _ in range(2))
    return q.astype(dtype), Window(k.astype(dtype), v.astype(dtype), g, beta.astype(dtype))


def _difference(ours: Sequence[mx.array], true: Sequence[mx.array]) -> float:
    pairs = zip(ours, true, strict=True)
    # A few units in the last place of a coarse type are no error.
    return max(
        float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max()) / _COARSER[a.dtype]
        for a, b in pairs
    )
