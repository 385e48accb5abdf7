"""Recurrent and convolution state of one GatedDeltaNet layer, with the window that is pending.

After a verify the state stays where it was before the window (arrays are immutable: that is the
snapshot), and the window's inputs are kept until the next call folds the accepted prefix in. A
rejection so costs no restore and no second forward.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_mtp.kernels.gated_delta import Window, fold, fold_and_verify, gated_delta


class GatedDeltaCache:
    """State of B rows; B comes with the first window.

    Attributes:
        state: float32 [B, Hv, Dv, Dk], before the pending window; None until the first window.
        conv: the last K-1 inputs of the convolution, [B, K-1, C], before the pending window.
        pending: the window not yet folded, or None.
        pending_conv: its convolution input [B, K-1+T, C].
        num_kept: int32 [B], how much of the pending window each row keeps.
        lengths: int32 [B] when the coming window's kept lengths are known beforehand (prefill, or
            one token a row): the state then advances at once and nothing is left pending.
    """

    def __init__(self) -> None:
        self.state: mx.array | None = None
        self.conv: mx.array | None = None
        self.pending: Window | None = None
        self.pending_conv: mx.array | None = None
        self.num_kept: mx.array | None = None
        self.lengths: mx.array | None = None

    def make_mask(self, length: int) -> None:
        """mlx-lm asks for a mask of padded positions; the cache handles them itself."""
        return

    def conv_input(self, mixed: mx.array, kernel_size: int) -> mx.array:
        """The new inputs with the K-1 before them, pending window folded: [B, K-1+T, C]."""
        if self.pending_conv is not None:
            assert self.num_kept is not None
            self.conv = _conv_tail(self.pending_conv, self.num_kept, kernel_size - 1)
            self.pending_conv = None
        if self.conv is None:
            shape = (mixed.shape[0], kernel_size - 1, mixed.shape[-1])
            self.conv = mx.zeros(shape, dtype=mixed.dtype)
        return mx.concatenate([self.conv, mixed], axis=1)

    def update(self, q: mx.array, window: Window, conv_input: mx.array) -> mx.array:
        """Run a window on top of what is kept, and remember what its commit will need.

        Args:
            q: [B, T, Hk, Dk].
            window: the other inputs.
            conv_input: as `conv_input` gave it, [B, K-1+T, C].

        Returns:
            Outputs [B, T, Hv, Dv]; those of positions that are not kept mean nothing.
        """
        if self.state is None:
            heads, value_dim = window.v.shape[2:]
            shape = (q.shape[0], heads, value_dim, q.shape[-1])
            self.state = mx.zeros(shape, dtype=mx.float32)
        if self.lengths is None:
            outputs, self.state = fold_and_verify(
                q, window, self.state, self.pending, self.num_kept
            )
            self.pending, self.pending_conv = window, conv_input
            return outputs
        self.fold()
        mask = mx.arange(window.length) < self.lengths[:, None]
        outputs, self.state = gated_delta(q, window, self.state, mask)
        self.conv = _conv_tail(conv_input, self.lengths, conv_input.shape[1] - window.length)
        return outputs

    def fold(self) -> None:
        """Take what is kept of the pending window into the state."""
        if self.pending is not None:
            assert self.num_kept is not None and self.state is not None
            self.state = fold(self.pending, self.num_kept, self.state)
            if self.pending_conv is not None:
                tail = self.pending_conv.shape[1] - self.pending.length
                self.conv = _conv_tail(self.pending_conv, self.num_kept, tail)
            self.pending = self.pending_conv = self.num_kept = None

    def take(self, rows: mx.array) -> GatedDeltaCache:
        """A cache of these rows alone (int32 [B'], in the order given), folded."""
        self.fold()
        taken = GatedDeltaCache()
        if self.state is not None and self.conv is not None:
            taken.state, taken.conv = self.state[rows], self.conv[rows]
        return taken

    def extend(self, other: GatedDeltaCache) -> None:
        """Append the other's rows; both are folded first, as their windows may differ in length."""
        self.fold()
        other.fold()
        if self.state is None or other.state is None:
            assert self.state is None and other.state is None, "a batch joins one that never ran"
            return
        assert self.conv is not None and other.conv is not None
        self.state = mx.concatenate([self.state, other.state])
        self.conv = mx.concatenate([self.conv, other.conv])

    def arrays(self) -> list[mx.array]:
        """What must be evaluated with a step."""
        single = [self.state, self.conv, self.pending_conv, self.num_kept]
        return [a for a in (*single, *(self.pending or ())) if a is not None]


def _conv_tail(conv_input: mx.array, num_kept: mx.array, tail: int) -> mx.array:
    """The `tail` inputs that end at each row's last kept position: [B, tail, C]."""
    where = num_kept[:, None] + mx.arange(tail)
    return mx.take_along_axis(conv_input, where[..., None], axis=1)
