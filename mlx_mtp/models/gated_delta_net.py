"""mlx-lm's GatedDeltaNet layer on our cache: the part that the families share."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.kernels.gated_delta import Window


class WindowedGatedDeltaNet(nn.Module):
    """Mixin over an mlx-lm GatedDeltaNet class that runs verify windows on a `GatedDeltaCache`.

    With any other cache, or none, the layer is mlx-lm's own.
    """

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """The input projections, which differ between families.

        Args:
            x: [B, T, H].

        Returns:
            Mixed q, k and v [B, T, C], gate z [B, T, Hv, Dv], and b and a, both [B, T, Hv].
        """
        raise NotImplementedError

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        """Run a window: [B, T, H] to [B, T, H]."""
        if not isinstance(cache, GatedDeltaCache):
            return super().__call__(inputs, mask, cache)
        mixed, z, b, a = self.project(inputs)
        conv_input = cache.conv_input(mixed, self.conv_kernel_size)
        q, k, v = self._heads(nn.silu(self.conv1d(conv_input)))
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        window = Window(k, v, compute_g(self.A_log, a, self.dt_bias), mx.sigmoid(b))
        outputs = self.norm(cache.update(q, window, conv_input), z)
        return self.out_proj(outputs.reshape(*inputs.shape[:2], -1))

    def _heads(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        batch, length, _ = mixed.shape
        q, k, v = mx.split(mixed, [self.key_dim, 2 * self.key_dim], axis=-1)
        keys = (batch, length, self.num_k_heads, self.head_k_dim)
        values = (batch, length, self.num_v_heads, self.head_v_dim)
        return q.reshape(keys), k.reshape(keys), v.reshape(values)
