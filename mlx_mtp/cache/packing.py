"""The packed tokens of a forward pass: their rows, positions, and places in the KV buffers.

Projections, norms, experts and lm_head run on the N tokens of all rows without padding. The
recurrence needs them as one padded `rectangle`, and attention as one rectangle per KV buffer
(`parts`). The host knows which token goes where; only the positions are on the device.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.layout import STRIDE, Buffer, Layout, Place

Index = slice | mx.array


class Rectangle(NamedTuple):
    """Converts between N packed tokens and a padded rectangle of B rows and T positions."""

    num_tokens: int
    rows: int
    length: int
    # int32: the token at each place of the rectangle, and each token's place; None: same order.
    tokens: mx.array | None
    places: mx.array | None

    def fill(self, x: mx.array) -> mx.array:
        """Converts [N, ..] to [B, T, ..], padded with copies of a row's last token."""
        return self.padded(x).reshape(self.rows, self.length, *x.shape[1:])

    def padded(self, x: mx.array) -> mx.array:
        """Converts [N, ..] to [B * T, ..], padded as by `fill`."""
        return x if self.tokens is None else x[self.tokens]

    def flat(self, x: mx.array) -> mx.array:
        """Converts [B, T, ..] to [N, ..]."""
        return self.unpadded(x.reshape(-1, *x.shape[2:]))

    def unpadded(self, x: mx.array) -> mx.array:
        """Converts [B * T, ..] to [N, ..]."""
        return x if self.places is None else x[self.places]


class Windows:
    """Index arrays that depend only on the window lengths; cached, as steps repeat lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = np.array(lengths)
        self.num_tokens = int(self.lengths.sum())
        self.longest = int(self.lengths.max())
        self.first = np.cumsum(self.lengths) - self.lengths
        self.row = np.repeat(np.arange(len(self.lengths)), self.lengths)  # row of each token
        self.step = np.arange(self.num_tokens) - self.first[self.row]  # its index in the window
        # The tokens of each row, [B, T], padded with the row's last token.
        steps = np.minimum(np.arange(self.longest), np.maximum(self.lengths - 1, 0)[:, None])
        self.tokens = np.minimum(self.first[:, None] + steps, max(self.num_tokens - 1, 0))
        orders: tuple[mx.array | None, mx.array | None] = None, None
        if self.tokens.size > self.num_tokens:
            places = self.row * self.longest + self.step
            orders = _on_device(self.tokens.reshape(-1)), _on_device(places)
        self.rectangle = Rectangle(self.num_tokens, len(lengths), self.longest, *orders)
        # On the device, int32: `row`, `step`, and the first token of each row.
        self.rows, self.steps = _on_device(self.row), _on_device(self.step)
        self.firsts = _on_device(self.tokens[:, :1].reshape(-1))


_windows = functools.lru_cache(maxsize=64)(Windows)


class ImageRows(NamedTuple):
    """The tower's output rows that replace the embeddings of a chunk's image tokens."""

    rows: mx.array | None  # [n, H], for ids `first`, `first` + 1, ..; None: no image tokens
    first: int


_LONGEST_HISTORY = 16  # positions; after a longer window only its last kept inputs are kept


class KeptCounts(NamedTuple):
    """How many positions each row keeps of the last window and of this one, int32 [B]."""

    before: mx.array | None = None  # None: nothing of the last window is pending
    now: mx.array | None = None  # None: verification decides it

    def drops_history(self, length: int) -> bool:
        """Returns whether recurrent layers keep nothing of a window of `length` to be folded."""
        return self.now is not None and length > _LONGEST_HISTORY


class Packing:
    """`lengths[b]` tokens of each row b, from position `start[b]` on; `start` is int32 [B].

    After images a token's RoPE position differs from its index in the KV: `rope_positions`, int32
    [N], is the index plus `shift[b]` (int32 [B]). In images a token has three positions, [N, 3].
    """

    images: ImageRows | None = None  # for a chunk of a prompt with images
    ends: Sequence[int] | None = None  # the rows' lengths after the pass, if the host knows them
    kept = KeptCounts()

    def __init__(
        self,
        layout: Layout,
        start: mx.array,
        lengths: Sequence[int],
        shift: mx.array | None = None,
    ) -> None:
        self.layout = layout
        self.windows = _windows(tuple(lengths))
        self.rectangle = self.windows.rectangle
        self.num_tokens, self.longest = self.windows.num_tokens, self.windows.longest
        self._lines: dict[int, list[mx.array]] = {}
        self.calls: dict[Any, Callable[..., Any] | None] = {}  # `RaggedKVCache`'s, by kind of layer
        self.positions = start  # of each token, int32
        self._single = self.longest == 1 and self.num_tokens == len(lengths)
        if not self._single:
            self.positions = start[self.windows.rows] + self.windows.steps
        self.rope_positions = self.positions
        if shift is not None:
            self.rope_positions = self.positions + (
                shift if self._single else shift[self.windows.rows]
            )

    def at(self, step: mx.array) -> Index:
        """Returns the index of one token per row: that at `step[b]` of its window (int32 [B])."""
        return slice(None) if self._single else self.windows.firsts + step

    def prepend_first(self, known: mx.array, rest: mx.array) -> mx.array:
        """Returns [N, ..] from each row's first token, [B, ..], and the other tokens in order."""
        row, step = self.windows.row, self.windows.step
        order = np.where(step == 0, row, np.arange(self.num_tokens) + len(known) - 1 - row)
        return mx.concatenate([known, rest])[_index(order)]

    @cached_property
    def _placed(self) -> "_Placement":
        return _placement(tuple(self.layout.places), tuple(self.windows.lengths.tolist()))

    @cached_property
    def parts(self) -> list["Part"]:
        """The tokens by buffer."""
        return [Part(self, rows) for rows in self._placed.parts]

    @cached_property
    def buffers(self) -> list[Buffer]:
        """The buffer of each part."""
        return self._placed.buffers

    @property
    def window_slots(self) -> tuple[tuple[int, ...], ...]:
        """For each row with tokens: index of its part, slot, capacity, first token, token count."""
        return self._placed.window_slots

    @property
    def by_part(self) -> Index:
        """An index of the tokens of the first part, then of the next, and so on."""
        return self._placed.by_part

    def kv_lines(self, heads: int) -> list[mx.array]:
        """Returns, for each part, the lines of its tokens' keys and values in its buffer.

        A line is the key or the value of one token and head. Each array is uint32 [n * 2 * heads]
        for n tokens; the lines of a buffer are [2, slots, heads, capacity], keys first.
        """
        if heads not in self._lines:
            starts, ends = self._placed.line_starts(heads)
            lines = starts + self.positions[self.by_part].view(mx.uint32)[:, None]
            self._lines[heads] = [*mx.split(lines.reshape(-1), ends)]
        return self._lines[heads]

    def join(self, outputs: list[mx.array]) -> mx.array:
        """Returns [N, ..] from the parts' outputs, each [slots, T, ..]."""
        flat = [x.reshape(-1, *x.shape[2:]) for x in outputs]
        joined = flat[0] if len(flat) == 1 else mx.concatenate(flat)
        return joined[self._placed.from_parts]


