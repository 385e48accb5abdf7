"""The waiting requests, shared fairly between clients.

Clients take turns by deficit round robin (Shreedhar and Varghese 1995). As in fq_codel, credit can
go below 0, so that a turn doesn't depend on the next prompt's length: it lasts until the client has
used `QUANTUM` prompt tokens. A longer prompt is admitted in its client's turn and paid for with the
client's following turns.

A client is a path of names, the most trusted first: (key or address, user or agent). Clients with
the same first name share the turns of that name, so inventing second names gains nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_mtp.engine.sequence import Sequence

QUANTUM = 1024  # tokens of one turn
FLAT_COST = 128  # tokens charged per request on top of its prompt, for the row that it takes
NUM_NAMES = 2  # names of a path that count; missing ones are empty


@dataclass(eq=False, slots=True)
class _Lane:
    """The requests under one name: lanes by the next name or, at the last name, a queue."""

    credit: int = QUANTUM
    size: int = 0  # number of requests
    items: deque[Sequence] = field(default_factory=deque)
    # By name. Empty lanes stay until their debt is paid.
    lanes: OrderedDict[str, _Lane] = field(default_factory=OrderedDict)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.items
        for lane in self.lanes.values():
            yield from lane

    def drop_finished(self) -> None:
        self.items = deque(item for item in self.items if not item.finished)
        for lane in self.lanes.values():
            lane.drop_finished()
        self.size = len(self.items) + sum(lane.size for lane in self.lanes.values())
        if not self.size:
            self.lanes.clear()


class FairQueue(_Lane):
    """The waiting requests: clients take turns; a client's requests are in order of arrival."""

    def add(self, item: Sequence, *, first: bool = False) -> None:
        """Queue a request after its client's others, or before if `first`; a new client is last."""
        lane: _Lane = self
        lane.size += 1
        for name in (*item.client, *[""] * NUM_NAMES)[:NUM_NAMES]:
            lane = lane.lanes.setdefault(name, _Lane())
            lane.size += 1
        if first:
            lane.items.appendleft(item)
        else:
            lane.items.append(item)

    def peek(self) -> Sequence:
        return self._next_path()[-1].items[0]

    def pop(self, *, free: bool = False) -> Sequence:
        """Remove and return the next request; its client pays unless `free` (to add it again)."""
        path = self._next_path()
        item = path[-1].items.popleft()
        for lane in path:
            lane.size -= 1
            if not lane.size:
                lane.lanes.clear()
            lane.credit -= 0 if free else item.num_prompt + FLAT_COST
        return item

    def _next_path(self) -> list[_Lane]:
        """The lanes from the queue to the next request's: on each level the first with credit."""
        assert self.size, "the queue is empty"
        path: list[_Lane] = [self]
        while len(path) <= NUM_NAMES:
            lanes = path[-1].lanes
            name, lane = next(iter(lanes.items()))
            if lane.credit <= 0:
                lane.credit += QUANTUM
                lanes.move_to_end(name)
            elif lane.size:
                path.append(lane)
            else:
                del lanes[name]
        return path
