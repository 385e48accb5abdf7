"""What the server does when it gets too many requests, when it should end, and when it hangs."""

import json
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mlx_mtp.engine.request import Request
from mlx_mtp.server.grammar.grammars import Grammars
from tests.server.conftest import Serve, Served
from tests.server.test_metrics import samples
from tests.support.fake_engine import FakeEngine, FakeInfo, Output, Script, answer, endless, out
from tests.support.in_process import (
    CHAT,
    GENERATING,
    GOOD,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_TEXT,
    RESPONSES,
    TEXT,
    TOKENIZE,
    in_process,
)
from tests.support.raw_http import error_of, request_bytes
from tests.support.waiting import wait_until

HELD = "mlx_mtp:num_requests_held"
REJECTED = "mlx_mtp:requests_rejected_total"


class Valve:
    """A script that yields nothing until it is opened."""

    def __init__(self, *then: Output) -> None:
        self.is_open = False
        self._then = then or (out(40), out(40, finish="length"))

    def __call__(self, _: Request) -> Iterator[Output]:
        while not self.is_open:
            yield None
        yield from self._then


def small(script: Script) -> FakeEngine:
    return FakeEngine(script, FakeInfo(max_num_seqs=1))


def post(client: httpx.Client, path: str = CHAT, **fields: object) -> httpx.Response:
    return client.post(path, json=GOOD[path] | fields)


