"""The tokens of a pass as one long row: whose they are, their positions, and their KV's places.

Projections, norms, experts and lm_head see the N tokens of all rows side by side, and no padding.
The recurrence needs them as a rectangle, `rows`, and attention as one rectangle a buffer, `parts`.
Which token goes where is known on the host; only the positions are on the device.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.layout import STRIDE, Buffer, Layout

Index = slice | mx.array


class Rectangle(NamedTuple):
    """Between tokens side by side, N, and the rectangle of B rows and T positions they lie in."""

    num_tokens: int
    rows: int
    length: int
    # Where each place's token is, and the place of each token, int32; None: in the same order.
    tokens: mx.array | None
    places: mx.array | None

    def fill(self, x: mx.array, *sizes: int) -> mx.array:
        """[N, ..] to [B, T, ..]; what follows a row's tokens means nothing, but is finite.

        With sizes, a token's part gets that shape.
        """
        taken = x if self.tokens is None else x[self.tokens]
        return taken.reshape(self.rows, self.length, *(sizes or x.shape[1:]))

    def flat(self, x: mx.array) -> mx.array:
        """[B, T, ..] to [N, ..]."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self.places is None else flat[self.places]


class Windows:
    """What the lengths of all rows' windows decide."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = np.array(lengths)
        self.num_tokens = int(self.lengths.sum())
        self.longest = int(self.lengths.max())
        self.first = np.cumsum(self.lengths) - self.lengths
        self.row = np.repeat(np.arange(len(self.lengths)), self.lengths)  # of each token
        self.step = np.arange(self.num_tokens) - self.first[self.row]  # and its place in the row
        # The tokens of each row, [B, T]; after its last one that again.
        steps = np.minimum(np.arange(self.longest), np.maximum(self.lengths - 1, 0)[:, None])
        self.tokens = np.minimum(self.first[:, None] + steps, max(self.num_tokens - 1, 0))
        places = self.row * self.longest + self.step
        size = self.num_tokens, len(lengths), self.longest
        orders = _order(self.tokens.reshape(-1), self.num_tokens), _order(places, self.tokens.size)
        self.rectangle = Rectangle(*size, *orders)
        # int32: the same on the device, and the first token of each row.
        self.rows, self.steps = _on_device(self.row), _on_device(self.step)
        self.firsts = _on_device(self.tokens[:, :1].reshape(-1))


_windows = functools.lru_cache(maxsize=64)(Windows)  # Steps repeat.


class Packing:
    """`lengths[b]` tokens of each row b, from position `start[b]` (int32 [B]) on."""

    def __init__(self, layout: Layout, start: mx.array, lengths: Sequence[int]) -> None:
        self.layout = layout
        self.windows = _windows(tuple(lengths))
        self.rectangle = self.windows.rectangle
        self.num_tokens, self.longest = self.windows.num_tokens, self.windows.longest
        self._lines: dict[int, list[mx.array]] = {}
        self.positions = start  # of each token, int32
        self._single = self.longest == 1 and self.num_tokens == len(lengths)
        if not self._single:
            self.positions = start[self.windows.rows] + self.windows.steps

    def rows(self, x: mx.array) -> mx.array:
        """See `Rectangle.fill`."""
        return self.rectangle.fill(x)

    def flat(self, x: mx.array) -> mx.array:
        """See `Rectangle.flat`."""
        return self.rectangle.flat(x)

    def at(self, step: mx.array) -> Index:
        """The tokens of the rows, each at its `step[b]` (int32 [B])."""
        return slice(None) if self._single else self.windows.firsts + step

    def after(self, known: mx.array, rest: mx.array) -> mx.array:
        """[N, ..] from each row's first token, [B, ..], and the others in their order."""
        row, step = self.windows.row, self.windows.step
        order = np.where(step == 0, row, np.arange(self.num_tokens) + len(known) - 1 - row)
        return mx.concatenate([known, rest])[_index(order)]

    @cached_property
    def parts(self) -> list["Part"]:
        """The buffers that hold these rows."""
        rows = defaultdict[Buffer, list[int]](list)
        for row in np.flatnonzero(self.windows.lengths).tolist():
            rows[self.layout.places[row][0]].append(row)
        return [Part(self, buffer, own) for buffer, own in rows.items()]

    @cached_property
    def window_slots(self) -> tuple[tuple[int, ...], ...]:
        """Of each row with tokens: number of its part, slot, capacity, first token, tokens."""
        number = {part.buffer: i for i, part in enumerate(self.parts)}
        rows, first, lengths = [], self.windows.first.tolist(), self.windows.lengths.tolist()
        for row in np.flatnonzero(lengths).tolist():
            buffer, slot = self.layout.places[row]
            rows.append((number[buffer], slot, buffer.capacity, first[row], lengths[row]))
        return tuple(rows)

    @cached_property
    def by_part(self) -> Index:
        """The tokens of the first part, then those of the next."""
        return _index(np.concatenate([part.own for part in self.parts]))

    def lines(self, heads: int) -> list[mx.array]:
        """Which lines of each part's buffer its tokens' keys and values of these heads are.

        uint32 [n * 2 * heads]; a buffer's lines lie as [2, slots, heads, capacity], keys first.
        """
        if heads not in self._lines:
            counts = [len(part.own) for part in self.parts]
            sizes = [(part.buffer.slots, part.buffer.capacity) for part in self.parts]
            slots, capacity = np.repeat(sizes, counts, axis=0).T[..., None, None]
            slot = np.concatenate([part.slot for part in self.parts])[:, None, None]
            both, head = np.arange(2)[:, None], np.arange(heads)
            base = ((both * slots + slot) * heads + head) * capacity
            base = base[:1] if (base == base[:1]).all() else base  # a prompt's: few to upload
            starts = _on_device(base.reshape(len(base), -1), np.uint32)
            lines = starts + self.positions[self.by_part].view(mx.uint32)[:, None]
            ends = np.cumsum(counts)[:-1] * 2 * heads
            self._lines[heads] = [*mx.split(lines.reshape(-1), ends.tolist())]
        return self._lines[heads]

    @cached_property
    def _from_parts(self) -> Index:
        """Where each token is among the outputs of all parts."""
        where = np.zeros(self.num_tokens, dtype=np.int64)
        base = 0
        for part in self.parts:
            where[part.own] = base + part.slot * part.length + self.windows.step[part.own]
            base += part.used * part.length
        return _index(where)

    def join(self, outputs: list[mx.array]) -> mx.array:
        """[N, ..] from the parts' outputs, each [slots, T, ..]."""
        flat = [x.reshape(-1, *x.shape[2:]) for x in outputs]
        joined = flat[0] if len(flat) == 1 else mx.concatenate(flat)
        return joined[self._from_parts]


