"""The multi-token-prediction head: one full-attention layer that drafts the token after next.

Position p of the head joins the target model's post-norm hidden state h_p with the next token,
x_{p+1}:

    z = fc(concat[norm(embed(x_{p+1})), norm(h_p)])      # embedding first
    m = norm(layer(z))                                   # lm_head(m) predicts x_{p+2}

A second draft feeds m, the drafted token and position p+1 to the same layer. This is the head of
Qwen3-Next: that of DeepSeek-V3's technical report, section 2.2, with gated attention.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels.gpu import backend
from mlx_mtp.models.gemm.routes import is_decode_sized
from mlx_mtp.models.joined import JoinedHead, can_be_joined


class MTPHead(nn.Module):
    """The head's weights and its passes: `write` caches positions, `run_layer` computes outputs."""

    def __init__(self, layer: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        layer.self_attn.queries_apart = True
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def combine(
        self, embeddings: mx.array, hidden: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Returns the layer's input z [N, H], and the keys and values that it caches,
        [N, 2, KV heads, D], from the next tokens' embeddings and the hidden states, both [N, H].
        """
        parts = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        z = self.fc(mx.concatenate(parts, axis=-1))
        layer = self.layers[0]
        return z, layer.self_attn.entries(layer.input_layernorm(z), positions)

    def queries(self, z: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the layer's queries for z [N, H], [N, heads, D], and `q_proj`'s whole output."""
        layer = self.layers[0]
        queries: tuple[mx.array, mx.array] = layer.self_attn.queries(
            layer.input_layernorm(z), positions
        )
        return queries

    def after(self, z: mx.array, attended: mx.array, doubled: mx.array) -> mx.array:
        """Returns the head's output m [N, H], from attention's and `q_proj`'s (with the gate)."""
        _, m = self.layers[0].after(z, self.norm.weight, attended, doubled)
        return m

    def write(
        self, embeddings: mx.array, hidden: mx.array, cache: RaggedKVCache, packing: Packing
    ) -> mx.array:
        """Write the keys and values of a pass's tokens; returns z."""
        if (joined := self._form(packing)) is not None:
            return joined.write(embeddings, hidden, cache, packing)
        z, entries = self._parts(hidden)[0](embeddings, hidden, packing.rope_positions)
        cache.write(packing, entries)
        return z

    def run_layer(self, z: mx.array, cache: RaggedKVCache, packing: Packing) -> mx.array:
        """Run the layer for tokens that `write` has cached; returns m [N, H] from their z."""
        if (joined := self._form(packing)) is not None:
            return joined.run_layer(z, cache, packing)
        _, project_queries, after = self._parts(z)
        queries, doubled = project_queries(z, packing.rope_positions)
        attended = cache.attend(packing, queries, self.layers[0].self_attn.scale)
        m: mx.array = after(z, attended, doubled)
        return m

    def _form(self, packing: Packing) -> JoinedHead | None:
        """Returns the joined form if it serves this pass, else None."""
        on_cpu = backend() is None and packing.rope_positions.ndim == 1
        return self._joined if on_cpu else None

    @cached_property
    def _joined(self) -> JoinedHead | None:
        return JoinedHead(self) if can_be_joined(self) else None

    def _parts(self, x: mx.array) -> tuple[Callable[..., Any], ...]:
        """Returns `combine`, `queries` and `after`, compiled for a GPU's decode steps.

        Prompts have too many shapes to compile.
        """
        if not is_decode_sized(x) or backend() is None:
            return self.combine, self.queries, self.after
        return self._compiled

    @cached_property
    def _compiled(self) -> tuple[Callable[..., Any], ...]:
        return mx.compile(self.combine), mx.compile(self.queries), mx.compile(self.after)
