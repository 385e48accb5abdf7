"""Inputs of a GatedDeltaNet layer (GDN) for a window, and what is kept of the window."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.kernels.view import Operand, to_arrays

CHUNK = 64  # positions that the portable form computes together


class GDNShape(NamedTuple):
    """Hk, Dk, Hv, Dv of the recurrence, and K of the convolution over queries, keys and values."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_size: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def sizes(self) -> dict[str, int]:
        return dict(zip(("Hk", "Dk", "Hv", "Dv"), self[:4], strict=True))


QWEN3_NEXT_80B = GDNShape(16, 128, 32, 128)


class GDNWindow(NamedTuple):
    """The inputs of T recurrent steps, queries apart; Hv is a multiple of Hk.

    Kernels read B and T from the arrays, so the array of a view begins with these two axes, too.
    """

    k: Operand  # keys, l2-normalised, [B, T, Hk, Dk]
    v: Operand  # values, [B, T, Hv, Dv]
    g: Operand  # decay in [0, 1], [B, T, Hv]
    beta: Operand  # write strength, [B, T, Hv]

    @property
    def length(self) -> int:
        return self.k.shape[1]

    def masked(self, lengths: mx.array) -> GDNWindow:
        """Returns the window; positions from `lengths[b]` (int32 [B]) on don't change the state."""
        mask = (mx.arange(self.length) < lengths[:, None])[..., None]
        k, v, g, beta = to_arrays(self)
        return GDNWindow(k, v, mx.where(mask, g, 1), mx.where(mask, beta, 0))


class GDNProjections(NamedTuple):
    """The outputs of a layer's input projections; R value heads share a key head."""

    q: Operand  # [B, T, Hk, Dk]
    k: Operand  # [B, T, Hk, Dk]
    v: Operand  # [B, T, Hk, R, Dv]
    a: Operand  # of the decay, [B, T, Hk, R]
    b: Operand  # of the write strength, [B, T, Hk, R]


class ShortConvWeights(NamedTuple):
    """A layer's weights between its projections and the recurrence."""

    weight: mx.array  # of the depthwise causal convolution over q, k and v, [C, K, 1]
    log_decay: mx.array  # A_log, [Hv]
    dt_bias: mx.array  # [Hv]

    @property
    def size(self) -> int:
        return self.weight.shape[1]


class PendingWindow(NamedTuple):
    """What is needed to fold an accepted prefix of a window, after the window has run."""

    k: Operand  # the window's keys, [B, T, Hk, Dk]
    delta: Operand  # what each position wrote along its key, float32 [B, T, Hv, Dv]
    g: Operand  # decay, [B, T, Hv]
