"""Attention KV of one layer, for rows of different lengths, in the buffers of a `Layout`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import mlx.core as mx

from mlx_mtp.cache.layout import Buffer, Layout, Moves, Place, most_slots
from mlx_mtp.cache.packing import Packing

Pieces = Sequence[mx.array]
Buffers = dict[Buffer, mx.array]  # each [slots, heads, capacity, dim]; made at the first write


class RaggedKVCache:
    """Keys and values of rows, each row's left-aligned in its slot.

    A window overwrites what lies behind a row's valid entries, so a rejection costs nothing.
    """

    packing: Packing  # of the trunk's pass; the head's are arguments

    def __init__(self) -> None:
        self.keys: Buffers = {}
        self.values: Buffers = {}

    def make_mask(self, length: int, return_array: bool = False, window_size: int = 0) -> None:
        return  # mlx-lm asks for one of all rows; each buffer has its own (`Part.mask`).

    def write(self, packing: Packing, keys: mx.array, values: mx.array) -> None:
        """Write the entries of a pass, each [N, heads, dim]."""
        for buffers, new in ((self.keys, keys), (self.values, values)):
            _, heads, dim = new.shape
            for part in packing.parts:
                written = _writable(buffers, part.buffer, heads, dim, new.dtype)
                written[part.slots, :, part.positions] = new[part.tokens]

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

    def load(self, layout: Layout, rows: Iterable[tuple[Pieces, Pieces]]) -> None:
        """Fill an empty cache with each row's first keys and values, in pieces [heads, T, dim]."""
        for place, row in zip(layout.places, rows, strict=True):
            for buffers, pieces in zip((self.keys, self.values), row):
                start = 0
                for piece in pieces:
                    _put(buffers, place, start, piece)
                    start += piece.shape[1]

    def rearrange(self, layout: Layout, moves: Moves) -> None:
        """Follow a layout whose rows have moved."""
        self.keys, self.values = (_moved(b, layout, moves) for b in (self.keys, self.values))
        # Of long rows at once, so that copies of one layer exist at a time.
        long = {buffer for _, (buffer, _) in moves if most_slots(buffer.capacity) == 1}
        mx.eval([b[buffer] for b in (self.keys, self.values) for buffer in long & b.keys()])

    def row(self, place: Place) -> tuple[mx.array, mx.array]:
        """A row's keys and values, each [heads, capacity, dim]."""
        buffer, slot = place
        return self.keys[buffer][slot], self.values[buffer][slot]

    def select(self, layout: Layout) -> RaggedKVCache:
        """A cache of the rows of this layout."""
        selected = RaggedKVCache()
        selected.keys, selected.values = (
            _moved(buffers, layout, []) for buffers in (self.keys, self.values)
        )
        return selected

    def extend(self, other: RaggedKVCache) -> None:
        assert bool(self.keys) == bool(other.keys), "a batch joins one that never ran"
        self.keys, self.values = self.keys | other.keys, self.values | other.values

    def arrays(self) -> list[mx.array]:
        return [*self.keys.values(), *self.values.values()]


def _moved(before: Buffers, layout: Layout, moves: Moves) -> Buffers:
    """What rows of the layout are in, after these moves."""
    after = {buffer: before[buffer] for buffer in layout.buffers if buffer in before}
    for (buffer, slot), place in moves:
        if buffer in before:
            _put(after, place, 0, before[buffer][slot])
    return after


def _put(buffers: Buffers, place: Place, start: int, entries: mx.array) -> None:
    """Write entries [heads, T, dim] of a row."""
    (buffer, slot), (heads, count, dim) = place, entries.shape
    written = _writable(buffers, buffer, heads, dim, entries.dtype)
    written[slot, :, start : start + count] = entries


def _writable(buffers: Buffers, buffer: Buffer, heads: int, dim: int, dtype: mx.Dtype) -> mx.array:
    """A handle of our own: what a batch that was split off refers to stays as it is."""
    if buffer in buffers:
        buffers[buffer] = copy.copy(buffers[buffer])
    else:
        shape = (buffer.slots, heads, buffer.capacity, dim)
        buffers[buffer] = mx.zeros(shape, dtype=dtype)
    return buffers[buffer]
