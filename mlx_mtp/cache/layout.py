"""Which slot of which buffer holds each row's KV: size classes, decided on the host.

A row has a slot of a buffer whose capacity is that of the row's class. A row that outgrows its
class moves alone, and a class grows by a new buffer. Long rows have a buffer each and are never
copied for another row; buffers of short rows have several slots, since each buffer is a launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

GROWTH = 256  # capacities are multiples of this
STRIDE = 64  # attention reads up to a multiple of this: buffers serve many steps
_BLOCK = 8192  # most tokens of a buffer with several slots

Place = tuple[int, int]  # buffer and slot


class Buffer(NamedTuple):
    """The shape of a buffer, heads and dimensions apart."""

    slots: int
    capacity: int  # tokens of a slot


class Change(NamedTuple):
    """How a layout's buffers follow from those before."""

    kept: list[int]  # of the buffers before: they come first
    new: list[Buffer]
    moves: list[tuple[Place, Place]]  # of rows, from a buffer before to one of now


@cache
def rounded_capacity(tokens: int) -> int:
    """The capacity of the class of rows that need room for so many tokens."""
    capacity = GROWTH
    while capacity < tokens:
        # Long rows share no buffer, so their classes need not be few.
        more = capacity // (4 if most_slots(capacity) > 1 else 8)
        capacity = -(-(capacity + more) // GROWTH) * GROWTH
    return capacity


def most_slots(capacity: int) -> int:
    """Slots of a buffer of a class, at most; 1 for long rows."""
    return max(_BLOCK // capacity, 1)


class Layout:
    """The places of B rows, and how far attention reads each of them."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.buffers: list[Buffer] = []
        self.places: list[Place] = []
        self.limits: list[int] = []  # bounds of the rows' lengths, the next window included
        self._num_settled = num_rows  # rows from here on have joined, in buffers of their own
        self._left = False  # rows have left, so that slots may be empty

    def arrange(self, limits: Sequence[int], rooms: Sequence[int]) -> Change | None:
        """Give each row room for so many tokens; None if all have it.

        Afterwards at most half of the slots of a class are empty; of a class of long rows, none.
        """
        self.limits = [-(-limit // STRIDE) * STRIDE for limit in limits]
        moving = self._outgrown(rooms)
        if self._left or any(row < self._num_settled for row in moving):
            self._thin(moving)
        self._num_settled, self._left = self.num_rows, False
        if not moving:
            return None
        before = dict(enumerate(self.places))
        kept = sorted({buffer for row, (buffer, _) in before.items() if row not in moving})
        places = {
            row: (kept.index(buffer), slot)
            for row, (buffer, slot) in before.items()
            if row not in moving
        }
        self.buffers = [self.buffers[buffer] for buffer in kept]
        waiting = Counter(moving.values())
        for row, capacity in moving.items():
            places[row] = self._free_place(capacity, {*places.values()}, waiting[capacity])
            waiting[capacity] -= 1
        self.places = [places[row] for row in range(self.num_rows)]
        # Else a write would go to another row.
        has_room = (self.buffers[b].capacity >= n for (b, _), n in zip(self.places, rooms))
        assert all(has_room)
        moves = [(before[row], places[row]) for row in moving if row in before]
        return Change(kept, self.buffers[len(kept) :], moves)

    def select(self, rows: Sequence[int]) -> tuple[Layout, list[int]]:
        """The layout of these rows, and the buffers that they are in."""
        selected = Layout(len(rows))
        places = [self.places[row] for row in rows]
        kept = sorted({buffer for buffer, _ in places})
        selected.buffers = [self.buffers[buffer] for buffer in kept]
        selected.places = [(kept.index(buffer), slot) for buffer, slot in places]
        selected.limits = [self.limits[row] for row in rows]
        selected._left = True
        return selected, kept

    def extend(self, other: Layout) -> None:
        first = len(self.buffers)
        self.buffers = self.buffers + other.buffers
        self.places = self.places + [(first + buffer, slot) for buffer, slot in other.places]
        self.limits = self.limits + other.limits
        self.num_rows += other.num_rows

    def _outgrown(self, rooms: Sequence[int]) -> dict[int, int]:
        """Rows that need another place, and the capacity of their class."""
        moving = {}
        for row, room in enumerate(rooms):
            capacity = self.buffers[self.places[row][0]].capacity if self.places else -1
            if capacity < room:
                moving[row] = rounded_capacity(room)
            elif row >= self._num_settled and most_slots(capacity) > 1:
                moving[row] = capacity
        return moving

    def _thin(self, moving: dict[int, int]) -> None:
        """Let rows move out of the emptiest buffers of a class of which more than half is empty."""
        staying = Counter(
            buffer for row, (buffer, _) in enumerate(self.places) if row not in moving
        )
        for capacity in {self.buffers[buffer].capacity for buffer in staying}:
            own = {b: n for b, n in staying.items() if self.buffers[b].capacity == capacity}
            rows = sum(own.values()) + sum(c == capacity for c in moving.values())
            slots = sum(self.buffers[buffer].slots for buffer in own)
            while slots > 2 * rows:
                least = min(own, key=own.__getitem__)
                leaving = (row for row, (b, _) in enumerate(self.places) if b == least)
                moving |= {row: capacity for row in leaving if row not in moving}
                slots -= self.buffers[least].slots
                del own[least]

    def _free_place(self, capacity: int, taken: set[Place], waiting: int) -> Place:
        same = [b for b, buffer in enumerate(self.buffers) if buffer.capacity == capacity]
        places = [(b, slot) for b in same for slot in range(self.buffers[b].slots)]
        free = next((place for place in places if place not in taken), None)
        if free is not None:
            return free
        # As many as there are: so a class that rows join one by one has few buffers.
        slots = min(most_slots(capacity), max(waiting, len(places) + 1))
        self.buffers = [*self.buffers, Buffer(slots, capacity)]
        return len(self.buffers) - 1, 0
