"""mlx-lm's gated attention on our cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from mlx_mtp.cache.kv import RaggedKVCache


class RaggedAttention(Qwen3NextAttention):
    """Runs a window of all rows on a `RaggedKVCache`. With any other cache it is mlx-lm's own.

    Both families' attention is this class of mlx-lm's.
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

        Args:
            x: normed inputs.
            batch: B.
            start: position of each row's first, int32 [B].
        """
        doubled = self.q_proj(x).reshape(batch, -1, self.num_attention_heads, 2 * self.head_dim)
        queries, gate = mx.split(doubled, 2, axis=-1)
        queries = self.q_norm(queries).transpose(0, 2, 1, 3)
        return self.rope(queries, offset=start), gate.reshape(*x.shape[:2], -1)

    def keys_values(self, x: mx.array, batch: int, start: mx.array) -> tuple[mx.array, mx.array]:
        """Rotated keys and values, each [B, KV heads, T, D]; arguments as `queries`."""
        shape = (batch, -1, self.num_key_value_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).reshape(shape)).transpose(0, 2, 1, 3)
        values = self.v_proj(x).reshape(shape).transpose(0, 2, 1, 3)
        return self.rope(keys, offset=start), values

    def attend(
        self,
        queries: mx.array,
        gate: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: mx.array | None,
    ) -> mx.array:
        """Gated attention and the output projection: [1, B*T, H].

        Args:
            queries, gate: as `queries` gave them.
            keys, values: [B, KV heads, S, D].
            mask: bool, broadcast to [B, heads, T, S].
        """
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )
        attended = attended.transpose(0, 2, 1, 3).reshape(gate.shape)
        return self.o_proj(attended * mx.sigmoid(gate))
