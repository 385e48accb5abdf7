"""From a GatedDeltaNet layer's projections to the inputs of its recurrence."""

from __future__ import annotations

import mlx.core as mx

from mlx_mtp.kernels import inputs_kernel, portable_inputs
from mlx_mtp.kernels.portable_inputs import conv_tail as conv_tail
from mlx_mtp.kernels.window import Convolution, Projected, Window


def prepare(
    projected: Projected,  # of T positions
    convolution: Convolution,
    history: mx.array,  # the convolution's inputs before, K-1 and a window of P, [B, K-1+P, C]
    num_kept: mx.array | None,  # how much of that window each row keeps, int32 [B]; None: P is 0
) -> tuple[mx.array, Window, mx.array]:
    """Convolve q, k and v, apply silu, norm q and k, and compute the gates.

    Returns:
        Queries [B, T, Hk, Dk], the recurrence's other inputs, and the convolution's own input
        [B, K-1+T, C], which is the history of the next window; its channels are those of q, k, v.
    """
    if inputs_kernel.fits(projected, convolution):
        return inputs_kernel.prepare(projected, convolution, history, num_kept)
    return portable_inputs.prepare(projected, convolution, history, num_kept)
