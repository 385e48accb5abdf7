"""mlx-lm's GatedDeltaNet layer on our cache: the part that the families share."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.kernels.window import Convolution, Projected


class WindowedGatedDeltaNet(nn.Module):
    """Mixin over an mlx-lm GatedDeltaNet class that runs verify windows on a `GatedDeltaCache`.

    With any other cache, or none, the layer is mlx-lm's own.
    """

    def project(self, x: mx.array, batch: int) -> tuple[Projected, mx.array]:
        """The input projections, which differ between families.

        Args:
            x: the positions of all rows, row after row, [1, B*T, H].
            batch: B.

        Returns:
            What goes into the recurrence, and the gate z of its output, [B, T, Hv, Dv].
        """
        raise NotImplementedError

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        """Run a window: the positions of all rows, row after row, [1, B*T, H] to [1, B*T, H]."""
        if not isinstance(cache, GatedDeltaCache):
            return super().__call__(inputs, mask, cache)
        projected, z = self.project(inputs, cache.batch_size)
        outputs = cache.run(projected, Convolution(self.conv1d.weight, self.A_log, self.dt_bias))
        return self.out_proj(self.norm(outputs, z).reshape(*inputs.shape[:2], -1))
