"""The multi-token-prediction head: one full-attention layer that drafts the token after next.

Row p of the head joins the trunk's post-norm hidden state h_p with the next token x_{p+1}:

    z = fc(concat[norm(embed(x_{p+1})), norm(h_p)])      # embedding first
    m = norm(layer(z))                                   # lm_head(m) predicts x_{p+2}

A second draft feeds m, the drafted token and position p+1 to the same layer. As published with
Qwen3-Next (the head of DeepSeek-V3's technical report, section 2.2, with gated attention).
"""

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.cache.kv import RaggedKVCache, causal_mask


class MTPHead(nn.Module):
    """The head's weights and its two kinds of pass: write past rows, run one row in full."""

    def __init__(self, layer: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def join(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        """The layer's input z from embeddings of the next tokens and hidden states: [B, T, H]."""
        parts = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        joined = self.fc(_as_one_row(mx.concatenate(parts, axis=-1)))
        return joined.reshape(hidden.shape)

    def write(self, z: mx.array, cache: RaggedKVCache, start: mx.array) -> None:
        """Write keys and values of z [B, T, H] from position `start[b]` (int32 [B]) on."""
        layer = self.layers[0]
        x = _as_one_row(layer.input_layernorm(z))
        keys, values = layer.self_attn.keys_values(x, z.shape[0], start)
        cache.write(keys, values, start)

    def run(self, z: mx.array, cache: RaggedKVCache, position: mx.array) -> mx.array:
        """The full pass for one row a sequence, written up to `position`: m [B, 1, H] from z."""
        layer = self.layers[0]
        z = _as_one_row(z)
        x = layer.input_layernorm(z)
        queries, gate = layer.self_attn.queries(x, position.shape[0], position)
        mask = causal_mask(position, 1, cache.limit)
        x = z + layer.self_attn.attend(queries, gate, *cache.fetch(), mask)
        m = self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))
        return m.swapaxes(0, 1)


def _as_one_row(x: mx.array) -> mx.array:
    """[B, T, H] to [1, B*T, H], so that a projection is one matrix product."""
    return x.reshape(1, -1, x.shape[-1])
