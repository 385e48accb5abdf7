"""The slow reference of the recurrence: mlx-lm's loop over positions."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops

from mlx_mtp.kernels.window import Window


def gated_delta(
    q: mx.array, window: Window, state: mx.array, lengths: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Run the recurrence position by position.

    Args:
        q: queries, l2-normalised, [B, T, Hk, Dk].
        window: the other inputs.
        state: float32 [B, Hv, Dv, Dk].
        lengths: int32 [B], positions from there on leave the state as it was; None runs all.

    Returns:
        Outputs [B, T, Hv, Dv] in q's dtype, and the state after each row's last position.
    """
    mask = None if lengths is None else mx.arange(window.length) < lengths[:, None]
    return gated_delta_ops(
        q * q.shape[-1] ** -0.5, window.k, window.v, window.g, window.beta, state, mask
    )
