"""The waiting requests, shared out between clients. No arrays, no clock: policy alone.

Clients take turns (deficit round robin, Shreedhar and Varghese 1995; credit may go below 0, as in
fq_codel, so that one need not look ahead). A turn lasts until the client has used up `QUANTUM`
tokens of prompt; a long prompt is let in when its turn comes and paid for with the turns after it.
So a client's next request waits for at most one turn of each other client, however many requests
those have, and a client alone gets everything.

A client is a path, the most trusted name first: (key or address, user or agent). Those with the
same first name share its turns, so that nobody gets more by calling himself many names.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

QUANTUM = 1024
"""What one turn is worth, in tokens."""
FLAT_COST = 128
"""What a request costs beside its prompt: it takes a row for an answer of unknown length."""


NUM_NAMES = 2
"""So many parts of a client's path are told apart; those that are missing are empty names."""


class Queued(Protocol):
    """What the queue needs to know of a request."""

    @property
    def client(self) -> tuple[str, ...]:
        """Whose it is; empty: nobody's in particular."""

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""


Item = TypeVar("Item", bound=Queued)


class _Fifo(Generic[Item]):
    """One client's requests."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def add(self, item: Item) -> None:
        self._items.append(item)

    def peek(self) -> Item:
        return self._items[0]

    def pop(self) -> Item:
        return self._items.popleft()

    set_aside = pop

    def put_back(self, item: Item) -> None:
        self._items.appendleft(item)

    def keep(self, wanted: frozenset[Item]) -> None:
        self._items = deque(item for item in self._items if item in wanted)


class _Lane(Generic[Item]):
    """The requests behind one name, and what it may still take of this turn."""

    def __init__(self, depth: int) -> None:
        self.credit = QUANTUM
        self.items: FairQueue[Item] | _Fifo[Item]
        self.items = FairQueue(depth + 1) if depth + 1 < NUM_NAMES else _Fifo()


class FairQueue(Generic[Item]):
    """Requests in the order in which they are to be admitted; a client's own in that of arrival.

    `peek` and the `pop` after it give the same request, whatever is added in between. One that is
    not wanted yet can be set aside and put back: it costs its client nothing until it is popped.

    Args:
        depth: which part of a client's path names its lanes.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._lanes: OrderedDict[str, _Lane[Item]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        """All of them, in no particular order."""
        for lane in self._lanes.values():
            yield from lane.items

    def add(self, item: Item) -> None:
        """Put a request at the end of its client's; a new client comes last in the round."""
        self._lane(item).items.add(item)
        self._size += 1

    def put_back(self, item: Item) -> None:
        """Put a request that was set aside before its client's others."""
        self._lane(item).items.put_back(item)
        self._size += 1

    def peek(self) -> Item:
        """The next request; there must be one."""
        return self._next_lane().items.peek()

    def pop(self) -> Item:
        """Take the next request."""
        lane = self._next_lane()
        item = lane.items.pop()
        lane.credit -= item.num_prompt + FLAT_COST
        self._took_one()
        return item

    def set_aside(self) -> Item:
        """Take the next request, to be put back."""
        item = self._next_lane().items.set_aside()
        self._took_one()
        return item

    def keep(self, wanted: frozenset[Item]) -> None:
        """Drop all others."""
        for lane in self._lanes.values():
            lane.items.keep(wanted)
        self._size = sum(len(lane.items) for lane in self._lanes.values())
        if not self._size:
            self._lanes.clear()

    def clear(self) -> None:
        """Drop all."""
        self._lanes.clear()
        self._size = 0

    def _lane(self, item: Item) -> _Lane[Item]:
        name = item.client[self._depth] if len(item.client) > self._depth else ""
        if name not in self._lanes:
            self._lanes[name] = _Lane(self._depth)
        return self._lanes[name]

    def _took_one(self) -> None:
        self._size -= 1
        if not self._size:
            self._lanes.clear()

    def _next_lane(self) -> _Lane[Item]:
        """The first with credit. Lanes without requests stay only until their debt is paid."""
        assert self._size, "the queue is empty"
        while True:
            name, lane = next(iter(self._lanes.items()))
            if len(lane.items) and lane.credit > 0:
                return lane
            if lane.credit > 0:
                del self._lanes[name]
                continue
            lane.credit += QUANTUM
            self._lanes.move_to_end(name)
