"""Attention KV of one layer, for rows of different lengths, in the buffers of a `Layout`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import mlx.core as mx

from mlx_mtp.cache.layout import Buffer, Change, Layout, Place, most_slots
from mlx_mtp.cache.packing import Packing

Buffers = list[mx.array]  # each [slots, heads, capacity, dim]


class RaggedKVCache:
    """Keys and values of rows, each row's left-aligned in its slot.

    A window overwrites what lies behind a row's valid entries, so a rejection costs nothing.
    """

    packing: Packing  # of the trunk's pass; the head's are arguments

    def __init__(self, keys: Buffers | None = None, values: Buffers | None = None) -> None:
        self.keys, self.values = keys or [], values or []  # empty until the first write

    def make_mask(self, length: int, return_array: bool = False, window_size: int = 0) -> None:
        return  # mlx-lm asks for one of all rows; each buffer has its own (`Part.mask`).

    def write(self, packing: Packing, keys: mx.array, values: mx.array) -> None:
        """Write the entries of a pass, each [N, heads, dim]."""
        for buffers, new in ((self.keys, keys), (self.values, values)):
            if not buffers:
                buffers += [
                    _zeros(each, new.shape[1:], new.dtype) for each in packing.layout.buffers
                ]
            for part in packing.parts:
                # A handle of our own: what a batch that was split off refers to stays as it is.
                written = copy.copy(buffers[part.buffer])
                written[part.slots, :, part.positions] = new[part.tokens]
                buffers[part.buffer] = written

    def attend(self, packing: Packing, queries: mx.array, scale: float) -> mx.array:
        """Attention of each token, queries [N, heads, dim], to its row's entries up to its own."""
        outputs = []
        for part in packing.parts:
            keys, values = (
                buffers[part.buffer][: part.used, :, : part.limit]
                for buffers in (self.keys, self.values)
            )
            rows = part.rect(queries).swapaxes(1, 2)
            attended = mx.fast.scaled_dot_product_attention(
                rows, keys, values, scale=scale, mask=part.mask
            )
            outputs.append(attended.swapaxes(1, 2))
        return packing.join(outputs)

    def load(self, layout: Layout, rows: Iterable[tuple[Buffers, Buffers]]) -> None:
        """Fill an empty cache with each row's first keys and values, in pieces [heads, T, dim]."""
        for place, row in zip(layout.places, rows, strict=True):
            for buffers, pieces in zip((self.keys, self.values), row):
                heads, _, dim = pieces[0].shape
                if not buffers:
                    buffers += [_zeros(b, (heads, dim), pieces[0].dtype) for b in layout.buffers]
                start = 0
                for piece in pieces:
                    _put(buffers, place, start, piece)
                    start += piece.shape[1]

    def rearrange(self, change: Change) -> None:
        """Follow a layout."""
        if self.keys:
            self.keys, self.values = _moved(self.keys, change), _moved(self.values, change)
            # Of long rows at once, so that copies of one layer exist at a time.
            copied = {b for _, (b, _) in change.moves if most_slots(self.keys[b].shape[2]) == 1}
            mx.eval([each[b] for each in (self.keys, self.values) for b in copied])

    def row(self, place: Place) -> tuple[mx.array, mx.array]:
        """A row's keys and values, each [heads, capacity, dim]."""
        buffer, slot = place
        return self.keys[buffer][slot], self.values[buffer][slot]

    def select(self, kept: Sequence[int]) -> RaggedKVCache:
        """A cache of these buffers."""
        if not self.keys:
            return RaggedKVCache()
        return RaggedKVCache([self.keys[b] for b in kept], [self.values[b] for b in kept])

    def extend(self, other: RaggedKVCache) -> None:
        assert bool(self.keys) == bool(other.keys), "a batch joins one that never ran"
        self.keys, self.values = self.keys + other.keys, self.values + other.values

    def arrays(self) -> Buffers:
        return [*self.keys, *self.values]


def _zeros(buffer: Buffer, entry: Sequence[int], dtype: mx.Dtype) -> mx.array:
    heads, dim = entry
    return mx.zeros((buffer.slots, heads, buffer.capacity, dim), dtype=dtype)


def _put(buffers: Buffers, place: Place, start: int, entries: mx.array) -> None:
    """Write entries [heads, T, dim] of a row."""
    buffer, slot = place
    written = copy.copy(buffers[buffer])
    written[slot, :, start : start + entries.shape[1]] = entries
    buffers[buffer] = written


def _moved(before: Buffers, change: Change) -> Buffers:
    heads, dim = before[0].shape[1], before[0].shape[3]
    after = [before[buffer] for buffer in change.kept]
    after += [_zeros(buffer, (heads, dim), before[0].dtype) for buffer in change.new]
    for (buffer, slot), place in change.moves:
        _put(after, place, 0, before[buffer][slot])
    return after
