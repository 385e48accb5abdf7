"""Random inputs for a GatedDeltaNet layer's kernels."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.kernels.window import Convolution, Projected, Window


class Shape(NamedTuple):
    """Hk, Dk, Hv, Dv of the recurrence, and K of the convolution."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_size: int = 4

    def __str__(self) -> str:
        return (
            f"Hk {self.key_heads}, Dk {self.key_dim}, Hv {self.value_heads}, "
            f"Dv {self.value_dim}, K {self.conv_size}"
        )

    @property
    def channels(self) -> int:
        """C, of the convolution over q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


QWEN3_NEXT_80B = Shape(16, 128, 32, 128)


class Cases:
    """Draws inputs, the same ones for the same seed.

    Args:
        seed: of the numbers.
        shape: of the layer.
        dtype: of the activations.
    """

    def __init__(self, seed: int, shape: Shape, dtype: mx.Dtype) -> None:
        self._key = mx.random.key(seed)
        self.shape = shape
        self.dtype = dtype

    def normal(self, *shape: int) -> mx.array:
        """float32."""
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
        """A layer's weights."""
        shape = self.shape
        weight = self.normal(shape.channels, shape.conv_size, 1).astype(self.dtype)
        return Convolution(weight, self.normal(shape.value_heads), self.normal(shape.value_heads))

    def history(self, rows: int, previous: int) -> mx.array:
        """The convolution's inputs so far, [B, K-1+P, C]."""
        length = self.shape.conv_size - 1 + previous
        return self.normal(rows, length, self.shape.channels).astype(self.dtype)

    def _unit(self, x: mx.array) -> mx.array:
        return x / mx.linalg.norm(x, axis=-1, keepdims=True)
