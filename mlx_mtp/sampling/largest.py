"""The few largest of many values, without sorting them all.

By partitions of blocks: on a CPU their cost is linear, and a GPU (where mlx's partition is a sort)
sorts a block in one launch, but a vocabulary in some twenty.
"""

from __future__ import annotations

import mlx.core as mx

_BLOCK = 4096
"""Most float32 values that mlx's Metal and CUDA backends sort in one launch."""
MAX_COUNT = _BLOCK // 2
"""Most values that can be asked for: each round at least halves the blocks."""


def largest(values: mx.array, count: int) -> mx.array:
    """The largest values, exactly those at the head of a full sort.

    Args:
        values: [..., V], any type that mlx sorts.
        count: N, 1 to `MAX_COUNT`.

    Returns:
        [..., min(N, V)], in descending order; NaN comes first.
    """
    while (size := values.shape[-1]) > _BLOCK:
        # What is among the N largest of all is among the N largest of its block.
        whole = size - size % _BLOCK
        blocks = mx.unflatten(values[..., :whole], -1, (-1, _BLOCK))
        kept = mx.partition(blocks, _BLOCK - count, axis=-1)[..., _BLOCK - count :]
        values = mx.concatenate([mx.flatten(kept, -2), values[..., whole:]], axis=-1)
    return mx.sort(values, axis=-1)[..., ::-1][..., :count]


def largest_ids(values: mx.array, count: int) -> mx.array:
    """Where the largest values are, exactly as a stable sort gives them.

    Args:
        values: float32 [..., V], V below 2**29.
        count: N, 0 to `MAX_COUNT`.

    Returns:
        int32 [..., min(N, V)], the largest value's place first, among equal ones the lowest.
    """
    size = values.shape[-1]
    if count == 0:
        return mx.zeros((*values.shape[:-1], 0), dtype=mx.int32)
    last = largest(values, count)[..., -1:]
    # A key for each place, so that of those that tie with the last one the lowest are taken.
    group = mx.where(values > last, 0, mx.where(values == last, size, 2 * size))
    keys = -largest(-(mx.arange(size) + group), count)
    ids = keys % size
    order = mx.argsort(-mx.take_along_axis(values, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)
