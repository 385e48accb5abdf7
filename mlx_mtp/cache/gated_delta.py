"""Recurrent and convolution state of one GatedDeltaNet layer, with its pending window."""

from __future__ import annotations

import mlx.core as mx

from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels.gated_delta import fold, run
from mlx_mtp.kernels.inputs import prepare
from mlx_mtp.kernels.portable import conv_tail
from mlx_mtp.kernels.window import Convolution, Pending, Projected

_LONGEST_HISTORY = 16  # longer windows leave only their last inputs


class GatedDeltaCache:
    """State of B rows; `kernel_size` is the convolution's K.

    After a verify the state is still the one before the window (arrays are immutable: that is the
    snapshot), and the window is kept until the next call folds the accepted prefix into it.
    """

    packing: Packing  # of the pass

    def __init__(self, batch_size: int, kernel_size: int) -> None:
        self.batch_size = batch_size
        self.kernel_size = kernel_size
        self.state: mx.array | None = None  # float32 [B, Hv, Dv, Dk], before the pending window
        self.pending: Pending | None = None  # a window that has not been folded
        self.history: mx.array | None = None  # last inputs, [B, K-1+P, C], P of the last window
        self.num_kept: mx.array | None = None  # of the last window, int32 [B]; None when P is 0
        # The same of the next window, if it is known (a prefill, or one token a row): the state
        # then advances at once and nothing is left pending.
        self.coming: mx.array | None = None

    def make_mask(self, length: int) -> None:
        return  # mlx-lm asks for a mask of padding, which the cache handles itself.

    def run(self, projected: Projected, convolution: Convolution) -> mx.array:
        """Run a window of T positions after the kept ones: outputs [B, T, Hv, Dv]."""
        if self.state is None:
            self._clear(projected)
        assert self.state is not None and self.history is not None
        q, window, conv_input = prepare(projected, convolution, self.history, self.num_kept)
        outputs, self.state, self.pending = run(
            q, window, self.state, self.pending, self.num_kept, self.coming
        )
        self.history, self.num_kept = conv_input, self.coming
        if self.coming is not None and window.length > _LONGEST_HISTORY:
            self._trim()
        return outputs

    def _clear(self, projected: Projected) -> None:
        _, _, key_heads, key_dim = projected.q.shape
        ratio, value_dim = projected.v.shape[3:]
        heads = key_heads * ratio
        self.state = mx.zeros((self.batch_size, heads, value_dim, key_dim), dtype=mx.float32)
        channels = 2 * key_heads * key_dim + heads * value_dim
        shape = (self.batch_size, self.kernel_size - 1, channels)
        self.history = mx.zeros(shape, dtype=projected.q.dtype)

    def fold(self) -> None:
        """Advance the state by the kept part of the last window, and drop the rest."""
        if self.state is not None:
            self.state = fold(self.pending, self.num_kept, self.state)
            self.pending = None
            self._trim()

    def _trim(self) -> None:
        assert self.history is not None
        self.history = conv_tail(self.history, self.num_kept, self.kernel_size - 1)
        self.num_kept = None

    def select(self, rows: mx.array) -> GatedDeltaCache:
        self.fold()
        selected = GatedDeltaCache(rows.shape[0], self.kernel_size)
        if self.state is not None and self.history is not None:
            selected.state, selected.history = self.state[rows], self.history[rows]
        return selected

    def extend(self, other: GatedDeltaCache) -> None:
        self.fold()  # Their windows may differ in length.
        other.fold()
        self.batch_size += other.batch_size
        if self.state is None or other.state is None:
            assert self.state is None and other.state is None, "a batch joins one that never ran"
            return
        assert self.history is not None and other.history is not None
        self.state = mx.concatenate([self.state, other.state])
        self.history = mx.concatenate([self.history, other.history])

    def arrays(self) -> list[mx.array]:
        single = [self.state, self.history, self.num_kept]
        return [a for a in (*single, *(self.pending or ())) if a is not None]