class Pass(NamedTuple):
    """What all layers share in a forward pass over the tokens of one or more batches."""

    positions: mx.array  # of RoPE, int32 [N] or [N, 3]
    packings: Sequence[Packing]  # of each batch
    orders: Sequence[Rectangle]  # the packings' rectangles
    kept: Sequence[KeptCounts]

    @classmethod
    def of(cls, packings: Sequence[Packing]) -> "Pass":
        positions = [packing.rope_positions for packing in packings]
        joined = positions[0] if len(positions) == 1 else mx.concatenate(positions)
        parts = zip(*((packing.rectangle, packing.kept) for packing in packings))
        return cls(joined, packings, *parts)


class _PlacedRows:
    """Rows that share a buffer."""

    def __init__(
        self, buffer: Buffer, rows: list[int], places: Sequence[Place], windows: Windows
    ) -> None:
        lengths, firsts = windows.lengths[rows], windows.first[rows]
        self.buffer, self.rows, self.length = buffer, rows, int(lengths.max())
        self.slots = {places[row][1]: row for row in rows}
        self.used = max(self.slots) + 1
        # True if all slots have a row and all rows have equally many tokens.
        self.is_even = len(set(lengths.tolist())) == 1 and self.used == len(rows)
        # The rows' tokens, and the slot of each.
        pairs = zip(firsts.tolist(), lengths.tolist(), strict=True)
        self.tokens = np.concatenate([np.arange(first, first + count) for first, count in pairs])
        self.slot = np.repeat([*self.slots], lengths)
        self._all_tokens = windows.tokens

    @cached_property
    def rect(self) -> Index:
        """An index of the tokens of all slots, [used * T]."""
        # An empty slot gets the queries of another slot; the result isn't used.
        table = [self.slots.get(slot, self.rows[0]) for slot in range(self.used)]
        return _index(self._all_tokens[table, : self.length].reshape(-1))


