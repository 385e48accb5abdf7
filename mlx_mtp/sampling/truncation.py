"""Truncation of a batch's rows by top_k, top_p and min_p, exact and as cheap as possible.

A row keeps its top_k largest logits, of these the smallest set of most probable tokens that
reaches top_p, and of these the tokens with at least min_p times the best token's probability. Each
of the three keeps all tokens that tie with the last one kept. Only top_p without top_k needs a full
sort.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.kernels.gpu import fused
from mlx_mtp.sampling.params import SamplingParams

_MIN_ORDERED = 128
_MAX_ORDERED = 2048


class _Group(NamedTuple):
    """Rows that are truncated in the same way."""

    rows: mx.array | None  # int32 [R]; None: all rows of the batch
    num_ordered: int  # number of largest values to sort; 1 if only min_p is set
    top_k: mx.array  # [R, 1, 1], like top_p and min_p; V to keep all
    top_p: mx.array
    min_p: mx.array


@fused
def _threshold(
    logits: mx.array, num_ordered: int, top_k: mx.array, top_p: mx.array, min_p: mx.array
) -> mx.array:
    """The smallest logit to keep, float32 [R, T, 1], of logits [R, T, V]."""
    if num_ordered == 1:
        return _by_min_p(mx.max(logits, axis=-1, keepdims=True), min_p)
    ordered = largest(logits, num_ordered)
    last = mx.minimum(top_k, ordered.shape[-1]) - 1
    by_k = mx.take_along_axis(ordered, mx.broadcast_to(last, (*ordered.shape[:2], 1)), axis=-1)
    in_k = ordered >= by_k
    left = mx.where(in_k, ordered, -mx.inf)
    probabilities = mx.softmax(left, axis=-1, precise=True)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    reached = top_p
    if ordered.shape != logits.shape:
        # Logits beyond the sorted ones can tie with the k-th: `beyond` of them, nearly always 0.
        # Each has the probability of the last sorted logit. So the total grows by the product of
        # `beyond` and that probability, which can round differently than a sum.
        beyond = mx.sum(logits >= by_k, axis=-1, keepdims=True)
        beyond = beyond - mx.sum(in_k, axis=-1, keepdims=True)
        reached = reached * (1.0 + beyond * probabilities[..., -1:])
    # The most probable token always stays; top_p = 1 keeps all, however the sum is rounded.
    first = mx.arange(ordered.shape[-1]) == 0
    in_p = (before < reached) | first | (top_p >= 1.0)
    by_p = mx.min(mx.where(in_p, left, mx.inf), axis=-1, keepdims=True)
    return mx.maximum(mx.maximum(by_k, by_p), _by_min_p(ordered[..., :1], min_p))


def _by_min_p(best: mx.array, min_p: mx.array) -> mx.array:
    return mx.where(min_p > 0, best + mx.log(min_p), -mx.inf)


@fused
def _cut(logits: mx.array, least: mx.array) -> mx.array:
    return mx.where(logits >= least, logits, -mx.inf)


class Truncation:
    """The truncation of B rows by `params`, except greedy ones; false if no row is truncated."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        rows: dict[int, list[int]] = {}
        for row, p in enumerate(params):
            if not p.greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0):
                # Only by the row's parameters: its tokens must not depend on its neighbours.
                rows.setdefault(_num_ordered(p, vocab_size), []).append(row)
        self._groups = [
            _Group(
                None if len(chosen) == len(params) else mx.array(chosen, dtype=mx.int32),
                num_ordered,
                column([min(params[i].top_k or vocab_size, vocab_size) for i in chosen]),
                column([params[i].top_p for i in chosen]),
                column([params[i].min_p for i in chosen]),
            )
            for num_ordered, chosen in rows.items()
        ]

    def __bool__(self) -> bool:
        return bool(self._groups)

    def apply(self, logits: mx.array) -> mx.array:
        """Set removed tokens to minus infinity; logits [B, T, V or less], after temperature."""
        if self._groups and self._groups[0].rows is None:
            least = _threshold(logits, *self._groups[0][1:])
        else:
            least = mx.full((*logits.shape[:-1], 1), -mx.inf)
            for group in self._groups:
                least[group.rows] = _threshold(logits[group.rows], *group[1:])
        return _cut(logits, least)


def _num_ordered(p: SamplingParams, vocab_size: int) -> int:
    """How many logits to sort: at least twice top_k, as in bfloat16 many can tie with the k-th."""
    if 0 < 2 * p.top_k <= _MAX_ORDERED:
        return max(_MIN_ORDERED, 1 << (2 * p.top_k - 1).bit_length())
    return 1 if p.top_k == 0 and p.top_p >= 1.0 else vocab_size


def column(values: Sequence[float]) -> mx.array:
    """Returns one value per row as [B, 1, 1], to broadcast over [B, T, V]."""
    return mx.array(list(values))[:, None, None]


# The values are split into blocks. The N largest values are in the N blocks with the largest
# maxima: a value in any other block is no larger than these N maxima. With blocks of about
# sqrt(V / N) values, little is left to sort after one pass over all values.


def largest(values: mx.array, count: int) -> mx.array:
    """Returns the largest of values [..., V], descending, NaN first: [..., min(count, V)]."""
    count = min(count, values.shape[-1])
    blocks = _blocks(values, count)
    others = blocks.shape[-2] - count
    if others > 0:
        maxima = mx.max(blocks, axis=-1)
        chosen = mx.argpartition(maxima, others, axis=-1)[..., others:]
        values = mx.flatten(mx.take_along_axis(blocks, chosen[..., None], axis=-2), -2)
        others = values.shape[-1] - count
        values = mx.partition(values, others, axis=-1)[..., others:]
    return mx.sort(values, axis=-1)[..., ::-1][..., :count]


def largest_ids(values: mx.array, count: int) -> mx.array:
    """Returns indices of the largest of values [..., V], int32 [..., min(count, V)].

    Their order is that of a stable descending sort.
    """
    size = values.shape[-1]
    count = min(count, size)
    if count == 0:
        return mx.zeros((*values.shape[:-1], 0), dtype=mx.int32)
    blocks = _blocks(values, count)
    length = blocks.shape[-1]
    first = mx.argsort(-mx.max(blocks, axis=-1), axis=-1)[..., :count]
    # In ascending order, so that the second sort also puts the lowest of equal values' ids first.
    chosen = mx.sort(first, axis=-1)[..., None]
    candidates = mx.flatten(mx.take_along_axis(blocks, chosen, axis=-2), -2)
    ids = mx.flatten(chosen.astype(mx.int32) * length + mx.arange(length), -2)
    order = mx.argsort(-candidates, axis=-1)[..., :count]
    return mx.minimum(mx.take_along_axis(ids, order, axis=-1), size - 1)


def _blocks(values: mx.array, count: int) -> mx.array:
    """The values as [..., blocks, length], padded with minus infinity."""
    size = values.shape[-1]
    # A power of two divides most vocabulary sizes, so that nothing is copied.
    length = 1 << (math.isqrt(size // count).bit_length() - 1)
    missing = -size % length
    if missing:
        around = [(0, 0)] * (values.ndim - 1)
        values = mx.pad(values, [*around, (0, missing)], constant_values=-mx.inf)
    return mx.unflatten(values, -1, (-1, length))
