"""Slots: all slots of a request are taken or none, and freed once; the wait for slots."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.errors import (
    UNKNOWN_RETRY_SECONDS,
    DrainingError,
    EngineHungError,
    EngineStoppedError,
    InvalidRequestError,
    MlxMtpError,
    QueueFullError,
)
from mlx_mtp.server.http.admission import (
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    RequestLimiter,
)
from mlx_mtp.server.http.record import record_of
from mlx_mtp.server.routes import find_route
from tests.support.fake_engine import FakeEngine, FakeInfo, answer

Scope = dict[str, Any]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def limiter(rows: int = 2, queue: int = 3, clock: Clock | None = None) -> RequestLimiter:
    engine = FakeEngine(answer([300]), FakeInfo(max_num_seqs=rows))
    return RequestLimiter(engine, queue, clock or Clock())


def scope(path: str = "/v1/messages", method: str = "POST") -> Scope:
    scope = {"method": method, "path": path}
    record_of(scope).route = find_route(path)
    return scope


def reserved(limits: RequestLimiter, count: int) -> Scope:
    request = scope()
    limits.reserve(request, count)
    return request


@given(
    sizes=st.lists(st.integers(1, 8), max_size=30),
    ends=st.lists(st.integers(0, 29)),
    rows=st.integers(1, 3),
    queue=st.integers(0, 4),
)
def test_places_are_never_lost_nor_exceeded(
    sizes: list[int], ends: list[int], rows: int, queue: int
) -> None:
    limits, held, refused, most = limiter(rows, queue), [], 0, rows + queue
    for turn, size in enumerate(sizes):
        full = rf"{limits.num_reserved} answers.*{queue} may wait"
        if limits.num_reserved < most:
            limits.check_admission(scope())
        else:
            refused += 1
            with pytest.raises(QueueFullError, match=full):
                limits.check_admission(scope())
        if limits.num_reserved + size <= most:
            held.append((reserved(limits, size), size))
        elif size > most:
            with pytest.raises(InvalidRequestError, match=rf"{size} answers.*holds {most}"):
                reserved(limits, size)
        else:
            refused += 1
            with pytest.raises(QueueFullError, match=full):
                reserved(limits, size)
        if held and turn < len(ends):
            request, _ = held.pop(ends[turn] % len(held))
            limits.release(request)
            limits.release(request)  # nothing is freed twice
        assert limits.num_reserved == sum(size for _, size in held) <= most
    assert limits.rejected["queue_full"] == refused


def test_the_wait_follows_the_rate_of_ends() -> None:
    clock = Clock()
    limits = limiter(rows=2, queue=0, clock=clock)
    requests = [reserved(limits, 1) for _ in range(2)]

    def wait() -> int | None:
        with pytest.raises(QueueFullError) as caught:
            limits.check_admission(scope())
        return caught.value.retry_after

    def replace(times: int, seconds: float) -> None:
        for _ in range(times):
            limits.release(requests.pop(0))
            requests.append(reserved(limits, 1))
            clock.now += seconds

    assert wait() == UNKNOWN_RETRY_SECONDS
    replace(5, seconds=7.0)
    assert wait() in (8, 9)
    clock.now += 10_000.0
    assert wait() == MAX_RETRY_SECONDS
    replace(100, seconds=0.01)
    assert wait() == MIN_RETRY_SECONDS


GENERATING = [("POST", path) for path in ("/v1/messages", "/v1/messages/", "/responses/")]
MONITORING = [
    *(("GET", "/health"), ("HEAD", "/health/"), ("GET", "/metrics"), ("HEAD", "/")),
    *(("GET", "/live"), ("DELETE", "/live/x"), ("GET", "/page/app.js")),
]
OTHERS = [
    *(("GET", "/v1/messages"), ("HEAD", "/v1/responses"), ("POST", "/tokenize")),
    *(("POST", "/v1/messages/x"), ("POST", "/v1/messages/count_tokens"), ("POST", "/v1")),
]


def test_what_is_open_while_it_drains_or_hangs() -> None:
    clock = Clock()
    limits = limiter(clock=clock)
    engine = limits._engine

    def check(kind: type[MlxMtpError], word: str, retry_after: int | None) -> None:
        passing = MONITORING if kind is DrainingError else MONITORING + OTHERS
        for method, path in GENERATING + MONITORING + OTHERS:
            if (method, path) in passing:
                limits.check_admission(scope(path, method))
                continue
            with pytest.raises(kind, match=word) as refused:
                limits.check_admission(scope(path, method))
            assert refused.value.retry_after == retry_after

    engine.hang_reason = "the engine hangs"
    check(EngineHungError, "the engine hangs", UNKNOWN_RETRY_SECONDS)
    engine.unhealthy_reason = "it died"
    check(EngineStoppedError, "it died", None)
    limits.drain(20.0)
    clock.now = 7.7
    check(DrainingError, "shutting down", 13)
    assert limits.rejected == {"engine": 6, "draining": 9}
