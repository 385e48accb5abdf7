"""Attention KV of one layer, for rows of different lengths, in the buffers of a `Layout`."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import mlx.core as mx

from mlx_mtp.cache.layout import Buffer, Layout, Moves, Place, most_slots
from mlx_mtp.cache.packing import Packing


class RaggedKVCache:
    """Keys and values of rows, each row's left-aligned in its slot.

    A window overwrites what lies behind a row's valid entries, so a rejection costs nothing.
    """

    packing: Packing  # of the trunk's pass; the head's are arguments

    def __init__(self) -> None:
        # Keys and values, each [slots, heads, capacity, dim], made at the first write to a buffer.
        self.buffers: dict[Buffer, tuple[mx.array, ...]] = {}

    def write(self, packing: Packing, keys: mx.array, values: mx.array) -> None:
        """Write the entries of a pass, each [N, heads, dim]."""
        _, heads, dim = keys.shape
        for part in packing.parts:
            written = self._writable(part.buffer, heads, dim, keys.dtype)
            for array, new in zip(written, (keys, values), strict=True):
                array[part.slots, :, part.positions] = new[part.tokens]

    def attend(self, packing: Packing, queries: mx.array, scale: float) -> mx.array:
        """Attention of each token, queries [N, heads, dim], to its row's entries up to its own."""
        outputs = []
        for part in packing.parts:
            keys, values = (a[: part.used, :, : part.limit] for a in self.buffers[part.buffer])
            rows = part.rect(queries).swapaxes(1, 2)
            attended = mx.fast.scaled_dot_product_attention(
                rows, keys, values, scale=scale, mask=part.mask
            )
            outputs.append(attended.swapaxes(1, 2))
        return packing.join(outputs)

    def put(self, place: Place, start: int, keys: mx.array, values: mx.array) -> None:
        """Write a row's entries from `start` on, each [heads, T, dim]."""
        (buffer, slot), (heads, count, dim) = place, keys.shape
        written = self._writable(buffer, heads, dim, keys.dtype)
        for array, new in zip(written, (keys, values), strict=True):
            array[slot, :, start : start + count] = new

    def row(self, place: Place) -> tuple[mx.array, ...]:
        """A row's keys and values, each [heads, capacity, dim]."""
        buffer, slot = place
        return tuple(array[slot] for array in self.buffers[buffer])

    def rearrange(self, layout: Layout, moves: Moves) -> None:
        """Follow a layout whose rows have moved."""
        moved = [(self.row(old), new) for old, new in moves if old[0] in self.buffers]
        self.buffers = {b: self.buffers[b] for b in layout.buffers if b in self.buffers}
        for (keys, values), place in moved:
            self.put(place, 0, keys, values)
        # Of long rows at once, so that copies of one layer exist at a time.
        long = {buffer for _, (buffer, _) in moved if most_slots(buffer.capacity) == 1}
        mx.eval([self.buffers[buffer] for buffer in long])

    def select(self, copies: Mapping[Buffer, Buffer]) -> RaggedKVCache:
        """A cache of copies of these buffers; nothing is copied before it is written."""
        selected = RaggedKVCache()
        pairs = copies.items()
        selected.buffers = {b: self.buffers[old] for b, old in pairs if old in self.buffers}
        return selected

    def extend(self, other: RaggedKVCache) -> None:
        self.buffers = self.buffers | other.buffers

    def arrays(self) -> list[mx.array]:
        return [array for pair in self.buffers.values() for array in pair]

    def _writable(
        self, buffer: Buffer, heads: int, dim: int, dtype: mx.Dtype
    ) -> tuple[mx.array, ...]:
        """Handles of our own: what a batch that was split off refers to stays as it is."""
        if buffer in self.buffers:
            own = tuple(copy.copy(array) for array in self.buffers[buffer])
        else:
            shape = (buffer.slots, heads, buffer.capacity, dim)
            own = mx.zeros(shape, dtype=dtype), mx.zeros(shape, dtype=dtype)
        self.buffers[buffer] = own
        return own
