"""Attention KV for rows of different lengths: left-aligned, a length per row, never moved."""

from __future__ import annotations

import copy

import mlx.core as mx

GROWTH = 256  # capacities are multiples of this
STRIDE = 64  # attention reads up to a multiple of this: buffers serve many steps


class RaggedKVCache:
    """Keys and values of one attention layer for B rows, each left-aligned.

    Row b's valid entries are the first `offset[b]`; the next window overwrites those after them,
    so a rejection costs nothing.
    """

    def __init__(self, batch_size: int) -> None:
        self.keys: mx.array | None = None  # [B, heads, capacity, dim], None until a write
        self.values: mx.array | None = None
        self.offset = mx.zeros(batch_size, dtype=mx.int32)  # shared by all layers of a batch
        self.limit = 0  # entries that attention reads, a bound of every row's length

    @property
    def batch_size(self) -> int:
        return self.offset.shape[0]

    @property
    def capacity(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def reserve(self, limit: int) -> None:
        """Make room for `limit` entries a row, and let attention read that many or a few more.

        Must precede every forward pass: a write past the capacity would go to the next row.
        """
        self.limit = -(-limit // STRIDE) * STRIDE
        if self.keys is None or self.values is None:
            return
        wanted = rounded_capacity(self.limit)
        if self.limit > self.capacity:
            self.keys, self.values = _widen(self.keys, wanted), _widen(self.values, wanted)
        elif self.capacity >= wanted + 2 * GROWTH:
            # A long row has left; the next write makes the smaller buffer. The upper bound of the
            # rows' lengths changes by a few windows, so less than two steps of growth is kept.
            self.keys, self.values = self.keys[:, :, :wanted], self.values[:, :, :wanted]

    def load(self, keys: list[list[mx.array]], values: list[list[mx.array]]) -> None:
        """Fill an empty cache with each row's first entries, in pieces [heads, T, dim]."""
        assert self.keys is None and self.values is None
        capacity = rounded_capacity(self.limit)
        self.keys, self.values = _filled(keys, capacity), _filled(values, capacity)

    def write(self, keys: mx.array, values: mx.array, start: mx.array) -> None:
        """Write T new entries [B, heads, T, dim] of each row from `start` (int32 [B]) on."""
        if self.keys is None or self.values is None:
            capacity = rounded_capacity(self.limit)
            shapes = ((*new.shape[:2], capacity, new.shape[3]) for new in (keys, values))
            self.keys, self.values = (mx.zeros(shape, dtype=keys.dtype) for shape in shapes)
        num_new = keys.shape[2]
        assert num_new <= self.limit <= self.capacity, (num_new, self.limit, self.capacity)
        where = (start[:, None] + mx.arange(num_new))[:, None, :, None]
        self.keys = mx.put_along_axis(self.keys, where, keys, axis=2)
        self.values = mx.put_along_axis(self.values, where, values, axis=2)

    def fetch(self) -> tuple[mx.array, mx.array]:
        assert self.keys is not None and self.values is not None
        return self.keys[:, :, : self.limit], self.values[:, :, : self.limit]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write a window at the rows' ends, without changing `offset`, and fetch."""
        self.write(keys, values, self.offset)
        return self.fetch()

    def make_mask(
        self, length: int, return_array: bool = True, window_size: int | None = None
    ) -> mx.array:
        """Bool [B, 1, T, limit]; `length` is B*T, as mlx-lm's models see all rows as one."""
        if window_size is not None:
            raise ValueError("RaggedKVCache has no sliding window")
        return causal_mask(self.offset, length // self.batch_size, self.limit)

    def select(self, rows: mx.array) -> RaggedKVCache:
        selected = copy.copy(self)
        selected.offset = self.offset[rows]
        if self.keys is not None and self.values is not None:
            selected.keys, selected.values = self.keys[rows], self.values[rows]
        return selected

    def extend(self, other: RaggedKVCache) -> None:
        self.offset = mx.concatenate([self.offset, other.offset])
        capacity = max(self.capacity, other.capacity)
        self.limit = max(self.limit, other.limit)
        self.keys = _stack(self.keys, other.keys, capacity)
        self.values = _stack(self.values, other.values, capacity)

    def arrays(self) -> list[mx.array]:
        return [self.offset] + [a for a in (self.keys, self.values) if a is not None]


def causal_mask(start: mx.array, length: int, limit: int) -> mx.array:
    """Mask for `length` positions from `start[b]`: bool [B, 1, length, limit]."""
    last = start[:, None] + mx.arange(length)
    return (mx.arange(limit) <= last[..., None])[:, None]


def rounded_capacity(limit: int) -> int:
    """Entries that are allocated for rows that need `limit`."""
    return -(-limit // GROWTH) * GROWTH


def _filled(rows: list[list[mx.array]], capacity: int) -> mx.array:
    filled = []
    for pieces in rows:
        heads, _, dim = pieces[0].shape
        missing = capacity - sum(piece.shape[1] for piece in pieces)
        more = mx.zeros((heads, missing, dim), dtype=pieces[0].dtype)
        filled.append(mx.concatenate([*pieces, more], axis=1))
    return mx.stack(filled)


def _widen(array: mx.array, wanted: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, 0), (0, wanted - array.shape[2]), (0, 0)])


def _stack(one: mx.array | None, other: mx.array | None, capacity: int) -> mx.array | None:
    if one is None or other is None:
        assert one is None and other is None, "a batch joins one that never ran"
        return None
    if one.shape[2] == other.shape[2]:
        return mx.concatenate([one, other], axis=0)
    # Widening them first would make a third copy of the shorter ones, in all layers at once.
    rows = one.shape[0]
    joined = mx.zeros((rows + other.shape[0], one.shape[1], capacity, one.shape[3]), one.dtype)
    joined[:rows, :, : one.shape[2]] = one
    joined[rows:, :, : other.shape[2]] = other
    return joined
