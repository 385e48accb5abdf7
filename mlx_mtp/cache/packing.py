"""The tokens of a pass as one long row: whose they are, their positions, and their KV's places.

Projections, norms, experts and lm_head see the N tokens of all rows side by side, and no padding.
The recurrence needs them as a rectangle, `rows`, and attention as one rectangle a buffer, `parts`.
Which token goes where is known on the host; only the positions are on the device.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.layout import Buffer, Layout
from mlx_mtp.kernels import attention

Index = slice | mx.array


class Packing:
    """`lengths[b]` tokens of each row b, from position `start[b]` (int32 [B]) on."""

    def __init__(self, layout: Layout, start: mx.array, lengths: Sequence[int]) -> None:
        self.layout = layout
        self.lengths = np.array(lengths)
        self.num_tokens = int(self.lengths.sum())
        self.longest = int(self.lengths.max())
        self.first = np.cumsum(self.lengths) - self.lengths
        self.row = np.repeat(np.arange(len(self.lengths)), self.lengths)  # of each token
        self.step = np.arange(self.num_tokens) - self.first[self.row]  # and its place in the row
        # The tokens of each row, [B, T]; after its last one that again.
        steps = np.minimum(np.arange(self.longest), np.maximum(self.lengths - 1, 0)[:, None])
        self.tokens = np.minimum(self.first[:, None] + steps, max(self.num_tokens - 1, 0))
        self._rect = _index(self.tokens.reshape(-1))
        self._flat = _index(self.row * self.longest + self.step)
        self._plans: dict[int, attention.Plan] = {}
        self.positions = start  # of each token, int32
        if self.longest > 1 or self.num_tokens < len(self.lengths):
            where, more = (mx.array(a.astype(np.int32)) for a in (self.row, self.step))
            self.positions = start[where] + more

    def rows(self, x: mx.array) -> mx.array:
        """[N, ..] to [B, T, ..]; what follows a row's tokens means nothing, but is finite."""
        return x[self._rect].reshape(*self.tokens.shape, *x.shape[1:])

    def flat(self, x: mx.array) -> mx.array:
        """[B, T, ..] to [N, ..]."""
        return x.reshape(-1, *x.shape[2:])[self._flat]

    def at(self, step: mx.array) -> mx.array:
        """The token of each row at its `step[b]` (int32 [B]): int32 [B]."""
        return mx.array(self.tokens[:, 0].astype(np.int32)) + step

    def after(self, known: mx.array, rest: mx.array) -> mx.array:
        """[N, ..] from each row's first token, [B, ..], and the others in their order."""
        order = np.where(
            self.step == 0, self.row, np.arange(self.num_tokens) + len(known) - 1 - self.row
        )
        return mx.concatenate([known, rest])[_index(order)]

    @cached_property
    def parts(self) -> list["Part"]:
        """The buffers that hold these rows."""
        rows = defaultdict[Buffer, list[int]](list)
        for row in np.flatnonzero(self.lengths).tolist():
            rows[self.layout.places[row][0]].append(row)
        return [Part(self, buffer, own) for buffer, own in rows.items()]

    def plan(self, group: int) -> attention.Plan:
        """The launches of the attention kernel, if so many query heads share a KV head."""
        if group not in self._plans:
            number = {part.buffer: i for i, part in enumerate(self.parts)}
            rows = []
            for row in np.flatnonzero(self.lengths).tolist():
                buffer, slot = self.layout.places[row]
                tokens = int(self.first[row]), int(self.lengths[row])
                rows.append(attention.Row(number[buffer], slot, buffer.capacity, *tokens))
            self._plans[group] = attention.plan(tuple(rows), group)
        return self._plans[group]

    @cached_property
    def by_part(self) -> Index:
        """The tokens of the first part, then those of the next."""
        return _index(np.concatenate([part.own for part in self.parts]))

    @cached_property
    def places(self) -> tuple[mx.array, mx.array]:
        """Slot and position of each token, by part: uint32 [N, 1], as indices need no cast then."""
        slots = np.concatenate([part.slot for part in self.parts]).astype(np.uint32)
        return mx.array(slots[:, None]), self.positions[self.by_part].astype(mx.uint32)[:, None]

    @cached_property
    def _from_parts(self) -> Index:
        """Where each token is among the outputs of all parts."""
        where = np.zeros(self.num_tokens, dtype=np.int64)
        base = 0
        for part in self.parts:
            where[part.own] = base + part.slot * part.length + self.step[part.own]
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
        layout, lengths = packing.layout, packing.lengths[rows]
        self.buffer = buffer
        self.limit = min(max(layout.limits[row] for row in rows), buffer.capacity)
        self.length = int(lengths.max())
        self._slots = {layout.places[row][1]: row for row in rows}
        self.used = max(self._slots) + 1
        pairs = zip(packing.first[rows].tolist(), lengths.tolist(), strict=True)
        # The tokens that are its own, and the slot of each.
        self.own = np.concatenate([np.arange(first, first + count) for first, count in pairs])
        self.slot = np.repeat([layout.places[row][1] for row in rows], lengths)
        # Not the packing: masks are large, and must not wait for Python to collect a cycle.
        self._every_position, self._tokens = packing.positions, packing.tokens

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
        last = self.rect(self._every_position)[:, None, :, None]
        return mx.arange(self.limit) <= last


def _index(wanted: np.ndarray) -> Index:
    """An index for these, a slice where they are consecutive."""
    first, count = int(wanted[0]) if len(wanted) else 0, len(wanted)
    if np.array_equal(wanted, np.arange(first, first + count)):
        return slice(first, first + count)
    return mx.array(wanted.astype(np.int32))
