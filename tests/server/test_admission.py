"""Slots: taken whole or not at all, freed once, and the wait for one. Which client is which."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.errors import (
    DrainingError,
    EngineHungError,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
)
from mlx_mtp.server.admission import (
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    UNKNOWN_RETRY_SECONDS,
    RequestLimiter,
    client_of,
    named,
)
from tests.server.fake_engine import FakeEngine, FakeInfo, answer

Scope = dict[str, Any]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def limiter(rows: int = 2, queue: int = 3, clock: Clock | None = None) -> RequestLimiter:
    engine = FakeEngine(answer([300]), FakeInfo(max_num_seqs=rows))
    return RequestLimiter(engine, queue, clock or Clock())


def scope(path: str = "/v1/messages", method: str = "POST", **headers: str) -> Scope:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    client = ("10.0.0.7", 1234)
    return {"type": "http", "method": method, "path": path, "headers": raw, "client": client}


def entered(limits: RequestLimiter, count: int = 0) -> Scope:
    request = scope()
    limits.enter(request)
    if count:
        limits.reserve(request, count)
    return request


def test_all_of_a_request_or_nothing() -> None:
    limits = limiter(rows=2, queue=3)
    first, second = entered(limits, 4), entered(limits)
    with pytest.raises(QueueFullError, match=r"4 answers.*3 may wait"):
        limits.reserve(second, 2)
    assert limits.held == 4
    limits.reserve(second, 1)
    with pytest.raises(QueueFullError):
        limits.check(scope())
    limits.leave(first)
    limits.check(scope())
    limits.leave(second)
    assert (limits.held, limits.num_open) == (0, 0)
    assert limits.rejected == {"queue_full": 2}
    with pytest.raises(InvalidRequestError, match=r"6 answers.*holds 5"):
        limits.reserve(entered(limits), 6)


def test_without_a_queue_rows_are_still_used() -> None:
    limits = limiter(rows=2, queue=0)
    entered(limits, 2)
    with pytest.raises(QueueFullError):
        entered(limits, 1)


@given(sizes=st.lists(st.integers(1, 7), max_size=30), ends=st.lists(st.integers(0, 29)))
def test_places_are_never_lost_nor_exceeded(sizes: list[int], ends: list[int]) -> None:
    limits, held = limiter(rows=3, queue=4), []
    for turn, size in enumerate(sizes):
        request = entered(limits)
        try:
            limits.reserve(request, size)
            held.append((request, size))
        except QueueFullError:
            assert limits.held + size > 7
            limits.leave(request)
        if held and turn < len(ends):
            limits.leave(held.pop(ends[turn] % len(held))[0])
        assert limits.held == sum(size for _, size in held) <= 7
        assert limits.num_open == len(held)


def test_the_wait_follows_the_rate_of_ends() -> None:
    clock = Clock()
    limits = limiter(rows=2, queue=0, clock=clock)
    requests = [entered(limits, 1) for _ in range(2)]

    def wait() -> int | None:
        with pytest.raises(QueueFullError) as caught:
            limits.check(scope())
        return caught.value.retry_after

    def replace(times: int, seconds: float) -> None:
        for _ in range(times):
            limits.leave(requests.pop(0))
            requests.append(entered(limits, 1))
            clock.now += seconds

    assert wait() == UNKNOWN_RETRY_SECONDS
    replace(5, seconds=7.0)
    assert wait() in (8, 9)
    clock.now += 10_000.0
    assert wait() == MAX_RETRY_SECONDS
    replace(100, seconds=0.01)
    assert wait() == MIN_RETRY_SECONDS


def test_what_is_open_while_it_drains_or_hangs() -> None:
    limits = limiter()
    engine = limits._engine
    engine.hang_reason = "the engine hangs"
    with pytest.raises(EngineHungError, match="the engine hangs") as hung:
        limits.check(scope())
    assert hung.value.retry_after == UNKNOWN_RETRY_SECONDS
    engine.unhealthy_reason = "it died"
    with pytest.raises(EngineStoppedError, match="it died"):
        limits.check(scope(path="/v1/messages/"))
    for path, method in (("/v1/messages", "GET"), ("/tokenize", "POST"), ("/health", "GET")):
        limits.check(scope(path, method))
    limits.draining, limits.drain_seconds = True, 12.3
    for path in ("/v1/messages", "/v1/models", "/tokenize"):
        with pytest.raises(DrainingError) as draining:
            limits.check(scope(path))
        assert draining.value.retry_after == 13
    for path in ("/health", "/metrics", "/health/"):
        limits.check(scope(path, "GET"))
    assert limits.rejected == {"engine": 2, "draining": 3}


def test_a_client_is_known_by_key_and_address_first_and_by_what_it_says_second() -> None:
    plain = client_of(scope())
    assert plain == ("@10.0.0.7", "")
    agent, other = client_of(scope(user_agent="opencode/1")), client_of(scope(user_agent="curl/8"))
    assert agent[0] == other[0] == plain[0]
    assert len({plain[1], agent[1], other[1]}) == 3
    keyed = client_of(scope(authorization="Bearer secret"))
    assert keyed[0].endswith("@10.0.0.7")
    assert keyed[0] != plain[0]
    assert "secret" not in str(keyed)
    assert client_of(scope(x_api_key="secret")) == keyed
    assert client_of(scope(x_api_key="secret2")) != keyed
    assert named(agent, None) == agent
    assert named(agent, "anna")[0] == agent[0]
    assert named(agent, "anna") == named(other, "anna") != named(agent, "ben")
    assert len(named(agent, "x" * 10**6)[1]) < 40
