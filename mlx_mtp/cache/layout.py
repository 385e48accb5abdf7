"""Which slot of which buffer holds each row's KV: size classes, decided on the host.

A row has a slot in a buffer with the capacity of the row's size class. A row that outgrows its
class moves alone, and a class grows by adding a buffer. Each long row has a buffer of its own, so
it is never copied because of another row. Short rows share buffers of several slots, since each
buffer costs a launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

GROWTH = 256  # tokens; capacities are multiples of this
STRIDE = 64  # tokens; attention reads up to a multiple of this, so that shapes rarely change
_BLOCK = 8192  # maximum tokens of a buffer with several slots


@dataclass(frozen=True, eq=False)
class Buffer:
    """The shape of a buffer that every attention layer has, without heads and dimensions."""

    slots: int
    capacity: int  # tokens of a slot


Place = tuple[Buffer, int]  # a buffer and a slot in it
Moves = list[tuple[Place, Place]]  # old and new place of each row that moves
_NOWHERE = Buffer(0, -1), 0  # place of a row that has no slot yet


@cache
def rounded_capacity(tokens: int) -> int:
    """Returns the capacity, in tokens, of the size class for rows of `tokens` tokens."""
    capacity = GROWTH
    while capacity < tokens:
        # Long rows share no buffer, so they can have many classes.
        more = capacity // (4 if most_slots(capacity) > 1 else 8)
        capacity = -(-(capacity + more) // GROWTH) * GROWTH
    return capacity


def most_slots(capacity: int) -> int:
    """Returns the maximum number of slots in a buffer of `capacity`; 1 for long rows."""
    return max(_BLOCK // capacity, 1)


class Layout:
    """The places of B rows, and how far attention reads each of them."""

    def __init__(self, num_rows: int) -> None:
        self.places: list[Place] = [_NOWHERE] * num_rows
        self.limits: list[int] = []  # upper bounds of the rows' lengths after the next window
        self._num_settled = num_rows  # rows from this index on have joined since `arrange`
        self._rows_have_left = False  # since `arrange`, so slots may be empty

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers that hold rows, ordered by their first rows."""
        return list(dict.fromkeys(buffer for buffer, _ in self.places))

    def arrange(self, limits: Sequence[int], rooms: Sequence[int]) -> Moves:
        """Give row b a slot for `rooms[b]` tokens; returns the moves of rows that had a place.

        `limits` are upper bounds of the rows' lengths after the next window. Afterwards at most
        half of the slots of a class are empty, and none in a class of long rows.
        """
        self.limits = [-(-limit // STRIDE) * STRIDE for limit in limits]
        moving = {  # rows that need another place, and the capacity of their class
            row: rounded_capacity(max(room, buffer.capacity))
            for row, ((buffer, _), room) in enumerate(zip(self.places, rooms, strict=True))
            if buffer.capacity < room
            or (row >= self._num_settled and most_slots(buffer.capacity) > 1)
        }
        if self._rows_have_left or any(row < self._num_settled for row in moving):
            self._compact(moving)
        self._num_settled, self._rows_have_left = len(self.places), False
        if not moving:
            return []
        before = self.places.copy()
        taken = [place for row, place in enumerate(before) if row not in moving]
        for capacity in dict.fromkeys(moving.values()):
            rows = [row for row, own in moving.items() if own == capacity]
            same = dict.fromkeys(buffer for buffer, _ in taken if buffer.capacity == capacity)
            slots = [(buffer, slot) for buffer in same for slot in range(buffer.slots)]
            free = [place for place in slots if place not in taken]
            while len(free) < len(rows):
                # At least double the slots, so that a class has few buffers if rows join singly.
                count = max(len(rows) - len(free), len(slots) + 1)
                buffer = Buffer(min(count, most_slots(capacity)), capacity)
                new = [(buffer, slot) for slot in range(buffer.slots)]
                slots, free = slots + new, free + new
            for row, place in zip(rows, free):
                self.places[row] = place
        # Otherwise a write would reach into another row.
        assert all(buffer.capacity >= n for (buffer, _), n in zip(self.places, rooms))
        return [(before[row], self.places[row]) for row in moving if before[row] != _NOWHERE]

    def select(self, rows: Sequence[int]) -> tuple[Layout, dict[Buffer, Buffer]]:
        """Returns the layout of these rows in new buffers, and a map of new to old buffers."""
        # New `Buffer` objects, as they are keys by identity: two parts of a batch can join again
        # after each has written its own KV to its copy of a buffer that they had in common.
        copies = {self.places[row][0]: replace(self.places[row][0]) for row in rows}
        selected = Layout(len(rows))
        selected.places = [
            (copies[buffer], slot) for buffer, slot in map(self.places.__getitem__, rows)
        ]
        selected.limits = [self.limits[row] for row in rows]
        selected._rows_have_left = True
        return selected, {copy: buffer for buffer, copy in copies.items()}

    def extend(self, other: Layout) -> None:
        self.places = self.places + other.places
        self.limits = self.limits + other.limits

    def _compact(self, moving: dict[int, int]) -> None:
        """Add the rows of the emptiest buffers to `moving` where over half of a class is empty."""
        waiting = Counter(moving.values())
        held = Counter(buffer for row, (buffer, _) in enumerate(self.places) if row not in moving)
        for capacity in {buffer.capacity for buffer in held}:
            same = [buffer for buffer in held if buffer.capacity == capacity]
            slots = sum(buffer.slots for buffer in same)
            rows = sum(held[buffer] for buffer in same) + waiting[capacity]
            for emptiest in sorted(same, key=held.__getitem__):
                if slots <= 2 * rows:
                    break
                slots -= emptiest.slots
                for row, (buffer, _) in enumerate(self.places):
                    if buffer is emptiest:
                        moving.setdefault(row, capacity)