class Part:
    """The tokens of a pass whose rows share a buffer."""

    def __init__(self, packing: Packing, buffer: Buffer, rows: list[int]) -> None:
        layout, lengths = packing.layout, packing.windows.lengths[rows]
        self.buffer = buffer
        self.limit = min(max(layout.limits[row] for row in rows), buffer.capacity)
        self.length = int(lengths.max())
        self._slots = {layout.places[row][1]: row for row in rows}
        self.used = max(self._slots) + 1
        pairs = zip(packing.windows.first[rows].tolist(), lengths.tolist(), strict=True)
        # The tokens that are its own, and the slot of each.
        self.own = np.concatenate([np.arange(first, first + count) for first, count in pairs])
        self.slot = np.repeat([layout.places[row][1] for row in rows], lengths)
        # Not the packing: masks are large, and must not wait for Python to collect a cycle.
        self._every_position, self._tokens = packing.positions, packing.windows.tokens

    @cached_property
    def _rect(self) -> Index:
        # Queries for a slot that is empty are those of another: their result isn't used.
        another = next(iter(self._slots.values()))
        table = [self._slots.get(slot, another) for slot in range(self.used)]
        return _index(self._tokens[table, : self.length].reshape(-1))

    def rect(self, x: mx.array) -> mx.array:
        """[N, ..] to [slots, T, ..]."""
        return x[self._rect].reshape(self.used, self.length, *x.shape[1:])

    @cached_property
    def mask(self) -> mx.array:
        """Causal: bool [slots, 1, T, limit]."""
        return mx.arange(self.limit) <= self.positions[:, None, :, None]

    @cached_property
    def positions(self) -> mx.array:
        """int32 [slots, T]."""
        return self.rect(self._every_position)

    @property
    def known(self) -> int:
        """A chunk of one row has at least so many positions before it: its limit is rounded up."""
        return max(0, self.limit - self.length - STRIDE)


def _index(wanted: np.ndarray) -> Index:
    """An index for these, a slice where they are consecutive."""
    first, count = int(wanted[0]) if len(wanted) else 0, len(wanted)
    if np.array_equal(wanted, np.arange(first, first + count)):
        return slice(first, first + count)
    return _on_device(wanted)


def _order(wanted: np.ndarray, count: int) -> mx.array | None:
    """An index for these of some; None for all as they are."""
    return None if np.array_equal(wanted, np.arange(count)) else _on_device(wanted)


def _on_device(values: np.ndarray, dtype: Any = np.int32) -> mx.array:
    return _kept(values.astype(dtype).tobytes(), dtype, values.shape)


# A new array of the host's costs a page fault on the GPU where memory is managed, as on CUDA.
@functools.lru_cache(maxsize=256)
def _kept(values: bytes, dtype: Any, shape: tuple[int, ...]) -> mx.array:
    return mx.array(np.frombuffer(values, dtype=dtype).reshape(shape))
