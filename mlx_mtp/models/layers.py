"""The layers that mlx-lm's instance is patched with: what surrounds a cache is apart from its use.

A step of few tokens takes the host longer than the GPU, so there the parts before and after a
layer's cache, which depend on their arguments alone, are compiled by mlx.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.kernels import norms
from mlx_mtp.kernels.gpu import MOST_ROWS, backend
from mlx_mtp.kernels.window import Convolution, Projected
from mlx_mtp.models.few_rows import few, project
from mlx_mtp.models.mixture import add_mlp
from mlx_mtp.world import summed


class RaggedAttention(Qwen3NextAttention):
    """Runs a window of all rows on a `RaggedKVCache`. By itself it is mlx-lm's own."""

    def before(self, x: mx.array, positions: mx.array) -> tuple[mx.array, ...]:
        """From tokens [1, N, H] at positions int32 [N]: queries, gate, keys, values [N, heads, D].

        All rows are one, so that a projection is one product.
        """
        doubled, keys, values = project(x, self.q_proj, self.k_proj, self.v_proj)
        queries, gate = self._halves(doubled)
        queries, keys = self._rotated(positions, queries, self._by_head(keys))
        return queries, gate, keys, self._by_head(values)

    def mix(self, inputs: tuple[mx.array, ...], cache: RaggedKVCache) -> tuple[mx.array, mx.array]:
        """Attention [N, heads, D], and the gate."""
        queries, gate, keys, values = inputs
        cache.write(cache.packing, keys, values)
        return cache.attend(cache.packing, queries, self.scale), gate

    def after(self, attended: mx.array, gate: mx.array) -> mx.array:
        """[1, N, H]."""
        return summed(self.o_proj((attended * mx.sigmoid(gate)).flatten(1)[None]))

    def entries(self, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """As `before`, keys and values alone."""
        keys, values = map(self._by_head, project(x, self.k_proj, self.v_proj))
        return self._rotated(positions, None, keys)[1], values

    def queries(self, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """As `before`, queries and gate alone."""
        queries, gate = self._halves(self.q_proj(x))
        return self._rotated(positions, queries, None)[0], gate

    def _halves(self, doubled: mx.array) -> Any:
        return mx.split(doubled.reshape(doubled.shape[1], self.num_attention_heads, -1), 2, axis=-1)

    def _by_head(self, entries: mx.array) -> mx.array:
        return entries.reshape(entries.shape[1], self.num_key_value_heads, -1)

    def _rotated(
        self, positions: mx.array, queries: mx.array | None, keys: mx.array | None
    ) -> list[Any]:
        """Queries and keys [N, heads, D], normed and rotated, in one launch where that serves."""
        parts = [(queries, self.q_norm), (keys, self.k_norm)]
        heads = self.num_attention_heads, self.num_key_value_heads
        rope = self.rope
        if len(positions) <= MOST_ROWS and type(rope) is nn.RoPE and not rope.traditional:
            angles = rope.dims, rope.base, rope.scale
            shape = norms.Shape(self.head_dim, self.q_norm.eps, *heads, *angles)
            weights = self.q_norm.weight, self.k_norm.weight
            if norms.ROTATE.fits(shape, weights[0].dtype):
                return norms.rotate(shape, queries, keys, *weights, positions)
        return [
            x if x is None else rope(norm(x)[:, :, None], offset=positions).squeeze(2)
            for x, norm in parts
        ]


class WindowedGatedDeltaNet(nn.Module):
    """Mixin over an mlx-lm GatedDeltaNet class that runs windows on a `GatedDeltaCache`."""

    def before(self, x: mx.array, positions: mx.array) -> tuple[Projected, mx.array]:
        """Projections of [1, N, H], all [N, ..], and the gate of the output, z [N, Hk, R, Dv]."""
        raise NotImplementedError

    def mix(
        self, inputs: tuple[Projected, mx.array], cache: GatedDeltaCache
    ) -> tuple[mx.array, mx.array]:
        """The recurrence's outputs [N, Hv, Dv], and the gate."""
        projected, z = inputs
        rows = Projected(*map(cache.packing.rows, projected))
        outputs = cache.run(rows, Convolution(self.conv1d.weight, self.A_log, self.dt_bias))
        return cache.packing.flat(outputs), z

    def after(self, outputs: mx.array, z: mx.array) -> mx.array:
        """[1, N, H]."""
        rows, heads, dim = outputs.shape
        shape = norms.Shape(dim, self.norm.eps, heads, ratio=z.shape[2])
        normed = norms.GATED_NORM(shape, rows, outputs, z, self.norm.weight)[0]
        return summed(self.out_proj(normed))


class PartedLayer(nn.Module):
    """Mixin over an mlx-lm decoder layer, which runs tokens on a cache of ours by `step`.

    Besides the residual stream x, [1, N, H], a layer gets and returns the norm of it that the next
    one begins with, so that a sum and its norm are one launch.
    """

    def step(
        self, x: mx.array, normed: mx.array, cache: Any, next_norm: mx.array
    ) -> list[mx.array]:
        """The layer's output, and that normed by the weight `next_norm`."""
        compiled = few(x) and backend() is not None
        before, after = self._compiled if compiled else (self._mixer.before, self.after)
        mixed = self._mixer.mix(before(normed, cache.packing.positions), cache)
        return after(x, next_norm, *mixed)

    def after(self, x: mx.array, next_norm: mx.array, *mixed: mx.array) -> list[mx.array]:
        """What follows the layer's cache."""
        norm = self.post_attention_layernorm
        width = norms.Shape(x.shape[-1], norm.eps)
        x, normed = norms.ADD_NORM(width, x.shape[1], x, self._mixer.after(*mixed), norm.weight)
        return add_mlp(x, normed, self.mlp, next_norm, norm.eps)

    @property
    def _mixer(self) -> Any:
        return self.linear_attn if self.is_linear else self.self_attn

    @cached_property
    def _compiled(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return mx.compile(self._mixer.before), mx.compile(self.after)
