"""Layer specs: what each layer of a model keeps in the caches, and computes for a position.

The memory that serving takes is computed from them before anything is allocated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.layout import most_slots, rounded_capacity
from mlx_mtp.kernels.gdn_types import GDNShape
from mlx_mtp.kernels.portable import CHUNK

_FLOAT32 = _INT32 = 4


@dataclass(frozen=True)
class MLPSpec:
    """An MLP, or a mixture of experts."""

    hidden_size: int
    inner_size: int  # of the MLP, or of all experts together that one position uses
    num_experts: int = 0
    experts_per_token: int = 0

    def part(self, ranks: int) -> MLPSpec:
        """What one of so many ranks has."""
        return replace(self, inner_size=self.inner_size // ranks)

    def activations(self) -> int:
        """Numbers that one position has here, in the norms and in the residual stream."""
        experts = 2 * self.experts_per_token * self.hidden_size
        return 3 * self.inner_size + experts + 6 * self.hidden_size


@dataclass(frozen=True)
class AttentionSpec:
    """Full attention with a gate."""

    mlp: MLPSpec
    heads: int
    kv_heads: int
    head_dim: int

    def part(self, ranks: int) -> AttentionSpec:
        kv_heads = max(self.kv_heads // ranks, 1)
        return AttentionSpec(self.mlp.part(ranks), self.heads // ranks, kv_heads, self.head_dim)

    def make_cache(self, num_rows: int, dtype: mx.Dtype) -> RaggedKVCache:
        return RaggedKVCache()

    def activations(self) -> int:
        """Numbers that one position has in the layer, the MLP apart."""
        return 4 * (self.heads + self.kv_heads) * self.head_dim

    def token_nbytes(self, itemsize: int) -> int:
        """What a token takes in the cache, where a number has so many bytes."""
        return 2 * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class GatedDeltaSpec:
    """A GatedDeltaNet layer."""

    mlp: MLPSpec
    shape: GDNShape

    def part(self, ranks: int) -> GatedDeltaSpec:
        keys, values = self.shape.key_heads // ranks, self.shape.value_heads // ranks
        shape = self.shape._replace(key_heads=keys, value_heads=values)
        return GatedDeltaSpec(self.mlp.part(ranks), shape)

    def make_cache(self, num_rows: int, dtype: mx.Dtype) -> GatedDeltaCache:
        return GatedDeltaCache(num_rows, self.shape, dtype)

    def activations(self) -> int:
        """Numbers that one position has in the layer, the MLP apart."""
        hk, dk, hv, dv, _ = self.shape
        # Projections and convolution; the chunkwise rule has as many key heads as value heads.
        return 4 * (hk * dk + hv * dv) + self.shape.channels + hv * (4 * dk + 6 * CHUNK)

    def state_nbytes(self, itemsize: int) -> dict[str, int]:
        """What a row takes in the cache whatever its length, by what it is."""
        _, dk, hv, dv, kernel = self.shape
        return {
            "recurrent state (float32)": hv * dv * dk * _FLOAT32,
            "convolution": (kernel - 1) * self.shape.channels * itemsize,
        }

    def window_nbytes(self, depth: int, itemsize: int) -> int:
        """What a decode step of a row with so many drafts leaves to the next step."""
        hk, dk, hv, dv, _ = self.shape
        pending = hk * dk * itemsize + hv * dv * _FLOAT32 + hv * _FLOAT32
        return (depth + 1) * (self.shape.channels * itemsize + (pending if depth else 0))


LayerSpec = AttentionSpec | GatedDeltaSpec


@dataclass(frozen=True)
class CacheMemory:
    """Bytes that rows take in the caches."""

    layers: tuple[LayerSpec, ...]  # of the trunk
    has_head: bool  # whose layer is as the trunk's attention
    itemsize: int  # bytes of an activation

    @cached_property
    def attention(self) -> list[AttentionSpec]:
        return [layer for layer in self.layers if isinstance(layer, AttentionSpec)]

    @cached_property
    def recurrent(self) -> list[GatedDeltaSpec]:
        return [layer for layer in self.layers if isinstance(layer, GatedDeltaSpec)]

    @cached_property
    def kv_per_token(self) -> int:
        return sum(layer.token_nbytes(self.itemsize) for layer in self.attention)

    @cached_property
    def head_kv_per_token(self) -> int:
        return self.attention[-1].token_nbytes(self.itemsize) if self.has_head else 0

    @cached_property
    def states(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for layer in self.recurrent:
            total.update(layer.state_nbytes(self.itemsize))
        total["counters"] = _INT32  # its length
        return dict(total)

    def window(self, depth: int) -> int:
        """What each decode step with so many drafts leaves to the next, besides."""
        left = sum(layer.window_nbytes(depth, self.itemsize) for layer in self.recurrent)
        return left + (_INT32 if left else 0)

    def kv(self, tokens: int) -> int:
        """The KV of a row that has room for so many tokens."""
        return rounded_capacity(tokens) * (self.kv_per_token + self.head_kv_per_token)

    def most_kv(self, tokens: int) -> int:
        """With the empty slots that a class may have (see `Layout.arrange`)."""
        return self.kv(tokens) * (2 if most_slots(rounded_capacity(tokens)) > 1 else 1)

    def states_and_window(self, depth: int | None) -> int:
        """The rest of a row; `depth` is None between a prompt and the first step."""
        return sum(self.states.values()) + (0 if depth is None else self.window(depth))
