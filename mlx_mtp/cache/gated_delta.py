"""Recurrent and convolution state of one GatedDeltaNet layer, with its pending window."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx

from mlx_mtp.cache.packing import KeptCounts
from mlx_mtp.kernels import cpu, gated_delta_step
from mlx_mtp.kernels.gdn_types import GDNProjections, GDNShape, PendingWindow, ShortConvWeights
from mlx_mtp.kernels.portable import conv_tail
from mlx_mtp.kernels.recurrence import fold, run_window
from mlx_mtp.kernels.short_conv import convolve

CacheArrays = tuple[mx.array, PendingWindow | None, mx.array]
"""The arrays of a `GatedDeltaCache`: the state, the pending window and the history."""


class GatedDeltaCache:
    """States of B rows in a layer of `shape`, with activations of `dtype`.

    After a verify step the state is still that before the window (no snapshot is copied, as arrays
    are immutable). The window stays pending until the next call folds the tokens of it that were
    kept into the state. If it is known in advance how many are kept, the window advances the state
    itself and leaves nothing pending.
    """

    # The state is float32 [B, Hv, Dv, Dk], before the pending window. The history has the
    # convolution's last inputs, [B, K-1+P, C]: K-1 before the last window, and its P. One
    # attribute, as a compiled function takes and returns them.
    arrays: CacheArrays

    def __init__(self, num_rows: int, shape: GDNShape, dtype: mx.Dtype) -> None:
        hk, dk, hv, dv, self._conv_size = shape
        state = mx.zeros((num_rows, hv, dv, dk), dtype=mx.float32)
        channels = 2 * hk * dk + hv * dv
        history = mx.zeros((num_rows, self._conv_size - 1, channels), dtype=dtype)
        self.arrays = state, None, history

    @classmethod
    def of(cls, arrays: CacheArrays) -> GatedDeltaCache:
        """Returns a cache of these arrays, to run one window."""
        cache = cls.__new__(cls)
        cache.arrays = arrays
        return cache

    def run_window(
        self, projected: GDNProjections, convolution: ShortConvWeights, kept: KeptCounts
    ) -> mx.array:
        """Run a window of T positions after the kept ones; returns outputs [B, T, Hv, Dv]."""
        state, pending, history = self.arrays
        q, window, conv_input = convolve(projected, convolution, history, kept.before)
        outputs, state, pending = run_window(q, window, state, pending, *kept)
        self.arrays = state, pending, _history(conv_input, window.length, kept)
        return outputs

    def run_gated(
        self,
        projected: GDNProjections,
        convolution: ShortConvWeights,
        kept: KeptCounts,
        *norm: Any,
    ) -> mx.array:
        """`run_window` with an `OutputGate` of the fields `norm`, [B * T, Hv * Dv]."""
        gate = gated_delta_step.OutputGate(*norm)
        if not gated_delta_step.fits(projected, convolution):
            return gate.apply(self.run_window(projected, convolution, kept))
        state, pending, history = self.arrays
        held = state, history, pending, *kept
        inputs = gated_delta_step.StepInputs(projected, convolution, gate, *held)
        outputs, state, pending, conv_input = gated_delta_step.run_kernel(inputs)
        self.arrays = state, pending, _history(conv_input, projected.q.shape[1], kept)
        return outputs

    def run_few(
        self,
        qkv: mx.array,
        a: mx.array,
        b: mx.array,
        weights: cpu.TokenWeights,
        kept: KeptCounts,
    ) -> mx.array | None:
        """`run_window` on a CPU, of `qkv` [B, T, C] and `a`, `b` [B, T, Hv]; None in a prefill."""
        before, now = kept
        if now is not None and qkv.shape[1] > 1:
            return None
        state, pending, history = self.arrays
        if pending is not None and before is not None:
            state = cpu.fold(pending, before, state)
        given = qkv, a, b, weights, state, history, before
        if now is None:
            outputs, pending, history = cpu.run_window(*given)
        else:
            outputs, state, history = cpu.run_token(*given, now)
            pending = None
        self.arrays = state, pending, history
        return outputs

    def fold(self, num_kept: mx.array | None) -> None:
        """Advance the state by the kept tokens of the last window, and drop the rest.

        `num_kept` is int32 [B], or None if the history has no window.
        """
        state, pending, history = self.arrays
        history = conv_tail(history, num_kept, self._conv_size - 1)
        self.arrays = fold(pending, num_kept, state), None, history

    def select(self, rows: mx.array) -> GatedDeltaCache:
        """Returns a cache of these rows; call `fold` first."""
        selected = copy.copy(self)
        state, _, history = self.arrays
        selected.arrays = state[rows], None, history[rows]
        return selected

    def extend(self, other: GatedDeltaCache) -> None:
        """Append another cache's rows; call `fold` of both first."""
        (state, _, history), (more, _, others) = self.arrays, other.arrays
        self.arrays = mx.concatenate([state, more]), None, mx.concatenate([history, others])


def _history(conv_input: mx.array, length: int, kept: KeptCounts) -> mx.array:
    if not kept.drops_history(length):
        return conv_input
    return conv_tail(conv_input, kept.now, conv_input.shape[1] - length)
