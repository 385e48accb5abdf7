"""Recurrent and convolution state of one GatedDeltaNet layer, with its pending window."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx

from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels import cpu, gated_delta_step
from mlx_mtp.kernels.gdn_types import GDNProjections, GDNShape, PendingWindow, ShortConvWeights
from mlx_mtp.kernels.portable import conv_tail
from mlx_mtp.kernels.recurrence import fold, run_window
from mlx_mtp.kernels.short_conv import convolve
from mlx_mtp.kernels.view import View

# `state`, `pending`, `history`, `num_kept` and `next_num_kept` of a `GatedDeltaCache`.
CacheArrays = tuple[mx.array, PendingWindow | None, mx.array, mx.array | None, mx.array | None]

_LONGEST_HISTORY = 16  # positions; after a longer window only the last K-1 inputs are kept


class GatedDeltaCache:
    """States of B rows in a layer of `shape`, with activations of `dtype`.

    After a verify step `state` is still the state before the window (no snapshot is copied, as
    arrays are immutable). The window stays pending until the next call folds the tokens of it that
    were kept into the state.
    """

    packing: Packing  # of the current pass

    def __init__(self, num_rows: int, shape: GDNShape, dtype: mx.Dtype) -> None:
        hk, dk, hv, dv, self._conv_size = shape
        # Float32 [B, Hv, Dv, Dk], before the pending window.
        self.state = mx.zeros((num_rows, hv, dv, dk), dtype=mx.float32)
        self.pending: PendingWindow | None = None  # the last window, until it is folded
        # The convolution's last inputs, [B, K-1+P, C]: K-1 before the last window, and its P.
        channels = 2 * hk * dk + hv * dv
        self.history = mx.zeros((num_rows, self._conv_size - 1, channels), dtype=dtype)
        self.num_kept: mx.array | None = None  # of the last window, int32 [B]; None when P is 0
        # The same for the next window, if known in advance (in a prefill, or with one token per
        # row): the window then advances the state itself and leaves nothing pending.
        self.next_num_kept: mx.array | None = None

    @classmethod
    def of(cls, held: CacheArrays) -> GatedDeltaCache:
        """Returns a cache of these arrays, to run one window; read its `held` afterwards."""
        cache = cls.__new__(cls)
        cache.held = held
        return cache

    @property
    def held(self) -> CacheArrays:
        """All arrays of the cache, for a compiled function, which takes and returns only arrays."""
        return self.state, self.pending, self.history, self.num_kept, self.next_num_kept

    @held.setter
    def held(self, held: CacheArrays) -> None:
        self.state, self.pending, self.history, self.num_kept, self.next_num_kept = held

    def run_window(self, projected: GDNProjections, convolution: ShortConvWeights) -> mx.array:
        """Run a window of T positions after the kept ones; returns outputs [B, T, Hv, Dv]."""
        q, window, conv_input = convolve(projected, convolution, self.history, self.num_kept)
        outputs, self.state, self.pending = run_window(
            q, window, self.state, self.pending, self.num_kept, self.next_num_kept
        )
        self._keep(conv_input, window.length)
        return outputs

    def run_gated(
        self, projected: GDNProjections, convolution: ShortConvWeights, *norm: Any
    ) -> mx.array:
        """`run_window` with an `OutputGate` of the fields `norm`, [B * T, Hv * Dv]."""
        gate = gated_delta_step.OutputGate(*norm)
        if not gated_delta_step.fits(projected, convolution):
            return gate.apply(self.run_window(projected, convolution))
        held = self.state, self.history, self.pending, self.num_kept, self.next_num_kept
        inputs = gated_delta_step.StepInputs(projected, convolution, gate, *held)
        outputs, self.state, self.pending, conv_input = gated_delta_step.run_kernel(inputs)
        self._keep(conv_input, projected.q.shape[1])
        return outputs

    def run_few(
        self, qkv: mx.array, a: mx.array, b: mx.array, weights: cpu.TokenWeights
    ) -> mx.array | None:
        """`run_window` on a CPU, of `qkv` [B, T, C] and `a`, `b` [B, T, Hv]; None in a prefill."""
        if self.next_num_kept is not None and qkv.shape[1] > 1:
            return None
        if self.pending is not None and self.num_kept is not None:
            self.state = cpu.fold(self.pending, self.num_kept, self.state)
        given = qkv, a, b, weights, self.state, self.history, self.num_kept
        if self.next_num_kept is None:
            outputs, self.pending, self.history = cpu.run_window(*given)
        else:
            outputs, self.state, self.history = cpu.run_token(*given, self.next_num_kept)
            self.pending = None
        self.num_kept = self.next_num_kept
        return outputs

    def fold(self) -> None:
        """Advance the state by the kept tokens of the last window, and drop the rest."""
        self.state = fold(self.pending, self.num_kept, self.state)
        self.pending = None
        self._trim(self._conv_size)

    def _keep(self, conv_input: mx.array, length: int) -> None:
        self.history, self.num_kept = conv_input, self.next_num_kept
        if self.next_num_kept is not None and length > _LONGEST_HISTORY:
            self._trim(conv_input.shape[1] - length + 1)

    def _trim(self, conv_size: int) -> None:
        self.history = conv_tail(self.history, self.num_kept, conv_size - 1)
        self.num_kept = None

    def select(self, rows: mx.array) -> GatedDeltaCache:
        self.fold()
        selected = copy.copy(self)
        selected.state, selected.history = self.state[rows], self.history[rows]
        return selected

    def extend(self, other: GatedDeltaCache) -> None:
        self.fold()  # Their windows may differ in length.
        other.fold()
        self.state = mx.concatenate([self.state, other.state])
        self.history = mx.concatenate([self.history, other.history])

    def arrays(self) -> list[mx.array]:
        kept = [] if self.num_kept is None else [self.num_kept]
        parts = self.pending or ()
        pending = [each.array if isinstance(each, View) else each for each in parts]
        return [self.state, self.history, *kept, *pending]
