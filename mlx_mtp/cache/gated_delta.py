"""Recurrent and convolution state of one GatedDeltaNet layer, with its pending window."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import mlx.core as mx

from mlx_mtp.cache.packing import KeptCounts
from mlx_mtp.kernels import cpu, gated_delta_step
from mlx_mtp.kernels.gdn_types import GDNProjections, GDNShape, PendingWindow, ShortConvWeights
from mlx_mtp.kernels.portable import conv_tail
from mlx_mtp.kernels.recurrence import fold, run_window
from mlx_mtp.kernels.short_conv import convolve

CacheArrays = tuple[mx.array, PendingWindow | None, mx.array]
"""The arrays of a `GatedDeltaCache`: `state`, `pending` and `history`."""

get_arrays: Callable[[GatedDeltaCache], CacheArrays] = attrgetter("state", "pending", "history")
"""Returns the arrays of a cache, for a compiled function, which takes and returns only arrays."""


class GatedDeltaCache:
    """States of B rows in a layer of `shape`, with activations of `dtype`.

    After a verify step `state` is still the state before the window (no snapshot is copied, as
    arrays are immutable). The window stays pending until the next call folds the tokens of it that
    were kept into the state. If it is known in advance how many are kept, the window advances the
    state itself and leaves nothing pending.
    """

    def __init__(self, num_rows: int, shape: GDNShape, dtype: mx.Dtype) -> None:
        hk, dk, hv, dv, self._conv_size = shape
        # Float32 [B, Hv, Dv, Dk], before the pending window.
        self.state = mx.zeros((num_rows, hv, dv, dk), dtype=mx.float32)
        self.pending: PendingWindow | None = None  # the last window, until it is folded
        # The convolution's last inputs, [B, K-1+P, C]: K-1 before the last window, and its P.
        channels = 2 * hk * dk + hv * dv
        self.history = mx.zeros((num_rows, self._conv_size - 1, channels), dtype=dtype)

    @classmethod
    def of(cls, arrays: CacheArrays) -> GatedDeltaCache:
        """Returns a cache of these arrays, to run one window."""
        cache = cls.__new__(cls)
        cache.hold(arrays)
        return cache

    def hold(self, arrays: CacheArrays) -> None:
        """Replace all arrays of the cache."""
        self.state, self.pending, self.history = arrays

    def run_window(
        self, projected: GDNProjections, convolution: ShortConvWeights, kept: KeptCounts
    ) -> mx.array:
        """Run a window of T positions after the kept ones; returns outputs [B, T, Hv, Dv]."""
        q, window, conv_input = convolve(projected, convolution, self.history, kept.before)
        held = self.state, self.pending, *kept
        outputs, self.state, self.pending = run_window(q, window, *held)
        self._keep(conv_input, window.length, kept)
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
        held = self.state, self.history, self.pending, *kept
        inputs = gated_delta_step.StepInputs(projected, convolution, gate, *held)
        outputs, self.state, self.pending, conv_input = gated_delta_step.run_kernel(inputs)
        self._keep(conv_input, projected.q.shape[1], kept)
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
        if self.pending is not None and before is not None:
            self.state = cpu.fold(self.pending, before, self.state)
        given = qkv, a, b, weights, self.state, self.history, before
        if now is None:
            outputs, self.pending, self.history = cpu.run_window(*given)
        else:
            outputs, self.state, self.history = cpu.run_token(*given, now)
            self.pending = None
        return outputs

    def fold(self, num_kept: mx.array | None) -> None:
        """Advance the state by the kept tokens of the last window, and drop the rest.

        `num_kept` is int32 [B], or None if the history has no window.
        """
        self.state = fold(self.pending, num_kept, self.state)
        self.pending = None
        self.history = conv_tail(self.history, num_kept, self._conv_size - 1)

    def select(self, rows: mx.array) -> GatedDeltaCache:
        """Returns a cache of these rows; call `fold` first."""
        selected = copy.copy(self)
        selected.state, selected.history = self.state[rows], self.history[rows]
        return selected

    def extend(self, other: GatedDeltaCache) -> None:
        """Append another cache's rows; call `fold` of both first."""
        self.state = mx.concatenate([self.state, other.state])
        self.history = mx.concatenate([self.history, other.history])

    def arrays(self) -> CacheArrays:
        """Returns a tree of the arrays to evaluate, whose other leaves mlx ignores."""
        return get_arrays(self)

    def _keep(self, conv_input: mx.array, length: int, kept: KeptCounts) -> None:
        self.history = conv_input
        if kept.drops_history(length):
            self.history = conv_tail(conv_input, kept.now, conv_input.shape[1] - length)
