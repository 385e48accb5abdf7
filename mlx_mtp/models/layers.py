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
from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels.gpu import backend
from mlx_mtp.kernels.window import Convolution, Projected
from mlx_mtp.models.few_rows import few, project
from mlx_mtp.world import summed


class RaggedAttention(Qwen3NextAttention):
    """Runs a window of all rows on a `RaggedKVCache`. By itself it is mlx-lm's own."""

    def before(self, x: mx.array, positions: mx.array) -> tuple[mx.array, ...]:
        """From tokens [1, N, H] at positions int32 [N]: queries, gate, keys, values [N, heads, D].

        All rows are one, so that a projection is one product.
        """
        doubled, *entries = project(x, self.q_proj, self.k_proj, self.v_proj)
        return *self._queries(doubled, positions), *self._entries(entries, positions)

    def mix(self, inputs: tuple[mx.array, ...], cache: RaggedKVCache) -> tuple[mx.array, mx.array]:
        """Attention [N, heads, D], and the gate."""
        queries, gate, keys, values = inputs
        cache.write(cache.packing, keys, values)
        return cache.attend(cache.packing, queries, self.scale), gate

    def after(self, attended: mx.array, gate: mx.array) -> mx.array:
        """[1, N, H]."""
        return summed(self.o_proj((attended * mx.sigmoid(gate)).flatten(1)[None]))

    def write(self, x: mx.array, cache: RaggedKVCache, packing: Packing) -> None:
        """Write the keys and values of a pass's tokens [1, N, H]."""
        entries = project(x, self.k_proj, self.v_proj)
        cache.write(packing, *self._entries(entries, packing.positions))

    def attend(self, x: mx.array, cache: RaggedKVCache, packing: Packing) -> mx.array:
        """Attention of tokens [1, N, H] whose keys and values have been written."""
        queries, gate = self._queries(self.q_proj(x), packing.positions)
        return self.after(cache.attend(packing, queries, self.scale), gate)

    def _queries(self, doubled: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        by_head = doubled.reshape(doubled.shape[1], self.num_attention_heads, -1)
        queries, gate = mx.split(by_head, 2, axis=-1)
        return self._rotated(self.q_norm(queries), positions), gate

    def _entries(self, entries: list[mx.array], positions: mx.array) -> tuple[mx.array, mx.array]:
        count = entries[0].shape[1]
        keys, values = (a.reshape(count, self.num_key_value_heads, -1) for a in entries)
        return self._rotated(self.k_norm(keys), positions), values

    def _rotated(self, x: mx.array, positions: mx.array) -> mx.array:
        return self.rope(x[:, :, None], offset=positions).squeeze(2)


class WindowedGatedDeltaNet(nn.Module):
    """Mixin over an mlx-lm GatedDeltaNet class that runs windows on a `GatedDeltaCache`."""

    def before(self, x: mx.array, positions: mx.array) -> tuple[Projected, mx.array]:
        """The input projections of [1, N, H], all [N, ..], and the output's gate z [N, Hv, Dv]."""
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
        return summed(self.out_proj(self.norm(outputs, z).flatten(1)[None]))


class PartedLayer(nn.Module):
    """Mixin over an mlx-lm decoder layer, for tokens [1, N, H] on a cache of ours."""

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, RaggedKVCache | GatedDeltaCache):
            return super().__call__(x, mask, cache)
        compiled = few(x) and backend() is not None
        before, after = self._compiled if compiled else (self._before, self._after)
        return after(x, *self._mixer.mix(before(x, cache.packing.positions), cache))

    @property
    def _mixer(self) -> Any:
        return self.linear_attn if self.is_linear else self.self_attn

    @cached_property
    def _compiled(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return mx.compile(self._before), mx.compile(self._after)

    def _before(self, x: mx.array, positions: mx.array) -> tuple[Any, ...]:
        inputs: tuple[Any, ...] = self._mixer.before(self.input_layernorm(x), positions)
        return inputs

    def _after(self, x: mx.array, *mixed: mx.array) -> mx.array:
        return self.add_mlp(x + self._mixer.after(*mixed))

    def add_mlp(self, x: mx.array) -> mx.array:
        """The residual stream [1, N, H] after the MLP, or the experts."""
        return x + summed(self.mlp(self.post_attention_layernorm(x)))
