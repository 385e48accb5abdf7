"""mlx-lm's gated attention and GatedDeltaNet layers on our caches: those of Qwen's hybrids."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.kernels.window import Convolution, Projected


class RaggedAttention(Qwen3NextAttention):
    """Runs a window of all rows on a `RaggedKVCache`. With any other cache it is mlx-lm's own.

    Both of mlx-lm's families use its Qwen3NextAttention.
    """

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """The positions of all rows, row after row, [1, B*T, H] to [1, B*T, H].

        One long axis is one matrix product; with a leading batch of B, mlx's CUDA backend reads
        quantized weights B times.
        """
        if not isinstance(cache, RaggedKVCache):
            return super().__call__(x, mask, cache)
        queries, gate = self.queries(x, cache.batch_size, cache.offset)
        keys, values = self.keys_values(x, cache.batch_size, cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        return self.attend(queries, gate, keys, values, mask)

    def queries(self, x: mx.array, batch: int, start: mx.array) -> tuple[mx.array, mx.array]:
        """Rotated queries [B, heads, T, D] of [1, B*T, H], and the gate [1, B*T, heads * D].

        Row b's first position is `start[b]` (int32 [B]).
        """
        doubled = self.q_proj(x).reshape(batch, -1, self.num_attention_heads, 2 * self.head_dim)
        queries, gate = mx.split(doubled, 2, axis=-1)
        queries = self.q_norm(queries).transpose(0, 2, 1, 3)
        return self.rope(queries, offset=start), gate.reshape(*x.shape[:2], -1)

    def keys_values(self, x: mx.array, batch: int, start: mx.array) -> tuple[mx.array, mx.array]:
        """Rotated keys and values, each [B, KV heads, T, D]; arguments as for `queries`."""
        shape = (batch, -1, self.num_key_value_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).reshape(shape)).transpose(0, 2, 1, 3)
        values = self.v_proj(x).reshape(shape).transpose(0, 2, 1, 3)
        return self.rope(keys, offset=start), values

    def attend(
        self,
        queries: mx.array,  # [B, heads, T, D]
        gate: mx.array,  # [1, B*T, heads * D]
        keys: mx.array,  # [B, KV heads, S, D]
        values: mx.array,
        mask: mx.array | None,  # bool, broadcast to [B, heads, T, S]
    ) -> mx.array:
        """Gated attention and the output projection: [1, B*T, H]."""
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )
        attended = attended.transpose(0, 2, 1, 3).reshape(gate.shape)
        return self.o_proj(attended * mx.sigmoid(gate))


class WindowedGatedDeltaNet(nn.Module):
    """Mixin over an mlx-lm GatedDeltaNet class that runs verify windows on a `GatedDeltaCache`.

    With any other cache, or none, the layer is mlx-lm's own.
    """

    def project(self, x: mx.array, batch: int) -> tuple[Projected, mx.array]:
        """The input projections of [1, B*T, H], and the output's gate z [B, T, Hv, Dv]."""
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
