"""Compares kernels with the portable code, in float32 on the CPU, on small random cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_mtp.kernels import portable
from mlx_mtp.kernels.window import Convolution, Pending, Projected, Shape, Window

Prepare = Callable[..., tuple[mx.array, Window, mx.array]]
# Half a unit in the last place of results near 1, over that of float32.
_COARSER = {mx.float32: 1, mx.float16: 1 << 13, mx.bfloat16: 1 << 16}


class Cases:
    """Draws inputs for layers of a shape, the same ones for the same seed."""

    def __init__(self, seed: int, shape: Shape, dtype: mx.Dtype) -> None:
        self._key = mx.random.key(seed)
        self.shape = shape
        self.dtype = dtype  # of the activations

    def normal(self, *shape: int) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return mx.random.normal(shape, key=key)

    def counts(self, rows: int, most: int) -> mx.array:
        """int32 [B], 0 to `most`, the two ends among them where there is room."""
        self._key, key = mx.random.split(self._key)
        drawn = mx.random.randint(0, most + 1, (rows,), dtype=mx.int32, key=key)
        row = mx.arange(rows)
        return mx.where(row == 0, most, mx.where(row == 1, 0, drawn)).astype(mx.int32)

    def state(self, rows: int) -> mx.array:
        """A recurrent state, float32 [B, Hv, Dv, Dk]."""
        return self.normal(rows, self.shape.value_heads, self.shape.value_dim, self.shape.key_dim)

    def window(self, rows: int, length: int) -> tuple[mx.array, Window]:
        """Queries [B, T, Hk, Dk] and a window; q and k are of length one."""
        hk, dk, hv, dv, _ = self.shape
        q, k = (self._unit(self.normal(rows, length, hk, dk)) for _ in range(2))
        v = self.normal(rows, length, hv, dv)
        beta = mx.sigmoid(self.normal(rows, length, hv))
        # Mostly 0.7 to 0.98: a product of many smaller ones is lost in denormals.
        g = mx.sigmoid(self.normal(rows, length, hv) + 2)
        q, k, v, beta = (a.astype(self.dtype) for a in (q, k, v, beta))
        # The decay stays float32, as the models have it.
        return q, Window(k, v, g, beta)

    def projected(self, rows: int, length: int) -> Projected:
        """What a layer's projections give: q, k and v slices of one array, as in the models."""
        hk, dk, hv, dv, _ = self.shape
        ratio = hv // hk
        wide = self.normal(rows, length, hk, 2 * dk + ratio * (dv + 2)).astype(self.dtype)
        ends = (dk, 2 * dk, 2 * dk + ratio * dv, 2 * dk + ratio * (dv + 1))
        q, k, v, a, b = mx.split(wide, ends, axis=-1)
        return Projected(q, k, v.reshape(rows, length, hk, ratio, dv), a, b)

    def convolution(self) -> Convolution:
        shape = self.shape
        weight = self.normal(shape.channels, shape.conv_size, 1).astype(self.dtype)
        return Convolution(weight, self.normal(shape.value_heads), self.normal(shape.value_heads))

    def history(self, rows: int, previous: int) -> mx.array:
        """The convolution's inputs so far, [B, K-1+P, C]."""
        length = self.shape.conv_size - 1 + previous
        return self.normal(rows, length, self.shape.channels).astype(self.dtype)

    def _unit(self, x: mx.array) -> mx.array:
        return x / mx.linalg.norm(x, axis=-1, keepdims=True)


def gated_delta(
    launch: Callable[..., tuple[mx.array, mx.array, mx.array]], shape: Shape, dtype: mx.Dtype
) -> float:
    """Run two windows by `gated_delta.launch`, the second on top of a part of the first.

    Returns the largest difference, in float32's measure.
    """
    cases = Cases(0, shape, dtype)
    (first_q, first), (q, second) = cases.window(2, 2), cases.window(2, 3)
    state = cases.state(2)
    kept = mx.array([1, 2], dtype=mx.int32)
    mx.eval(first_q, first, q, second, state, kept)

    _, folded, delta = launch(first_q, first, state, None, None)
    pending = Pending(first.k, delta, first.g)
    y, folded, delta = launch(q, second, folded, pending, kept)
    _, advanced, _ = launch(q, second, state, pending, kept, kept)
    mx.eval(y, folded, delta, advanced)
    with mx.stream(mx.cpu):
        _, _, true_pending = portable.run(first_q, first, state)
        true_folded = portable.fold(true_pending, kept, state)
        true_y, _, true_after = portable.run(q, second, true_folded)
        _, true_advanced, _ = portable.run(q, second.cut(kept), true_folded)
    true = [true_y, true_folded, true_after.delta, true_advanced]
    return _difference([y, folded, delta, advanced], true)


def inputs(launch: Prepare, shape: Shape, dtype: mx.Dtype) -> float:
    """As `gated_delta`, for `inputs.launch`."""
    cases = Cases(0, shape, dtype)
    convolution = cases.convolution()
    first, second = cases.projected(2, 2), cases.projected(2, 3)
    history = cases.history(2, 0)
    kept = mx.array([1, 2], dtype=mx.int32)
    mx.eval(convolution, first, second, history, kept)

    def both(prepare: Prepare) -> list[mx.array]:
        _, _, conv_input = prepare(first, convolution, history, None)
        q, window, conv_input = prepare(second, convolution, conv_input, kept)
        return [q, *window, conv_input]

    ours = both(launch)
    mx.eval(ours)
    with mx.stream(mx.cpu):
        return _difference(ours, both(portable.prepare))


def _difference(ours: Sequence[mx.array], true: Sequence[mx.array]) -> float:
    # A few units in the last place of a coarse type are no error. NumPy's maximum keeps a NaN.
    found = [
        float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max()) / _COARSER[a.dtype]
        for a, b in zip(ours, true, strict=True)
    ]
    return float(np.max(found))
