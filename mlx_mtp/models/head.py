"""The multi-token-prediction head: one full-attention layer that drafts the token after next.

Row p of the head joins the trunk's post-norm hidden state h_p with the next token x_{p+1}:

    z = fc(concat[norm(embed(x_{p+1})), norm(h_p)])      # embedding first
    m = norm(layer(z))                                   # lm_head(m) predicts x_{p+2}

As published with Qwen3-Next (the head of DeepSeek-V3's technical report, section 2.2, with a
gated-attention layer). A second draft feeds m, the drafted token and position p+1 to the same
layer.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.cache.kv import RaggedKVCache, causal_mask


class MTPHead(nn.Module):
    """The head's weights and its two kinds of pass: write past rows, run one row in full.

    Args:
        layer: a full-attention decoder layer of the trunk's family.
        hidden_size: H.
        eps: of the norms.
    """

    def __init__(self, layer: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def join(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        """The layer's input.

        Args:
            embeddings: of the next tokens, [B, T, H].
            hidden: the trunk's post-norm hidden states, or the head's own output, [B, T, H].

        Returns:
            z, [B, T, H].
        """
        parts = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        return self.fc(mx.concatenate(parts, axis=-1))

    def write(self, z: mx.array, cache: RaggedKVCache, start: mx.array) -> None:
        """Put keys and values of T rows into the cache: all that a past row needs.

        Args:
            z: as `join` gave it, [B, T, H].
            cache: the head's own.
            start: position of each row's first entry, int32 [B].
        """
        attention = self.layers[0].self_attn
        batch, length, _ = z.shape
        x = self.layers[0].input_layernorm(z)
        shape = (batch, length, attention.num_key_value_heads, -1)
        keys = attention.k_norm(attention.k_proj(x).reshape(shape)).transpose(0, 2, 1, 3)
        values = attention.v_proj(x).reshape(shape).transpose(0, 2, 1, 3)
        cache.write(attention.rope(keys, offset=start), values, start)

    def run(self, z: mx.array, cache: RaggedKVCache, position: mx.array) -> mx.array:
        """The full pass for one row a sequence, whose keys and values are written already.

        Args:
            z: [B, 1, H].
            cache: the head's own, valid up to and including `position`.
            position: int32 [B].

        Returns:
            m, [B, 1, H]: input of lm_head, and of `join` for the next draft.
        """
        layer = self.layers[0]
        x = z + self._attend(layer.input_layernorm(z), cache, position)
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))

    def _attend(self, x: mx.array, cache: RaggedKVCache, position: mx.array) -> mx.array:
        attention = self.layers[0].self_attn
        batch = x.shape[0]
        doubled = attention.q_proj(x).reshape(batch, 1, attention.num_attention_heads, -1)
        queries, gate = mx.split(doubled, 2, axis=-1)
        queries = attention.q_norm(queries).transpose(0, 2, 1, 3)
        keys, values = cache.fetch()
        attended = mx.fast.scaled_dot_product_attention(
            attention.rope(queries, offset=position),
            keys,
            values,
            scale=attention.scale,
            mask=causal_mask(position, 1, cache.limit),
        )
        attended = attended.transpose(0, 2, 1, 3).reshape(batch, 1, -1)
        return attention.o_proj(attended * mx.sigmoid(gate.reshape(batch, 1, -1)))
