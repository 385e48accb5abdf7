"""Clients take turns: none starves, and each one's requests are first come, first served."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.engine.fair_queue import FLAT_COST, QUANTUM, FairQueue


@dataclass(frozen=True, eq=False)
class Item:
    """The attributes of a sequence that the queue reads."""

    client: tuple[str, ...]
    num_prompt: int = 10

    @property
    def cost(self) -> int:
        return self.num_prompt + FLAT_COST


CLIENTS = st.sampled_from([(), ("a",), ("b",), ("c",), ("c", "x"), ("c", "y"), ("d", "z")])
ADDS = st.builds(Item, CLIENTS, st.integers(1, 5000))


def queue_of(items: list[Item]) -> FairQueue:
    queue = FairQueue()
    for item in items:
        queue.add(item)
    return queue


def drain(queue: FairQueue) -> list[Item]:
    return [queue.pop() for _ in range(queue.size)]


def test_one_among_two_hundred_is_next_but_one_turn():
    queue = queue_of([Item(("burst",), 100) for _ in range(200)])
    taken = [queue.pop() for _ in range(3)]
    one = Item(("one",), 100)
    queue.add(one)
    place = drain(queue).index(one)
    assert (place + len(taken)) * one.cost <= QUANTUM + one.cost
    assert place > 0  # The turn that has begun continues.


def test_many_names_at_one_address_share_its_turns():
    """A client gains nothing by using a new name each time."""
    pairs = ((Item(("liar", f"name {i}"), 100), Item(("honest", "me"), 100)) for i in range(100))
    queue = queue_of([item for pair in pairs for item in pair])
    first = [queue.pop().client[0] for _ in range(100)]
    assert abs(first.count("liar") - 50) <= 1 + (QUANTUM + 100) // (100 + FLAT_COST)
    # Names at one address take turns among themselves.
    burst = [Item(("here", "burst"), 1000) for _ in range(50)]
    queue = queue_of([*burst, Item(("here", "one"), 1000)])
    assert [i.client[1] for i in drain(queue)[:3]].count("one") == 1


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.one_of(ADDS, st.none()), max_size=120))
def test_fifo_within_a_client_work_conserving_and_peek_tells_the_truth(steps):
    """A step of None takes a request out; any other step adds that request."""
    queue = FairQueue()
    expected: dict[tuple[str, ...], list[Item]] = {}
    for item in steps:
        first = queue.peek() if queue.size else None
        if item is not None:
            queue.add(item)
            expected.setdefault(item.client, []).append(item)
            assert first is None or queue.peek() is first
        elif first is not None:
            assert queue.pop() is first is expected[first.client].pop(0)
        assert queue.size == sum(map(len, expected.values())) == len(list(queue))


@settings(max_examples=60, deadline=None)
@given(
    backlog=st.lists(ADDS, max_size=60),
    later=st.lists(ADDS, min_size=200, max_size=200),
    size=st.integers(1, 5000),
)
def test_nobody_starves(backlog, later, size):
    """A new client's request waits for at most one turn per other client, under any load."""
    queue = queue_of(backlog)
    for _ in range(len(backlog) // 2):
        queue.pop()
    mine = Item(("me",), size)
    queue.add(mine)
    served: Counter[str] = Counter()
    for item in later:
        queue.add(item)
        if (taken := queue.pop()) is mine:
            break
        served["".join(taken.client[:1])] += taken.cost
    else:
        raise AssertionError("it was not served")
    longest = max(item.cost for item in (*backlog, *later))
    assert all(tokens < QUANTUM + longest for tokens in served.values())


def test_clients_are_forgotten_with_their_last_request():
    queue = FairQueue()
    for number in range(1000):
        queue.add(Item((f"client {number}",), 10_000))
        queue.pop()
        assert len(queue.lanes) < 64