class _Placement:
    """Indexes that depend only on the rows' places and window lengths; cached like `Windows`."""

    def __init__(self, places: tuple[Place, ...], lengths: tuple[int, ...]) -> None:
        windows, rows = _windows(lengths), defaultdict[Buffer, list[int]](list)
        for row, length in enumerate(lengths):
            if length:
                rows[places[row][0]].append(row)
        self.parts = [_PlacedRows(*each, places, windows) for each in rows.items()]
        self.buffers = [*rows]
        self.by_part = _index(np.concatenate([part.tokens for part in self.parts]))
        numbers, slots = {buffer: number for number, buffer in enumerate(rows)}, []
        for row, ((buffer, slot), first) in enumerate(zip(places, windows.first.tolist())):
            if lengths[row]:
                slots.append((numbers[buffer], slot, buffer.capacity, first, lengths[row]))
        self.window_slots = tuple(slots)
        self._starts: dict[int, tuple[mx.array, list[int]]] = {}
        self._step = windows.step

    @cached_property
    def from_parts(self) -> Index:
        """An index of each token's output among those of all parts."""
        where, base = np.zeros(len(self._step), dtype=np.int64), 0
        for part in self.parts:
            where[part.tokens] = base + part.slot * part.length + self._step[part.tokens]
            base += part.used * part.length
        return _index(where)

    def line_starts(self, heads: int) -> tuple[mx.array, list[int]]:
        """Returns position 0's `kv_lines`, uint32 [n or 1, 2 * heads], and where the parts end."""
        if heads not in self._starts:
            counts = [len(part.tokens) for part in self.parts]
            sizes = [(part.buffer.slots, part.buffer.capacity) for part in self.parts]
            slots, capacity = np.repeat(sizes, counts, axis=0).T[..., None, None]
            slot = np.concatenate([part.slot for part in self.parts])[:, None, None]
            both, head = np.arange(2)[:, None], np.arange(heads)
            base = ((both * slots + slot) * heads + head) * capacity
            base = base[:1] if (base == base[:1]).all() else base  # one slot: less to upload
            starts = _on_device(base.reshape(len(base), -1), np.uint32)
            self._starts[heads] = starts, (np.cumsum(counts)[:-1] * 2 * heads).tolist()
        return self._starts[heads]


_placement = functools.lru_cache(maxsize=64)(_Placement)


class Part:
    """The tokens of rows that share a buffer."""

    def __init__(self, packing: Packing, placed: _PlacedRows) -> None:
        limits = packing.layout.limits
        self.buffer, self.length, self.used = placed.buffer, placed.length, placed.used
        self.limit = min(max(limits[row] for row in placed.rows), self.buffer.capacity)
        # If all rows have the same length after the pass, a causal mask needs no array.
        ends = {packing.ends[row] for row in placed.rows} if packing.ends else set()
        self.end = ends.pop() if len(ends) == 1 and placed.is_even else None
        # A reference to the packing would form a cycle, and large masks would stay in memory until
        # Python collects it.
        self._all_positions, self._placed = packing.positions, placed
        self._biases: dict[int, mx.array] = {}

    def rect(self, x: mx.array) -> mx.array:
        """Converts [N, ..] to [slots, T, ..]."""
        return x[self._placed.rect].reshape(self.used, self.length, *x.shape[1:])

    @cached_property
    def mask(self) -> mx.array:
        """The causal mask, bool [slots, 1, T, limit]."""
        return mx.arange(self.limit) <= self.positions[:, None, :, None]

    def bias(self, count: int) -> mx.array:
        """Returns the mask as numbers to add to scores: 0 or -inf, [slots, 1, T * count, limit].

        `count` heads of queries share a KV head; those of a token follow each other.
        """
        if count not in self._biases:
            bias = mx.where(self.mask, 0.0, -mx.inf)
            self._biases[count] = mx.repeat(bias, count, axis=2)
        return self._biases[count]

    @cached_property
    def positions(self) -> mx.array:
        """The positions of the part's tokens, int32 [slots, T]."""
        return self.rect(self._all_positions)

    @property
    def least_position(self) -> int:
        """A lower bound, known on the host, of the first position of a chunk of one row."""
        return max(0, self.limit - self.length - STRIDE)


def _index(places: np.ndarray) -> Index:
    """An index of these places: a slice if they are consecutive."""
    first, count = int(places[0]) if len(places) else 0, len(places)
    if np.array_equal(places, np.arange(first, first + count)):
        return slice(first, first + count)
    return _on_device(places)


def _on_device(values: np.ndarray, dtype: Any = np.int32) -> mx.array:
    return _uploaded(values.astype(dtype).tobytes(), dtype, values.shape)


# On CUDA, with managed memory, each new array from the host costs the GPU a page fault.
@functools.lru_cache(maxsize=256)
def _uploaded(values: bytes, dtype: Any, shape: tuple[int, ...]) -> mx.array:
    return mx.array(np.frombuffer(values, dtype=dtype).reshape(shape))
