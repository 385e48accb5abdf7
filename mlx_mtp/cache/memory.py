"""What the caches of a batch take, computed from a model's config.

The one place that repeats what `RaggedKVCache` and `GatedDeltaCache` hold; a test compares it with
the arrays of real caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_mtp.cache.kv import rounded_capacity

_FLOAT32 = _INT32 = 4


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Bytes that rows take in the caches; weights and activations are not counted.

    Args:
        attention_layers: of the trunk, each with a KV cache.
        linear_layers: of the trunk, each with a recurrent and a convolution state.
        has_head: the MTP head's one layer has a KV cache too.
        kv_heads: of an attention layer.
        head_dim: of one of them.
        key_heads, key_dim, value_heads, value_dim: Hk, Dk, Hv and Dv of a GatedDeltaNet layer.
        conv_kernel: K, width of its convolution.
        itemsize: bytes of an activation (bfloat16 2, float32 4).
    """

    attention_layers: int
    linear_layers: int
    has_head: bool
    kv_heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_kernel: int
    itemsize: int

    @classmethod
    def of(cls, args: Any, *, has_head: bool, itemsize: int) -> CacheMemory:
        """From mlx-lm's arguments of the language model."""
        attention = args.num_hidden_layers // args.full_attention_interval
        return cls(
            attention_layers=attention,
            linear_layers=args.num_hidden_layers - attention,
            has_head=has_head,
            kv_heads=args.num_key_value_heads,
            head_dim=args.head_dim,
            key_heads=args.linear_num_key_heads,
            key_dim=args.linear_key_head_dim,
            value_heads=args.linear_num_value_heads,
            value_dim=args.linear_value_head_dim,
            conv_kernel=args.linear_conv_kernel_dim,
            itemsize=itemsize,
        )

    @property
    def kv_per_token(self) -> int:
        """Keys and values of the trunk."""
        return self.attention_layers * self._kv_layer

    @property
    def head_kv_per_token(self) -> int:
        """Keys and values of the head."""
        return self._kv_layer if self.has_head else 0

    @property
    def recurrent(self) -> int:
        """The recurrent states of a row, [Hv, Dv, Dk] in float32."""
        return self.linear_layers * self.value_heads * self.value_dim * self.key_dim * _FLOAT32

    @property
    def convolution(self) -> int:
        """The last K-1 inputs of a row's convolutions."""
        return (self.conv_kernel - 1) * self._conv_input

    @property
    def counters(self) -> int:
        """Lengths of a row, shared by all layers."""
        return _INT32 * (2 if self.has_head else 1)

    @property
    def row(self) -> int:
        """What a row takes whatever its length, when its prompt has been computed."""
        return self.recurrent + self.convolution + self.counters

    def window(self, depth: int) -> int:
        """What each decoding step leaves to the next, besides: its window.

        Args:
            depth: drafts; without any, all that a window leaves is its token's convolution input.
        """
        length = depth + 1
        kept = length * self._conv_input + _INT32
        if depth == 0:
            return kept
        keys = self.key_heads * self.key_dim * self.itemsize
        written = self.value_heads * (self.value_dim + 1) * _FLOAT32  # with the decay
        return kept + length * self.linear_layers * (keys + written)

    def batch(self, rows: int, tokens: int, depth: int | None) -> int:
        """All that rows take. Each has room for the longest of them, rounded up.

        Args:
            rows: how many.
            tokens: that the longest has in the cache, and the windows that are on their way to it.
            depth: drafts a step; None after a prompt and before the first step.
        """
        kv = rounded_capacity(tokens) * (self.kv_per_token + self.head_kv_per_token)
        return rows * (kv + self.row + (0 if depth is None else self.window(depth)))

    @property
    def _kv_layer(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def _conv_input(self) -> int:
        """One position's inputs of all convolutions: queries, keys and values."""
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return self.linear_layers * channels * self.itemsize
