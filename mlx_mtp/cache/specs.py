"""Layer specs: what each layer of a model caches, and how much it computes per position.

The memory plan is computed from the specs before anything is allocated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mlx_mtp.cache.layout import most_slots, rounded_capacity
from mlx_mtp.kernels.gdn_types import CHUNK, GDNShape

_FLOAT32 = _INT32 = 4


@dataclass(frozen=True)
class MLPSpec:
    """An MLP, or a mixture of experts."""

    hidden_size: int
    inner_size: int  # width of the MLP, or total width of the experts that one position uses
    num_experts: int = 0
    experts_per_token: int = 0

    def part(self, ranks: int) -> MLPSpec:
        """Returns the spec of one rank's part if `ranks` ranks share the MLP."""
        return replace(self, inner_size=self.inner_size // ranks)

    def activations(self) -> int:
        """Returns the activations of one position in the MLP, norms and residual stream."""
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

    def activations(self) -> int:
        """Returns the activations of one position in the layer without its MLP."""
        return 4 * (self.heads + self.kv_heads) * self.head_dim

    def token_nbytes(self, itemsize: int) -> int:
        """Returns the bytes of a token in the cache; `itemsize`: bytes per number."""
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

    def activations(self) -> int:
        """Returns the activations of one position in the layer without its MLP."""
        hk, dk, hv, dv, _ = self.shape
        # Projections and convolution; the chunkwise form has as many key heads as value heads.
        return 4 * (hk * dk + hv * dv) + self.shape.channels + hv * (4 * dk + 6 * CHUNK)

    def state_nbytes(self, itemsize: int) -> dict[str, int]:
        """Returns the bytes of a row's states, the same at any length, by name."""
        _, dk, hv, dv, kernel = self.shape
        return {
            "recurrent state (float32)": hv * dv * dk * _FLOAT32,
            "convolution": (kernel - 1) * self.shape.channels * itemsize,
        }

    def window_nbytes(self, depth: int, itemsize: int) -> int:
        """Returns the maximum bytes per row that a step of `depth` drafts leaves pending.

        On a GPU, in steps of many rows, keys share an array with queries and values, and decays one
        with write strengths (see `gated_delta_step.fits`).
        """
        _, _, hv, dv, _ = self.shape
        inputs, pending = self.shape.channels * itemsize, hv * (dv + 2) * _FLOAT32
        return (depth + 1) * (inputs + (inputs + pending if depth else 0))


LayerSpec = AttentionSpec | GatedDeltaSpec


def hybrid_layers(args: Any) -> list[LayerSpec]:
    """Returns the layers of a Qwen hybrid; `args` has the fields of config.json as attributes."""
    mlp = MLPSpec(args.hidden_size, getattr(args, "intermediate_size", 0))
    if getattr(args, "num_experts", 0):
        used = args.num_experts_per_tok
        inner = used * args.moe_intermediate_size + args.shared_expert_intermediate_size
        mlp = MLPSpec(args.hidden_size, inner, args.num_experts, used)
    heads = args.num_attention_heads, args.num_key_value_heads
    attention = AttentionSpec(mlp, *heads, args.head_dim)
    keys = args.linear_num_key_heads, args.linear_key_head_dim
    values = args.linear_num_value_heads, args.linear_value_head_dim
    linear = GatedDeltaSpec(mlp, GDNShape(*keys, *values, args.linear_conv_kernel_dim))
    numbers = range(1, args.num_hidden_layers + 1)
    return [linear if n % args.full_attention_interval else attention for n in numbers]


@dataclass(frozen=True)
class CacheMemory:
    """Computes the bytes that rows take in the caches."""

    layers: tuple[LayerSpec, ...]  # of the target model
    has_head: bool  # an MTP head, with a layer like the last attention layer
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
        """Bytes of a row's states and counters, the same at any length, by name."""
        total: Counter[str] = Counter()
        for layer in self.recurrent:
            total.update(layer.state_nbytes(self.itemsize))
        total["counters"] = _INT32  # the row's length
        return dict(total)

    def window_bytes(self, depth: int) -> int:
        """Returns the bytes per row that a step of `depth` drafts leaves pending in all layers."""
        pending = sum(layer.window_nbytes(depth, self.itemsize) for layer in self.recurrent)
        return pending + (_INT32 if pending else 0)

    def kv(self, tokens: int) -> int:
        """Returns the bytes of KV of a row with room for `tokens` tokens."""
        return rounded_capacity(tokens) * (self.kv_per_token + self.head_kv_per_token)

    def most_kv(self, tokens: int) -> int:
        """Returns `kv` plus the empty slots that a size class can have (see `Layout.arrange`)."""
        return self.kv(tokens) * (2 if most_slots(rounded_capacity(tokens)) > 1 else 1)

    def states_and_window(self, depth: int | None) -> int:
        """Returns the bytes of a row without KV; `depth` None: before its first decode step."""
        return sum(self.states.values()) + (0 if depth is None else self.window_bytes(depth))
