"""Recurrent and convolution state of one GatedDeltaNet layer, with the window that is pending.

After a verify the state stays where it was before the window (arrays are immutable: that is the
snapshot), and the window's inputs are kept until the next call folds the accepted prefix in. A
rejection so costs no restore and no second forward.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_mtp.kernels.gated_delta import fold, fold_and_advance, fold_and_verify
from mlx_mtp.kernels.inputs import conv_tail, prepare
from mlx_mtp.kernels.window import Convolution, Pending, Projected

# Longer windows leave only their last inputs behind.
_LONGEST_HISTORY = 16


class GatedDeltaCache:
    """State of B rows.

    Args:
        batch_size: B.
        kernel_size: K, of the convolution.

    Attributes:
        state: float32 [B, Hv, Dv, Dk], before the pending window; None until the first window.
        pending: what a fold needs of the window not yet folded, or None.
        history: the convolution's last inputs, K-1 and the P of the last window, [B, K-1+P, C];
            None until the first window.
        num_kept: how much of the last window each row keeps, int32 [B]; None when P is 0.
        coming: int32 [B], how much of the coming window each row will keep where that is known
            beforehand (prefill, or one token a row): the state then advances at once and nothing
            is left pending.
    """

    def __init__(self, batch_size: int, kernel_size: int) -> None:
        self.batch_size = batch_size
        self.kernel_size = kernel_size
        self.state: mx.array | None = None
        self.pending: Pending | None = None
        self.history: mx.array | None = None
        self.num_kept: mx.array | None = None
        self.coming: mx.array | None = None

    def make_mask(self, length: int) -> None:
        """mlx-lm asks for a mask of padded positions; the cache handles them itself."""
        return

    def run(self, projected: Projected, convolution: Convolution) -> mx.array:
        """Run a window on top of what is kept, and remember what its commit will need.

        Args:
            projected: of the window's T positions.
            convolution: the layer's weights.

        Returns:
            Outputs [B, T, Hv, Dv]; those of positions that are not kept mean nothing.
        """
        self._begin(projected)
        assert self.state is not None and self.history is not None
        q, window, conv_input = prepare(projected, convolution, self.history, self.num_kept)
        before = (q, window, self.state, self.pending, self.num_kept)
        if self.coming is None:
            outputs, self.state, self.pending = fold_and_verify(*before)
            self.num_kept = None
        else:
            outputs, self.state = fold_and_advance(*before, self.coming)
            self.pending, self.num_kept = None, self.coming
        self.history = conv_input
        if self.coming is not None and window.length > _LONGEST_HISTORY:
            self._trim()
        return outputs

    def _begin(self, projected: Projected) -> None:
        """Make the empty state before the first window."""
        if self.state is not None:
            return
        _, _, key_heads, key_dim = projected.q.shape
        ratio, value_dim = projected.v.shape[3:]
        heads = key_heads * ratio
        self.state = mx.zeros((self.batch_size, heads, value_dim, key_dim), dtype=mx.float32)
        channels = 2 * key_heads * key_dim + heads * value_dim
        shape = (self.batch_size, self.kernel_size - 1, channels)
        self.history = mx.zeros(shape, dtype=projected.q.dtype)

    def fold(self) -> None:
        """Take what is kept of the last window into the state, and forget the rest of it."""
        if self.state is not None:
            self.state = fold(self.pending, self.num_kept, self.state)
            self.pending = None
            self._trim()

    def _trim(self) -> None:
        assert self.history is not None
        self.history = conv_tail(self.history, self.num_kept, self.kernel_size - 1)
        self.num_kept = None

    def take(self, rows: mx.array) -> GatedDeltaCache:
        """A cache of these rows alone (int32 [B'], in the order given), folded."""
        self.fold()
        taken = GatedDeltaCache(rows.shape[0], self.kernel_size)
        if self.state is not None and self.history is not None:
            taken.state, taken.history = self.state[rows], self.history[rows]
        return taken

    def extend(self, other: GatedDeltaCache) -> None:
        """Append the other's rows; both are folded first, as their windows may differ in length."""
        self.fold()
        other.fold()
        self.batch_size += other.batch_size
        if self.state is None or other.state is None:
            assert self.state is None and other.state is None, "a batch joins one that never ran"
            return
        assert self.history is not None and other.history is not None
        self.state = mx.concatenate([self.state, other.state])
        self.history = mx.concatenate([self.history, other.history])

    def arrays(self) -> list[mx.array]:
        """What must be evaluated with a step."""
        single = [self.state, self.history, self.num_kept]
        return [a for a in (*single, *(self.pending or ())) if a is not None]
