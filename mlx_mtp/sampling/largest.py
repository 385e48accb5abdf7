"""The few largest of many values, without sorting them all.

The values are cut into blocks, of which each has its maximum. The N largest values lie in the N
blocks with the largest maxima: whatever lies elsewhere has N that are no smaller before it. With
blocks of about the root of V / N values, little is left to sort after one pass over all of them.
"""

from __future__ import annotations

import math

import mlx.core as mx


def largest(values: mx.array, count: int) -> mx.array:
    """The largest values, exactly those at the head of a full sort.

    Args:
        values: float32 [..., V].
        count: N, 1 or more.

    Returns:
        float32 [..., min(N, V)], in descending order; NaN comes first.
    """
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
    """Where the largest values are, exactly as a stable sort gives them.

    Args:
        values: float32 [..., V], without NaN (the places of which are in range, but not in order).
        count: N, 0 or more.

    Returns:
        int32 [..., min(N, V)], the largest value's place first, among equal ones the lowest.
    """
    size = values.shape[-1]
    count = min(count, size)
    if count == 0:
        return mx.zeros((*values.shape[:-1], 0), dtype=mx.int32)
    blocks = _blocks(values, count)
    length = blocks.shape[-1]
    first = mx.argsort(-mx.max(blocks, axis=-1), axis=-1)[..., :count]
    # In their order, so that the second sort too has the lowest of equal ones first.
    chosen = mx.sort(first, axis=-1)[..., None]
    candidates = mx.flatten(mx.take_along_axis(blocks, chosen, axis=-2), -2)
    places = mx.flatten(chosen.astype(mx.int32) * length + mx.arange(length), -2)
    order = mx.argsort(-candidates, axis=-1)[..., :count]
    return mx.minimum(mx.take_along_axis(places, order, axis=-1), size - 1)


def _blocks(values: mx.array, count: int) -> mx.array:
    """The values as [..., blocks, length], filled up with minus infinity."""
    size = values.shape[-1]
    # A power of two, of which most vocabularies are a multiple: then nothing is copied.
    length = 1 << (math.isqrt(size // count).bit_length() - 1)
    missing = -size % length
    if missing:
        around = [(0, 0)] * (values.ndim - 1)
        values = mx.pad(values, [*around, (0, missing)], constant_values=-mx.inf)
    return mx.unflatten(values, -1, (-1, length))
