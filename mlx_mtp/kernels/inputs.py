"""From a GatedDeltaNet layer's projections to the inputs of its recurrence."""

from __future__ import annotations

import mlx.core as mx

from mlx_mtp.kernels import inputs_kernel, portable_inputs
from mlx_mtp.kernels.portable_inputs import conv_tail as conv_tail
from mlx_mtp.kernels.window import Convolution, Projected, Window


def prepare(
    projected: Projected, convolution: Convolution, history: mx.array, num_kept: mx.array | None
) -> tuple[mx.array, Window, mx.array]:
    """Convolve q, k and v, apply silu, norm q and k, and compute the gates.

    Args:
        projected: of T positions.
        convolution: the layer's weights.
        history: the convolution's inputs so far, K-1 and the P of the window before, in the order
            q, k, v, [B, K-1+P, C].
        num_kept: how much of that window each row keeps, int32 [B]; None when P is 0.

    Returns:
        Queries [B, T, Hk, Dk], the recurrence's other inputs, and the convolution's own input
        [B, K-1+T, C], which is the history of the next window.
    """
    if inputs_kernel.fits(projected, convolution):
        return inputs_kernel.prepare(projected, convolution, history, num_kept)
    return portable_inputs.prepare(projected, convolution, history, num_kept)
