"""Places in the queue: counted whole or not at all, given back once, and the wait for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.errors import DrainingError, EngineHungError, InvalidRequestError, QueueFullError
from mlx_mtp.server.clients import client_of, named
from mlx_mtp.server.gate import (
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    UNKNOWN_RETRY_SECONDS,
    Gate,
)
from tests.server.fake_engine import FakeEngine, FakeInfo, answer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def gate(rows: int = 2, queue: int = 3, clock: Clock | None = None) -> Gate:
    engine = FakeEngine(answer([300]), FakeInfo(max_num_seqs=rows))
    return Gate(engine, queue, clock or Clock())


def test_all_of_a_request_or_nothing() -> None:
    door = gate(rows=2, queue=3)
    first, second = door.enter(), door.enter()
    first.reserve(4)
    with pytest.raises(QueueFullError, match=r"4 answers.*3 may wait") as caught:
        second.reserve(2)
    assert caught.value.status == 429
    assert door.held == 4
    second.reserve(1)
    with pytest.raises(QueueFullError):
        door.check()
    first.close()
    door.check()
    second.close()
    assert (door.held, door.num_open) == (0, 0)
    assert door.rejected == {"queue_full": 2}


def test_what_never_fits_is_the_clients_mistake() -> None:
    door = gate(rows=2, queue=3)
    with pytest.raises(InvalidRequestError, match=r"6 answers.*holds 5"):
        door.enter().reserve(6)
    assert door.held == 0


def test_without_a_queue_rows_are_still_used() -> None:
    door = gate(rows=2, queue=0)
    door.enter().reserve(2)
    with pytest.raises(QueueFullError):
        door.enter().reserve(1)


@given(sizes=st.lists(st.integers(1, 7), max_size=30), closes=st.lists(st.integers(0, 29)))
def test_places_are_never_lost_nor_exceeded(sizes: list[int], closes: list[int]) -> None:
    door, held = gate(rows=3, queue=4), []
    for turn, size in enumerate(sizes):
        ticket = door.enter()
        try:
            ticket.reserve(size)
            held.append((ticket, size))
        except QueueFullError:
            assert door.held + size > 7
            ticket.close()
        if held and turn < len(closes):
            held.pop(closes[turn] % len(held))[0].close()
        assert door.held == sum(size for _, size in held) <= 7
        assert door.num_open == len(held)


def test_the_wait_follows_the_rate_of_ends() -> None:
    clock = Clock()
    door = gate(rows=2, queue=0, clock=clock)

    def full() -> int:
        with pytest.raises(QueueFullError) as caught:
            door.check()
        assert caught.value.retry_after is not None
        return caught.value.retry_after

    tickets = [door.enter() for _ in range(2)]
    for ticket in tickets:
        ticket.reserve(1)
    assert full() == UNKNOWN_RETRY_SECONDS
    for _ in range(5):  # One ends every 7 seconds.
        tickets.pop(0).close()
        tickets.append(door.enter())
        tickets[-1].reserve(1)
        clock.now += 7.0
    assert full() in (8, 9)
    clock.now += 10_000.0
    assert full() == MAX_RETRY_SECONDS
    for _ in range(100):
        tickets.pop(0).close()
        tickets.append(door.enter())
        tickets[-1].reserve(1)
        clock.now += 0.01
    assert full() == MIN_RETRY_SECONDS


def test_nobody_comes_in_while_it_drains_or_hangs() -> None:
    door = gate()
    door._engine.hang_reason = "the engine hangs"
    with pytest.raises(EngineHungError, match="the engine hangs") as hung:
        door.check()
    assert hung.value.status == 503
    assert hung.value.retry_after == UNKNOWN_RETRY_SECONDS
    door.draining, door.drain_seconds = True, 12.3
    with pytest.raises(DrainingError) as draining:
        door.check()
    assert draining.value.retry_after == 13
    assert door.rejected == {"engine": 1, "draining": 1}


def scope(**headers: str) -> dict[str, object]:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "headers": raw, "client": ("10.0.0.7", 1234)}


def test_a_client_is_known_by_key_and_address_first_and_by_what_it_says_second() -> None:
    plain = client_of(scope())
    assert plain == ("@10.0.0.7", "")
    agent = client_of(scope(user_agent="opencode/1"))
    other = client_of(scope(user_agent="curl/8"))
    assert agent[0] == other[0] == plain[0]
    assert len({plain[1], agent[1], other[1]}) == 3
    key = client_of(scope(authorization="Bearer secret"))
    assert key[0].endswith("@10.0.0.7")
    assert key[0] != plain[0]
    assert "secret" not in str(key)
    assert client_of(scope(x_api_key="secret"))[0] != plain[0]
    assert named(agent, None) == agent
    assert named(agent, "anna")[0] == agent[0]
    assert named(agent, "anna") == named(other, "anna") != named(agent, "ben")
    assert len(named(agent, "x" * 10**6)[1]) < 40
