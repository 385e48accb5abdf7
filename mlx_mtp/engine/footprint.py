"""What a model takes in memory while it is served: by rows, tokens and the size of a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mtp.cache.memory import CacheMemory
from mlx_mtp.models.draft_head import row_nbytes
from mlx_mtp.models.loaded import LoadedModel

# While rows join, leave or grow, the old arrays and the new ones are there together.
_COPIES = 2
# Windows launched and not read, and positions run beside them or by the head's recursion.
_WINDOWS = 3
# How much too long a rectangle may stay (cache/kv.py), and the stride that attention reads in.
_ROUNDING = 256 + 64
# Logits, their processed form, noise, and what sorting them for top-p takes (float32).
_LOGITS = 6
# Measured: a chunk takes up to this much more than the arrays of one layer of each kind.
_MARGIN = 1.5
_CHUNK = 64
"""Positions that the chunkwise gated delta rule computes at once (kernels/chunkwise.py)."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model's demands.

    Args:
        weights: bytes, the head's not included.
        head: bytes of the MTP head, its reduced lm_head included.
        caches: of its rows.
        depth: most drafts a step.
        heads: of an attention layer.
        layer_floats: numbers that one position has in a layer of each kind together.
        vocab_size: logits of a position.
    """

    weights: int
    head: int
    caches: CacheMemory
    depth: int
    heads: int
    layer_floats: int
    vocab_size: int

    def rows(self, rows: int, tokens: int) -> int:
        """Most bytes that rows take, prefill apart, the longest of which holds `tokens` tokens.

        A copy of the whole is counted: it is made when rows join, leave or grow.
        """
        reach = tokens + _WINDOWS * (self.depth + 1) + _ROUNDING
        caches = _COPIES * self.caches.batch(rows, reach, self.depth)
        window = rows * (self.depth + 1)
        scores = window * self.heads * reach * self.caches.itemsize
        return caches + scores + window * self.vocab_size * 4 * _LOGITS

    def chunk(self, step: int, tokens: int) -> int:
        """Most bytes that a prefill chunk takes beside the caches.

        The attention scores of one layer, [heads, step, tokens], and their mask; linear in the
        prompt. mlx's fused kernels make none, but not every head size and backend has one.

        Args:
            step: positions in the chunk, those of all rows together.
            tokens: of the longest prompt.
        """
        scores = step * tokens * (self.heads * self.caches.itemsize + 1)
        layers = step * self.layer_floats * max(self.caches.itemsize, 4)
        return scores + int(_MARGIN * layers) + self.vocab_size * 4 * _LOGITS


def footprint(model: LoadedModel, depth: int, num_draft_ids: int | None = None) -> Footprint:
    """A loaded model's. No weight is read.

    Args:
        model: with its head if that drafts.
        depth: most drafts a step; not used without a head.
        num_draft_ids: size of a reduced draft vocabulary.
    """
    has_head = model.head is not None
    head = 0 if model.head is None else _nbytes(model.head)
    extra = 0 if num_draft_ids is None or not has_head else num_draft_ids * row_nbytes(model)
    return footprint_of(
        model.causal_lm.args,
        weights=_nbytes(model.model) - head,
        head=head + extra,
        has_head=has_head,
        itemsize=model.causal_lm.model.norm.weight.dtype.size,
        depth=depth,
    )


def footprint_of(
    args: Any, *, weights: int, head: int, has_head: bool, itemsize: int, depth: int
) -> Footprint:
    """A model's, by its config and the size of its weights.

    Args:
        args: mlx-lm's, of the language model.
        weights: bytes, the head's not included.
        head: bytes of the MTP head; 0 if they are among those of the weights.
        has_head: it drafts.
        itemsize: bytes of an activation.
        depth: most drafts a step; not used without a head.
    """
    return Footprint(
        weights=weights,
        head=head,
        caches=CacheMemory.of(args, has_head=has_head, itemsize=itemsize),
        depth=depth if has_head else 0,
        heads=args.num_attention_heads,
        layer_floats=_layer_floats(args),
        vocab_size=int(args.vocab_size),
    )


def _nbytes(module: Any) -> int:
    arrays: list[tuple[str, mx.array]] = tree_flatten(module.parameters())
    return sum(value.nbytes for _, value in arrays)


def _layer_floats(args: Any) -> int:
    """Numbers a position has: in attention, the gated delta rule, and the experts or the MLP."""
    attention = (4 * args.num_attention_heads + 4 * args.num_key_value_heads) * args.head_dim
    keys = args.linear_num_key_heads * args.linear_key_head_dim
    values = args.linear_num_value_heads * args.linear_value_head_dim
    # Projections, convolution, and the chunkwise rule's triangles, heads repeated as values have.
    repeated = args.linear_num_value_heads * args.linear_key_head_dim
    rule = 2 * keys + values + 4 * repeated + 6 * _CHUNK * args.linear_num_value_heads
    linear = 4 * (keys + values) + rule
    experts = getattr(args, "num_experts_per_tok", 0) or 0
    if getattr(args, "num_experts", 0):
        inner = experts * args.moe_intermediate_size + args.shared_expert_intermediate_size
        mlp = 3 * inner + 2 * experts * args.hidden_size
    else:
        mlp = 3 * int(args.intermediate_size)
    return int(attention + linear + mlp + 6 * args.hidden_size)
