"""The gated delta rule over a window, and the fold of an accepted prefix (portable path).

The recurrent state of a GatedDeltaNet layer can't be truncated, so a verify window that is
rejected in part needs the state as it was before the window plus the accepted prefix. What is
kept of a window is therefore its inputs, not its states; the next call folds the accepted prefix
into the old state first. Source of the recurrence: Yang et al., "Gated Delta Networks" (2024),
equation 10, in the form of mlx-lm's `gated_delta_ops`, on which this path is built.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops


class Window(NamedTuple):
    """The inputs of T recurrent steps.

    Args:
        k: keys, l2-normalised, [B, T, Hk, Dk].
        v: values, [B, T, Hv, Dv].
        g: decay in (0, 1), float32, [B, T, Hv].
        beta: write strength, [B, T, Hv].
    """

    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array

    @property
    def length(self) -> int:
        """T, the number of positions."""
        return self.k.shape[1]


def gated_delta(
    q: mx.array, window: Window, state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Run the recurrence over a window.

    Args:
        q: queries, normalised and scaled by Dk^-1/2, [B, T, Hk, Dk].
        window: the other inputs.
        state: float32, [B, Hv, Dv, Dk].
        mask: bool [B, T]; a masked position leaves the state as it was and its output is undefined.

    Returns:
        Outputs [B, T, Hv, Dv] in q's dtype, and the state after the last unmasked position.
    """
    run = gated_delta_kernel if _metal_fits(window.k.shape[-1]) else gated_delta_ops
    return run(q, window.k, window.v, window.g, window.beta, state, mask)


def fold(window: Window, num_kept: mx.array, state: mx.array) -> mx.array:
    """Take the first `num_kept[b]` positions of each row's window into its state.

    Args:
        window: T positions that were verified.
        num_kept: int32 [B], 0 to T.
        state: the state before the window, float32 [B, Hv, Dv, Dk].

    Returns:
        The state after the kept positions, bitwise that of running them one by one.
    """
    mask = mx.arange(window.length) < num_kept[:, None]
    _, folded = gated_delta(window.k, window, state, mask)
    return folded


def fold_and_verify(
    q: mx.array,
    window: Window,
    state: mx.array,
    previous: Window | None,
    num_kept: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Fold the previous window's accepted prefix, then run the new window on top of it.

    Args:
        q: queries of the new window, [B, T, Hk, Dk].
        window: the new window.
        state: the state before the previous window, float32 [B, Hv, Dv, Dk].
        previous: the previous window, of any length; None when there is none to fold.
        num_kept: how much of it each row keeps, int32 [B].

    Returns:
        Outputs of the new window [B, T, Hv, Dv], and the state after the fold, which is the one
        to keep until the new window is committed.
    """
    if previous is not None:
        assert num_kept is not None
        state = fold(previous, num_kept, state)
    outputs, _ = gated_delta(q, window, state)
    return outputs, state


def _metal_fits(key_dim: int) -> bool:
    on_metal = mx.metal.is_available() and mx.default_device() == mx.gpu
    return on_metal and key_dim >= 32 and key_dim % 32 == 0
