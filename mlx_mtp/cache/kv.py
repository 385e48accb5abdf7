"""Attention KV of one layer, for rows of different lengths, in the buffers of a `Layout`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import mlx.core as mx

from mlx_mtp.cache.layout import Buffer, Layout, Moves, Place, most_slots
from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels import attention, chunk_attention, flash
from mlx_mtp.kernels.gpu import backend

Pair = tuple[mx.array, mx.array]  # keys and values


class RaggedKVCache:
    """Keys and values of rows, each row's left-aligned in its slot.

    A window overwrites what lies behind a row's valid entries, so a rejection costs nothing.
    """

    packing: Packing  # of the trunk's pass; the head's are arguments

    def __init__(self) -> None:
        # Keys and values, each [slots, heads, capacity, dim], made at the first write to a buffer.
        self.buffers: dict[Buffer, Pair] = {}

    def write(self, packing: Packing, keys: mx.array, values: mx.array) -> None:
        """Write the entries of a pass, each [N, heads, dim]."""
        _, heads, dim = keys.shape
        buffers = [part.buffer for part in packing.parts]
        pairs = [self._writable(buffer, heads, dim, keys.dtype) for buffer in buffers]
        counts = tuple(len(part.own) for part in packing.parts)
        write: Callable[..., list[Pair]] = partial(_write, counts)
        if backend() is not None and packing.longest <= attention.LONGEST:
            write = _compiled(counts, *(keys.shape for keys, _ in pairs))
        new = keys[packing.by_part], values[packing.by_part]
        written = write(new, packing.places(heads), pairs)
        self.buffers |= dict(zip(buffers, written, strict=True))

    def attend(self, packing: Packing, queries: mx.array, scale: float) -> mx.array:
        """Attention of each token, queries [N, heads, dim], to its row's entries up to its own."""
        own = [self.buffers[part.buffer] for part in packing.parts]
        keys, _ = own[0]
        if attention.fits(queries, keys, packing.longest, scale):
            plan = packing.plan(queries.shape[1] // keys.shape[1])
            return attention.attend(queries, packing.positions, own, plan)
        outputs = []
        for part in packing.parts:
            whole, tokens = self.buffers[part.buffer], part.rect(queries)
            if flash.fits(tokens, whole[0], scale):
                outputs.append(flash.attend(tokens[0], *whole, part.positions[0])[None])
                continue
            keys, values = (a[: part.used, :, : part.limit] for a in whole)
            rows = tokens.swapaxes(1, 2)
            # A chunk of one prompt; where windows begin the host does not know.
            if part.length > attention.LONGEST and chunk_attention.fits(rows):
                at = part.positions[0], part.known
                attended = chunk_attention.attend(rows, keys, values, *at, scale)
            else:
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

    def _writable(self, buffer: Buffer, heads: int, dim: int, dtype: mx.Dtype) -> Pair:
        """Handles of our own: what a batch that was split off refers to stays as it is."""
        if buffer in self.buffers:
            keys, values = self.buffers[buffer]
            own = copy.copy(keys), copy.copy(values)
        else:
            shape = (buffer.slots, heads, buffer.capacity, dim)
            own = mx.zeros(shape, dtype=dtype), mx.zeros(shape, dtype=dtype)
        self.buffers[buffer] = own
        return own


def _write(
    counts: Sequence[int],  # of the tokens of each buffer
    new: Pair,  # keys and values, each [N, heads, dim]
    where: tuple[mx.array, ...],  # slots, heads and positions, each [N, heads]
    pairs: list[Pair],  # of all buffers
) -> list[Pair]:
    first = 0
    for count, pair in zip(counts, pairs, strict=True):
        own = slice(first, first + count)
        places = tuple(each[own] for each in where)
        for array, entries in zip(pair, new, strict=True):
            array[places] = entries[own]
        first += count
    return pairs


# With many buffers a step has as many writes as all else, and mlx repeats compiled ones fast. The
# key has the shapes because a compiled function keeps an entry for each as long as it lives.
@functools.lru_cache(maxsize=1024)
def _compiled(counts: Sequence[int], *_shapes: Sequence[int]) -> Callable[..., list[Pair]]:
    return mx.compile(partial(_write, counts))
