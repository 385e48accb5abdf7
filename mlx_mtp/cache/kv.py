"""Attention KV of one layer, for rows of different lengths, in the buffers of a `Layout`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from mlx_mtp.cache.layout import Buffer, Layout, Moves, Place, most_slots
from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels import prefill_attention
from mlx_mtp.kernels.cuda import decode_attention, flash_attention
from mlx_mtp.kernels.gpu import backend

# On Metal mlx's attention reads the KV once for all query heads of a KV head where there are so
# many keys, up to 8 positions, and up to 32 pairs of a position and one of these heads. Of more, at
# this dimension, it is separate operations.
_FUSED_KEYS, _FUSED_POSITIONS, _FUSED_PAIRS, _FUSED_DIM = 4096, 8, 32, 256


class RaggedKVCache:
    """Keys and values of rows, each row's from the beginning of its slot on.

    A window overwrites what is behind a row's valid entries, so a rejection costs nothing.
    """

    packing: Packing  # of the target model's pass; the MTP head passes its own

    def __init__(self) -> None:
        # Keys, then values, as lines [2 * slots * heads * capacity, dim]; made at the first write.
        # So a write is one launch with one index: mlx's cost per number grows with the axes.
        self.buffers: dict[Buffer, mx.array] = {}

    def write(self, packing: Packing, entries: mx.array) -> None:
        """Write the keys and values of a pass, [N, 2, heads, dim]."""
        _, _, heads, dim = entries.shape
        buffers = [part.buffer for part in packing.parts]
        arrays = [self._writable(buffer, heads, dim, entries.dtype) for buffer in buffers]
        lines = packing.lines(heads)
        write: Callable[..., list[mx.array]] = _write
        if backend() is not None and packing.longest <= decode_attention.LONGEST:
            write = _compiled(*(each.shape for each in (*arrays, *lines)))
        written = write(entries[packing.by_part], lines, arrays)
        self.buffers |= dict(zip(buffers, written, strict=True))

    def attend(self, packing: Packing, queries: mx.array, scale: float) -> mx.array:
        """Attention of each token, queries [N, heads, dim], to its row's entries up to its own."""
        own = [self.buffers[part.buffer] for part in packing.parts]
        kv_heads = _heads(packing.parts[0].buffer, own[0])
        if decode_attention.fits(queries, own[0], kv_heads, packing.longest, scale):
            plan = packing.plan(queries.shape[1] // kv_heads)
            return decode_attention.attend(queries, packing.positions, own, kv_heads, plan)
        outputs = []
        for part, array in zip(packing.parts, own, strict=True):
            tokens, whole = part.rect(queries), _by_axis(part.buffer, array)
            keys, values = whole  # views; an integer as the only index would copy
            if flash_attention.fits(tokens, keys, scale):
                one = tokens.squeeze(0), keys, values, part.positions.squeeze(0)
                outputs.append(flash_attention.attend(*one)[None])
                continue
            keys, values = whole[:, : part.used, :, : part.limit]
            rows = tokens.swapaxes(1, 2)
            # A chunk of one prompt; where windows begin the host does not know.
            if part.length > decode_attention.LONGEST and prefill_attention.fits(rows):
                at = part.positions.squeeze(0), part.known
                attended = prefill_attention.attend(rows, keys, values, *at, scale)
            else:
                attended = _attend(rows, keys, values, scale, part.mask)
            outputs.append(attended.swapaxes(1, 2))
        return packing.join(outputs)

    def put(self, place: Place, start: int, keys: mx.array, values: mx.array) -> None:
        """Write a row's entries from `start` on, each [heads, T, dim]."""
        (buffer, slot), (heads, count, dim) = place, keys.shape
        array = _by_axis(buffer, self._writable(buffer, heads, dim, keys.dtype))
        for which, new in enumerate((keys, values)):
            array[which, slot, :, start : start + count] = new
        self.buffers[buffer] = array.reshape(-1, dim)

    def row(self, place: Place) -> mx.array:
        """A view of a row's keys and values, [2, heads, capacity, dim]."""
        buffer, slot = place
        return _by_axis(buffer, self.buffers[buffer])[:, slot]

    def rearrange(self, layout: Layout, moves: Moves) -> None:
        """Follow a layout whose rows have moved."""
        moved = [(self.row(old), new) for old, new in moves if old[0] in self.buffers]
        self.buffers = {b: self.buffers[b] for b in layout.buffers if b in self.buffers}
        for (keys, values), place in moved:
            self.put(place, 0, keys, values)
        # Long rows at once, so that copies of only one layer exist at a time.
        long = {buffer for _, (buffer, _) in moved if most_slots(buffer.capacity) == 1}
        mx.eval([self.buffers[buffer] for buffer in long])

    def select(self, copies: Mapping[Buffer, Buffer]) -> RaggedKVCache:
        """A cache with copies of these buffers; nothing is copied before a write."""
        selected = RaggedKVCache()
        pairs = copies.items()
        selected.buffers = {b: self.buffers[old] for b, old in pairs if old in self.buffers}
        return selected

    def extend(self, other: RaggedKVCache) -> None:
        self.buffers = self.buffers | other.buffers

    def arrays(self) -> list[mx.array]:
        return list(self.buffers.values())

    def _writable(self, buffer: Buffer, heads: int, dim: int, dtype: mx.Dtype) -> mx.array:
        """A buffer's array to write to. Copy on write: another batch may share the buffer."""
        if buffer in self.buffers:
            array = copy.copy(self.buffers[buffer])
        else:
            array = mx.zeros((2 * buffer.slots * heads * buffer.capacity, dim), dtype=dtype)
        self.buffers[buffer] = array
        return array


def _heads(buffer: Buffer, array: mx.array) -> int:
    return len(array) // (2 * buffer.slots * buffer.capacity)


def _by_axis(buffer: Buffer, array: mx.array) -> mx.array:
    """A view of a buffer, [2, slots, heads, capacity, dim]."""
    axes = 2, buffer.slots, _heads(buffer, array), buffer.capacity, array.shape[1]
    return array.reshape(axes)


def _attend(
    queries: mx.array,  # [slots, heads, T, dim]
    keys: mx.array,  # [slots, KV heads, limit, dim]
    values: mx.array,
    scale: float,
    mask: mx.array,  # bool [slots, 1, T, limit]
) -> mx.array:
    """By mlx's operation; on Metal a window is cut into pieces that its fused form takes."""
    _, heads, length, dim = queries.shape
    most = min(_FUSED_POSITIONS, _FUSED_PAIRS * keys.shape[1] // heads)
    is_fused = dim == _FUSED_DIM and keys.shape[2] >= _FUSED_KEYS and most > 0
    if backend() != "metal" or length > decode_attention.LONGEST or length <= most or not is_fused:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    pieces = [slice(at, at + most) for at in range(0, length, most)]
    attended = [_attend(queries[:, :, own], keys, values, scale, mask[:, :, own]) for own in pieces]
    return mx.concatenate(attended, axis=2)


def _write(
    entries: mx.array,  # [N, 2, heads, dim]
    lines: list[mx.array],  # see `Packing.lines`
    arrays: list[mx.array],  # of all buffers
) -> list[mx.array]:
    new, first = entries.reshape(-1, entries.shape[-1]), 0
    for index, array in zip(lines, arrays, strict=True):
        array[index] = new[first : first + len(index)]
        first += len(index)
    return arrays


# With many buffers half of a step's launches are writes, and mlx repeats compiled ones fast. The
# shapes are in the key because a compiled function keeps an entry per shape as long as it lives.
@functools.lru_cache(maxsize=1024)
def _compiled(*_shapes: Sequence[int]) -> Callable[..., list[mx.array]]:
    return mx.compile(lambda *inputs: _write(*inputs))
