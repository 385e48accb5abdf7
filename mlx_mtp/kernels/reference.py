"""The slow reference of the recurrence: mlx-lm's loop over positions."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops

from mlx_mtp.kernels.window import Window


def gated_delta(
    q: mx.array,  # queries, l2-normalised, [B, T, Hk, Dk]
    window: Window,
    state: mx.array,  # float32 [B, Hv, Dv, Dk]
    lengths: mx.array | None = None,  # int32 [B]: positions from there on are not run; None: all
) -> tuple[mx.array, mx.array]:
    """Outputs [B, T, Hv, Dv] in q's dtype, and the state after each row's last position."""
    mask = None if lengths is None else mx.arange(window.length) < lengths[:, None]
    return gated_delta_ops(
        q * q.shape[-1] ** -0.5, window.k, window.v, window.g, window.beta, state, mask
    )