def test_the_time_before_the_engine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit includes the waits for grammars, templates and slow bodies."""
    went_on = threading.Event()
    compile_one = Grammars._compile

    def slow(*args: Any) -> Any:
        went_on.wait(30)
        return compile_one(*args)

    monkeypatch.setattr(Grammars, "_compile", slow)
    engine = FakeEngine(answer([300]))
    with in_process(engine, request_timeout=0.3) as client:
        for path in (CHAT, TEXT):
            late = post(client, path, guided_regex="a")
            assert "--request-timeout" in error_of(late, path, 504)
        went_on.set()
        assert not engine.submitted
        assert 'request_timeouts_total{model_name="test/model"} 2.0' in client.get("/metrics").text


@pytest.mark.parametrize("path", GENERATING)
def test_a_full_queue_is_a_429_with_the_time_to_wait(path: str) -> None:
    valve = Valve()
    engine = small(valve)
    with in_process(engine, max_queue=2) as client, ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(post, client, path) for _ in range(3)]
        assert engine.wait_for(lambda: len(engine.submitted) == 3)
        refused = post(client, path, stream=True)
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert "--max-queue" in error_of(refused, path, 429)
        if path not in (OLLAMA_CHAT, OLLAMA_TEXT):
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert '"code":"rate_limit_exceeded"' in refused.text or path == MESSAGES
        assert len(engine.submitted) == 3
        assert client.get("/v1/models").status_code == 200
        assert samples(client)[f"{REJECTED}{{reason=queue_full}}"] == 1
        assert samples(client)[HELD] == 3
        valve.is_open = True
        assert [job.result().status_code for job in jobs] == [200] * 3
        assert post(client, path).status_code == 200
        assert samples(client)[HELD] == 0


def test_a_full_queue_is_told_before_the_body_is_read(serve: Serve) -> None:
    valve = Valve()
    engine = small(valve)
    with serve(engine, max_queue=0) as client, ThreadPoolExecutor(1) as pool:
        job = pool.submit(post, client)
        assert engine.wait_for(lambda: len(engine.submitted) == 1)
        with socket.create_connection(client.address, timeout=30) as raw:
            raw.sendall(request_bytes("POST", CHAT, {"Content-Length": "1000000"}))
            assert raw.recv(12) == b"HTTP/1.1 429"
        valve.is_open = True
        assert job.result().status_code == 200


def test_several_answers_are_taken_whole_or_not_at_all() -> None:
    valve = Valve()
    engine = small(valve)
    with in_process(engine, max_queue=4) as client, ThreadPoolExecutor(1) as pool:
        job = pool.submit(post, client, n=3)
        assert engine.wait_for(lambda: len(engine.submitted) == 3)
        prompts = ["a", "b", "c"]
        assert post(client, n=3).status_code == 429
        assert post(client, TEXT, prompt=prompts).status_code == 429
        assert len(engine.submitted) == 3
        never = post(client, TEXT, prompt=prompts, n=2)
        assert "6 answers" in error_of(never, TEXT, 400)
        valve.is_open = True
        assert len(job.result().json()["choices"]) == 3
        assert post(client, n=5).status_code == 200


def test_places_come_back_from_requests_that_fail_or_leave(serve: Serve) -> None:
    valve = Valve()
    engine = small(valve)
    with serve(engine, max_queue=1) as client:
        for turn in range(1, 4):
            assert post(client, n=2, min_tokens=5000).status_code == 400
            assert post(client, n=2, stop=["x"] * 999).status_code == 400
            leaving = json.dumps(GOOD[CHAT] | {"n": 2}).encode()
            with socket.create_connection(client.address, timeout=30) as raw:
                raw.sendall(request_bytes("POST", CHAT, body=leaving))
                assert engine.wait_for(lambda turn=turn: len(engine.submitted) == 2 * turn)
                assert samples(client)[HELD] == 2
            wait_until(lambda: samples(client)[HELD] == 0)
        valve.is_open = True
        assert post(client, n=2).status_code == 200


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# The server's keys, the headers of requests, and the number of clients that they count as. Values
# that a client can invent don't make it another client.
IDENTITIES: list[tuple[tuple[str, ...], list[dict[str, str]], int]] = [
    ((), [{}, bearer("a"), bearer("b"), {"x-api-key": "a"}, {"x-api-key": "b"}], 1),
    ((), [{}, {"X-Forwarded-For": "10.0.0.1"}], 1),
    (("k1", "k2"), [bearer("k1"), {"x-api-key": "k1"}], 1),
    (("k1", "k2"), [bearer("k1") | {"x-api-key": f"invented {n}"} for n in range(3)], 1),
    (("k1", "k2"), [{"x-api-key": "k1", "Authorization": f"Bearer {n}"} for n in range(3)], 1),
    (("k1", "k2"), [bearer("k1"), {"x-api-key": "k2"}], 2),
]


@pytest.mark.parametrize(("keys", "requests", "count"), IDENTITIES)
def test_a_client_is_the_key_that_let_it_in_and_its_address(
    keys: tuple[str, ...], requests: list[dict[str, str]], count: int
) -> None:
    engine = FakeEngine(answer([300]))
    with in_process(engine, api_keys=keys) as client:
        body = GOOD[CHAT] | {"store": True}
        made = [client.post(CHAT, json=body, headers=headers).json() for headers in requests]
        stored = [client.get(CHAT, headers=headers).json()["data"] for headers in requests]
    assert len({each.options.client for each in engine.submitted}) == count
    assert len({json.dumps(chats) for chats in stored}) == count
    assert sum(len(chats) for chats in stored) == len(made) * (len(requests) if count == 1 else 1)
    for each in engine.submitted:
        assert each.options.client[0].endswith("@127.0.0.1")
        assert not any(key in str(each.options.client) for key in keys)


def test_within_a_client_users_and_agents_are_told_apart() -> None:
    engine = FakeEngine(answer([300]))
    with in_process(engine) as client:
        post(client, user="anna")
        post(client, safety_identifier="anna")
        post(client, MESSAGES, metadata={"user_id": "anna"})
        post(client, RESPONSES, user="ben")
        post(client)
        client.post(CHAT, json=GOOD[CHAT], headers={"User-Agent": "other" * 100})
    *annas, ben, first, agent = (each.options.client for each in engine.submitted)
    assert {client[0] for client in (*annas, ben, first, agent)} == {"@127.0.0.1"}
    assert (len(annas), len(set(annas))) == (3, 1)
    assert len({annas[0], ben, first, agent}) == 4
    assert len(agent[1]) < 40


def test_a_request_that_takes_too_long_is_a_504_and_its_rows_are_freed() -> None:
    engine = FakeEngine(Valve())
    with in_process(engine, request_timeout=0.2) as client:
        for path in GENERATING:
            for streaming in (False, True):
                late = post(client, path, stream=streaming)
                # Otherwise the clients' libraries would retry.
                assert late.headers["x-should-retry"] == "false"
                assert "0.2 seconds" in error_of(late, path, 504)
                assert "timeout_error" in late.text or path in (OLLAMA_CHAT, OLLAMA_TEXT)
                assert engine.wait_for(lambda: not engine.running)
        assert samples(client)["mlx_mtp:request_timeouts_total"] == 2 * len(GENERATING)
        # Tokens that keep coming do not extend the time limit.
        engine.script = endless(40)
        assert post(client).status_code == 504
        assert engine.wait_for(lambda: not engine.running)
    assert len(engine.cancelled) == 2 * len(GENERATING) + 1


def test_a_stream_that_takes_too_long_ends_with_an_event() -> None:
    def slow(_: Request) -> Iterator[Output]:
        yield out(40)
        while True:
            yield None

    # On a busy machine the first token can take longer than the shorter limits.
    for seconds in (0.1, 1.0, 10.0):
        with in_process(FakeEngine(slow), request_timeout=seconds) as client:
            response = post(client, stream=True)
        if response.status_code == 200:
            break
    *_, error, done = [line for line in response.text.split("\n\n") if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert "1 tokens had been generated" in error
    assert done == "data: [DONE]"


def test_a_drain_finishes_what_runs_and_refuses_what_is_new(serve: Serve) -> None:
    valve = Valve()
    engine = small(valve)
    with serve(engine, drain_timeout=60.0) as client, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(post, client) for _ in range(2)]
        assert engine.wait_for(lambda: len(engine.submitted) == 2)
        client.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: client.get("/health").status_code == 503)
        for path in (*GENERATING, TOKENIZE):
            refused = post(client, path)
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["connection"] == "close"
            assert "shutting down" in error_of(refused, path, 503)
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "draining"
        assert "2 answers" in health.json()["reason"]
        assert samples(client)[f"{REJECTED}{{reason=draining}}"] == len(GENERATING) + 1
        valve.is_open = True
        assert all(job.result().json()["choices"] for job in running)
        wait_until(lambda: is_closed(client))
        # The server ended by itself, long before the limit.
        assert not client.server.should_exit


@pytest.mark.parametrize(("drain_timeout", "signals"), [(0.1, 1), (1000.0, 2)])
def test_at_the_limit_and_at_a_second_signal_streams_end_with_an_error(
    serve: Serve, drain_timeout: float, signals: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlx_mtp")
    with (
        serve(FakeEngine(endless(40)), drain_timeout=drain_timeout) as client,
        client.stream("POST", CHAT, json=GOOD[CHAT] | {"stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        for _ in range(signals):
            client.server.handle_exit(signal.SIGINT, None)
        *_, error, done = [line for line in lines if line]
        assert "shutting down" in error
        assert done == "data: [DONE]"
        assert not client.server.force_exit
    assert signals > 1 or "Stopping: up to 0.1 s for 1 unfinished" in caplog.text


def is_closed(client: Served) -> bool:
    try:
        socket.create_connection(client.address, timeout=30).close()
    except OSError:
        return True
    return False


def test_idle_connections_do_not_hold_a_drain_up(serve: Serve) -> None:
    with serve(FakeEngine(answer([300])), drain_timeout=1000.0) as client:
        post(client)  # leaves a kept-alive connection
        with (
            socket.create_connection(client.address),
            socket.create_connection(client.address) as half,
        ):
            half.sendall(b"POST /v1/chat/comp")
            client.server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: is_closed(client))


def test_a_hang_is_told_and_new_requests_are_refused_until_it_is_over() -> None:
    valve = Valve()
    engine = FakeEngine(valve)
    with in_process(engine, keep_alive_seconds=0.02) as client, ThreadPoolExecutor(1) as pool:
        job = pool.submit(post, client, stream=True)
        assert engine.wait_for(lambda: len(engine.submitted) == 1)
        engine.hang_reason = "the engine hangs: it has been in a step for 6.0 s"
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "unhealthy", "reason": engine.hang_reason}
        refused = post(client)
        assert "it has been in a step for 6.0 s" in error_of(refused, CHAT, 503)
        assert refused.json()["error"]["code"] == "engine_hung"
        assert int(refused.headers["retry-after"]) >= 1
        assert len(engine.submitted) == 1
        engine.hang_reason = None
        assert client.get("/health").status_code == 200
        valve.is_open = True
        text = job.result().text
        assert text.endswith("data: [DONE]\n\n")
        assert '"error"' not in text
        assert post(client).status_code == 200
        # The engine is dead for good: requests are refused before the body is read.
        engine.unhealthy_reason = "the engine died: RuntimeError: a bug"
        refused = client.post(CHAT, content=b"{")
        assert "a bug" in error_of(refused, CHAT, 503)
        assert samples(client)[f"{REJECTED}{{reason=engine}}"] == 2
        assert client.get("/health").json()["reason"] == engine.unhealthy_reason
