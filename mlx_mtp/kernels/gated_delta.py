"""The gated delta rule over a window, and the fold of an accepted prefix.

The recurrent state of a GatedDeltaNet layer can't be truncated, so a verify window that is
rejected in part needs the state before the window plus the accepted prefix. The rule writes one
rank-one term a position, `state <- g state + delta k^T`, so a window is remembered by its (k,
delta, g), and the next call folds the accepted prefix in before it runs its own window: no snapshot
is copied, nothing is restored, and a rejection costs nothing.

Source of the recurrence: Yang et al., "Gated Delta Networks" (2024), equation 10, in the form of
mlx-lm's `gated_delta_ops` (`reference.py`). A kernel runs it on a GPU (`gated_delta_kernel.py`),
matrix products elsewhere (`chunkwise.py`), the reference for one position.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_mtp.kernels import chunkwise, reference
from mlx_mtp.kernels import gated_delta_kernel as kernel
from mlx_mtp.kernels.window import Pending, Window


def fold_and_verify(
    q: mx.array,  # queries of the new window, l2-normalised, [B, T, Hk, Dk]
    window: Window,  # its other inputs
    state: mx.array,  # before the previous window, float32 [B, Hv, Dv, Dk]
    previous: Pending | None,  # the window before, of any length; None: nothing to fold
    num_kept: mx.array | None,  # how much of it each row keeps, int32 [B]
) -> tuple[mx.array, mx.array, Pending]:
    """Fold the previous window's accepted prefix, then run the new window on top of it.

    Returns:
        Outputs of the new window [B, T, Hv, Dv] in q's dtype, scaled by Dk^-1/2; the state after
        the fold, to keep until the new window is committed; and the new window, to be folded then.
    """
    if kernel.fits(window):
        outputs, state, delta = kernel.run(q, window, state, previous, num_kept)
        return outputs, state, Pending(window.k, delta, window.g)
    state = fold(previous, num_kept, state)
    outputs, _, pending = chunkwise.run(q, window, state, advance=False)
    return outputs, state, pending


def fold_and_advance(
    q: mx.array,
    window: Window,
    state: mx.array,
    previous: Pending | None,
    num_kept: mx.array | None,
    lengths: mx.array,  # int32 [B], 0 to T: how much of the new window each row keeps
) -> tuple[mx.array, mx.array]:
    """Fold, then run a window of which it is known beforehand what each row keeps.

    Returns:
        Outputs [B, T, Hv, Dv] in q's dtype, and the state after each row's last position. Positions
        from `lengths[b]` on leave the state as it was; their outputs are finite but mean nothing.
    """
    if kernel.fits(window):
        return kernel.run(q, window, state, previous, num_kept, lengths)[:2]
    state = fold(previous, num_kept, state)
    if window.length == 1:
        return reference.gated_delta(q, window, state, lengths)
    outputs, state, _ = chunkwise.run(q, window.cut(lengths), state)
    return outputs, state


def fold(previous: Pending | None, num_kept: mx.array | None, state: mx.array) -> mx.array:
    """The state after the first `num_kept[b]` (int32 [B]) positions of the previous window."""
    if previous is None:
        return state
    assert num_kept is not None
    if kernel.fits(previous):
        return kernel.fold(previous, num_kept, state)
    return chunkwise.fold(previous, num_kept, state)
