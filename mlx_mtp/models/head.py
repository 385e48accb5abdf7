"""The multi-token-prediction head: one full-attention layer that drafts the token after next.

Row p of the head joins the trunk's post-norm hidden state h_p with the next token x_{p+1}:

    z = fc(concat[norm(embed(x_{p+1})), norm(h_p)])      # embedding first
    m = norm(layer(z))                                   # lm_head(m) predicts x_{p+2}

A second draft feeds m, the drafted token and position p+1 to the same layer. As published with
Qwen3-Next (the head of DeepSeek-V3's technical report, section 2.2, with gated attention).
"""

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.packing import Packing


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
        """The layer's input z from embeddings of the next tokens and hidden states: [N, H]."""
        parts = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        return self.fc(mx.concatenate(parts, axis=-1))

    def write(self, z: mx.array, cache: RaggedKVCache, packing: Packing) -> None:
        """Write the keys and values of z [N, H]."""
        layer = self.layers[0]
        layer.self_attn.write(layer.input_layernorm(z)[None], cache, packing)

    def run(self, z: mx.array, cache: RaggedKVCache, packing: Packing) -> mx.array:
        """The full pass for tokens that have been written: m [N, H] from z."""
        layer, z = self.layers[0], z[None]
        x = z + layer.self_attn.attend(layer.input_layernorm(z), cache, packing)
        return self.norm(layer.add_mlp(x))[0]
