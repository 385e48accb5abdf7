"""Turns between clients: nobody starves, nobody overtakes himself, nothing waits for nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.fair_queue import FLAT_COST, QUANTUM, FairQueue
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.depth import FixedDepth
from tests.engine.test_scheduler import finish_chunk, finish_decode


@dataclass(frozen=True, eq=False)
class Item:
    client: tuple[str, ...]
    num_prompt: int = 10
    number: int = 0

    @property
    def cost(self) -> int:
        return self.num_prompt + FLAT_COST


CLIENTS = st.sampled_from([(), ("a",), ("b",), ("c",), ("c", "x"), ("c", "y"), ("d", "z")])
ADDS = st.tuples(CLIENTS, st.integers(1, 5000))
TOP_NAMES = ("", "a", "b", "c", "d")


def drain(queue: FairQueue[Item]) -> list[Item]:
    return [queue.pop() for _ in range(len(queue))]


def test_one_among_two_hundred_is_next_but_one_turn():
    queue = FairQueue[Item]()
    burst = [Item(("burst",), 100, i) for i in range(200)]
    for item in burst:
        queue.add(item)
    taken = [queue.pop() for _ in range(3)]
    one = Item(("one",), 100)
    queue.add(one)
    place = drain(queue).index(one)
    assert (place + len(taken)) * (100 + FLAT_COST) <= QUANTUM + 100 + FLAT_COST
    assert place > 0  # The turn that had begun goes on.


def test_two_bursts_get_equal_shares_of_tokens_whatever_their_prompts():
    queue = FairQueue[Item]()
    for i in range(400):
        queue.add(Item(("short",), 32, i))
    for i in range(20):
        queue.add(Item(("long",), 4000, i))
    shares: Counter[str] = Counter()
    while all(any(i.client == (name,) for i in queue) for name in ("short", "long")):
        item = queue.pop()
        shares[item.client[0]] += item.cost
    assert abs(shares["short"] - shares["long"]) <= QUANTUM + 4000 + FLAT_COST


def test_many_names_at_one_address_share_its_turns():
    """Who calls himself by a new name each time gets no more for it."""
    queue = FairQueue[Item]()
    for i in range(100):
        queue.add(Item(("liar", f"name {i}"), 100, i))
        queue.add(Item(("honest", "me"), 100, i))
    first = [queue.pop().client[0] for _ in range(100)]
    assert abs(first.count("liar") - 50) <= 1 + (QUANTUM + 100) // (100 + FLAT_COST)


def test_names_at_one_address_take_turns():
    queue = FairQueue[Item]()
    for i in range(50):
        queue.add(Item(("here", "burst"), 1000, i))
    queue.add(Item(("here", "one"), 1000))
    assert [i.client[1] for i in drain(queue)[:3]].count("one") == 1


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(st.one_of(ADDS, st.none()), max_size=120))
def test_fifo_within_a_client_work_conserving_and_peek_tells_the_truth(steps):
    """None takes a request out; anything else puts one in."""
    queue = FairQueue[Item]()
    expected: dict[tuple[str, ...], list[Item]] = {}
    for number, step in enumerate(steps):
        if step is not None:
            told = queue.peek() if len(queue) else None
            item = Item(*step, number)
            queue.add(item)
            expected.setdefault(item.client, []).append(item)
            assert told is None or queue.peek() is told
        elif len(queue):
            told = queue.peek()
            item = queue.pop()
            assert item is told
            assert item is expected[item.client].pop(0)
        assert len(queue) == sum(map(len, expected.values())) == len(list(queue))


@settings(max_examples=80, deadline=None)
@given(
    backlog=st.lists(ADDS, max_size=60),
    later=st.lists(ADDS, min_size=200, max_size=200),
    size=st.integers(1, 5000),
)
def test_nobody_starves(backlog, later, size):
    """A request of a client who had none waits for one turn of each other, however many come."""
    queue = FairQueue[Item]()
    for number, add in enumerate(backlog):
        queue.add(Item(*add, number))
    for _ in range(len(backlog) // 2):
        queue.pop()
    mine = Item(("me",), size)
    queue.add(mine)
    served: Counter[str] = Counter()
    for number, add in enumerate(later):
        queue.add(Item(*add, number))
        item = queue.pop()
        if item is mine:
            break
        served[item.client[0] if item.client else ""] += item.cost
    else:
        raise AssertionError("it was not served")
    longest = max(n for _, n in [*backlog, *later]) + FLAT_COST
    assert all(tokens < QUANTUM + longest for tokens in served.values())


@settings(max_examples=200, deadline=None)
@given(adds=st.lists(ADDS, max_size=40), data=st.data())
def test_dropping_some_leaves_the_others_in_order(adds, data):
    queue = FairQueue[Item]()
    items = [Item(*add, number) for number, add in enumerate(adds)]
    for item in items:
        queue.add(item)
    kept = [item for item in items if data.draw(st.booleans())]
    queue.keep(frozenset(kept))
    assert len(queue) == len(kept)
    left = drain(queue)
    for client in {item.client for item in kept}:
        assert [i for i in left if i.client == client] == [i for i in kept if i.client == client]


@settings(max_examples=200, deadline=None)
@given(adds=st.lists(ADDS, min_size=1, max_size=40), data=st.data())
def test_what_is_set_aside_costs_nothing_and_comes_back_before_its_clients_others(adds, data):
    queue, untouched = FairQueue[Item](), FairQueue[Item]()
    items = [Item(*add, number) for number, add in enumerate(adds)]
    for item in items:
        queue.add(item)
        untouched.add(item)
    aside = [queue.set_aside() for _ in range(data.draw(st.integers(0, len(items))))]
    assert len(queue) == len(items) - len(aside)
    for item in reversed(aside):
        queue.put_back(item)
    left = drain(queue)
    for client in {item.client for item in items}:
        assert [i for i in left if i.client == client] == [i for i in items if i.client == client]
    costs = [Counter[str](), Counter[str]()]
    for count, order in zip(costs, (left, drain(untouched)), strict=True):
        for item in order[: len(items) // 2]:
            count["".join(item.client[:1])] += item.cost
    longest = max(size for _, size in adds) + FLAT_COST
    assert all(abs(costs[0][n] - costs[1][n]) <= 2 * (QUANTUM + longest) for n in TOP_NAMES)


def test_clients_are_forgotten_with_their_last_request():
    queue = FairQueue[Item]()
    for number in range(1000):
        queue.add(Item((f"client {number}",), 10_000))
        queue.add(Item(("steady",), 10))
        queue.pop()
        queue.pop()
        assert len(queue._root.lanes) < 64
    drain(queue)
    assert not queue._root.lanes


def test_the_scheduler_admits_by_turns():
    policy = Scheduler(EngineConfig(max_num_seqs=2, prefill_step_size=512), FixedDepth(2))

    def add(name: str, client: str) -> None:
        sampling = SamplingParams(max_tokens=5)
        wanted = Request(name, (3,) * 400, sampling, client=(client,))
        policy.add(Sequence(wanted, (1,), 5))

    for number in range(30):
        add(f"burst{number}", "burst")
    add("one", "one")
    admitted = []
    for _ in range(40):
        plan = policy.schedule()
        if plan.chunk is not None:
            admitted += [s.request_id for s, _, _ in plan.chunk.rows]
            finish_chunk(policy, plan)
        if plan.decode:
            finish_decode(policy, plan, stop=True)
    assert admitted.index("one") <= 3
    assert [n for n in admitted if n != "one"] == [f"burst{i}" for i in range(len(admitted) - 1)]
    assert len(admitted) > 10
