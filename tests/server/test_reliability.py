"""What the server does when too much is asked of it, when it is to end, and when it is stuck."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from mlx_mtp.engine.request import Request
from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import FakeEngine, FakeInfo, Output, Script, answer, out
from tests.server.raw_http import request_bytes
from tests.server.test_metrics import samples
from tests.server.test_stream import CHAT, TEXT, chat_body, post

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


class Valve:
    """A script that is silent until it is opened."""

    def __init__(self) -> None:
        self.is_open = False

    def __call__(self, _: Request) -> Iterator[Output]:
        while not self.is_open:
            yield None
        yield out(40)
        yield out(40, finish="length")


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    if path == TEXT:
        return {"model": MODEL, "prompt": "hi", **fields}
    if path == RESPONSES:
        return {"model": MODEL, "input": "hi", **fields}
    return chat_body(**({"max_tokens": 5} if path == MESSAGES else {}), **fields)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def small(script: Script) -> FakeEngine:
    return FakeEngine(script, FakeInfo(max_num_seqs=1))


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_a_full_queue_is_a_429_with_the_time_to_wait(serve: Serve, path: str) -> None:
    valve = Valve()
    engine = small(valve)
    with serve(engine, max_queue=2) as client, ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(client.post, path, json=body_for(path)) for _ in range(3)]
        assert engine.wait_for(lambda: len(engine.submitted) == 3)
        refused = client.post(path, json=body_for(path, stream=True))
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        error = refused.json()["error"]
        assert "--max-queue" in error["message"]
        assert error["type"] == "rate_limit_error"
        if path == MESSAGES:
            assert refused.json()["type"] == "error"
        else:
            assert error["code"] == "rate_limit_exceeded"
        assert len(engine.submitted) == 3
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 200
        assert samples(client)["mlx_mtp:requests_rejected_total{reason=queue_full}"] == 1
        assert samples(client)["mlx_mtp:num_requests_held"] == 3
        valve.is_open = True
        assert [job.result().status_code for job in jobs] == [200] * 3
        assert client.post(path, json=body_for(path)).status_code == 200
        wait_until(lambda: samples(client)["mlx_mtp:num_requests_held"] == 0)


def test_a_full_queue_is_told_before_the_body_is_read(serve: Serve) -> None:
    valve = Valve()
    engine = small(valve)
    with serve(engine, max_queue=0) as client, ThreadPoolExecutor(1) as pool:
        job = pool.submit(client.post, CHAT, json=chat_body())
        assert engine.wait_for(lambda: len(engine.submitted) == 1)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        with socket.create_connection(client.address) as raw:
            raw.settimeout(30)
            raw.sendall(head.encode())
            assert raw.recv(12) == b"HTTP/1.1 429"
        valve.is_open = True
        assert job.result().status_code == 200


def test_several_answers_are_taken_whole_or_not_at_all(serve: Serve) -> None:
    valve = Valve()
    engine = small(valve)
    with serve(engine, max_queue=4) as client, ThreadPoolExecutor(1) as pool:
        job = pool.submit(client.post, CHAT, json=chat_body(n=3))
        assert engine.wait_for(lambda: len(engine.submitted) == 3)
        assert client.post(CHAT, json=chat_body(n=3)).status_code == 429
        prompts = {"model": MODEL, "prompt": ["a", "b", "c"]}
        assert client.post(TEXT, json=prompts).status_code == 429
        assert len(engine.submitted) == 3
        never = client.post(TEXT, json={**prompts, "n": 2})
        assert never.status_code == 400
        assert "6 answers" in never.json()["error"]["message"]
        valve.is_open = True
        assert len(job.result().json()["choices"]) == 3
        assert client.post(CHAT, json=chat_body(n=5)).status_code == 200


def test_places_come_back_from_requests_that_fail_or_leave(serve: Serve) -> None:
    valve = Valve()
    engine = small(valve)
    with serve(engine, max_queue=1) as client:
        for turn in range(1, 6):
            assert client.post(CHAT, json=chat_body(n=2, max_tokens=5000)).status_code == 400
            assert client.post(CHAT, json=chat_body(n=2, stop=["x"] * 999)).status_code == 400
            leaving = json.dumps(chat_body(n=2)).encode()
            with socket.create_connection(client.address, timeout=30) as raw:
                raw.sendall(request_bytes("POST", CHAT, body=leaving))
                assert engine.wait_for(lambda turn=turn: len(engine.submitted) == 2 * turn)
                assert samples(client)["mlx_mtp:num_requests_held"] == 2
            wait_until(lambda: samples(client)["mlx_mtp:num_requests_held"] == 0)
        valve.is_open = True
        post(client, n=2)


def test_openais_library_waits_and_tries_again(serve: Serve) -> None:
    valve = Valve()
    engine = small(valve)
    rejected = "mlx_mtp:requests_rejected_total{reason=queue_full}"
    with (
        serve(engine, max_queue=0) as client,
        openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=5) as told,
        ThreadPoolExecutor(2) as pool,
    ):
        job = pool.submit(client.post, CHAT, json=chat_body())
        assert engine.wait_for(lambda: len(engine.submitted) == 1)
        with pytest.raises(openai.RateLimitError, match="--max-queue"):
            told.with_options(max_retries=0).chat.completions.create(**chat_body())
        waiting = pool.submit(told.chat.completions.create, **chat_body())
        wait_until(lambda: samples(client)[rejected] == 2)
        valve.is_open = True
        assert waiting.result().choices[0].message.content
        assert job.result().status_code == 200


def test_the_engine_is_told_whose_a_request_is(serve: Serve) -> None:
    engine = FakeEngine(answer([300]))
    with serve(engine) as client:
        # Whom a request was forwarded for is what its sender says.
        client.post(CHAT, json=chat_body(), headers={"X-Forwarded-For": "10.0.0.1"})
        post(client, user="anna")
        post(client, safety_identifier="anna")
        named = body_for(MESSAGES, metadata={"user_id": "anna"})
        assert client.post(MESSAGES, json=named).status_code == 200
        assert client.post(RESPONSES, json=body_for(RESPONSES, user="ben")).status_code == 200
        headers = {"Authorization": "Bearer k", "User-Agent": "other"}
        client.post(CHAT, json=chat_body(), headers=headers)
    first, *annas, ben, other = (request.client for request in engine.submitted)
    assert {client[0] for client in (first, *annas, ben)} == {"@127.0.0.1"}
    assert len(set(annas)) == 1
    assert len({first, annas[0], ben, other}) == 4
    assert other[0].endswith("@127.0.0.1")
    assert other[0] != "@127.0.0.1"


def test_a_request_that_takes_too_long_is_a_504_and_its_rows_are_freed(serve: Serve) -> None:
    engine = FakeEngine(Valve())
    with serve(engine, request_timeout=0.2) as client:
        for path in (CHAT, TEXT, RESPONSES, MESSAGES):
            for streaming in (False, True):
                late = client.post(path, json=body_for(path, stream=streaming))
                assert late.status_code == 504
                # The libraries would send it again.
                assert late.headers["x-should-retry"] == "false"
                error = late.json()["error"]
                assert error["type"] == "timeout_error"
                assert "0.2 seconds" in error["message"]
                assert engine.wait_for(lambda: not engine.running)
        assert samples(client)["mlx_mtp:request_timeouts_total"] == 8
    assert len(engine.cancelled) == 8


def test_a_stream_that_takes_too_long_ends_with_an_event(serve: Serve) -> None:
    def slow(_: Request) -> Iterator[Output]:
        yield out(40)
        while True:
            yield None

    engine = FakeEngine(slow)
    with serve(engine, request_timeout=2.0) as client:
        response = client.post(CHAT, json=chat_body(stream=True))
        *_, error, done = [line for line in response.text.split("\n\n") if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert "1 tokens had been generated" in error
        assert done == "data: [DONE]"
        assert engine.wait_for(lambda: not engine.running)


def test_tokens_that_keep_coming_do_not_put_off_the_end(serve: Serve) -> None:
    def busy(_: Request) -> Iterator[Output]:
        while True:
            yield out(40)

    with serve(FakeEngine(busy), request_timeout=0.3) as client:
        assert client.post(CHAT, json=chat_body()).status_code == 504


def test_a_drain_finishes_what_runs_and_refuses_what_is_new(serve: Serve) -> None:
    valve = Valve()
    engine = small(valve)
    with serve(engine, drain_timeout=60.0) as client, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(post, client) for _ in range(2)]
        assert engine.wait_for(lambda: len(engine.submitted) == 2)
        client.server.handle_exit(signal.SIGTERM, None)
        for path in (CHAT, TEXT, RESPONSES, MESSAGES, "/tokenize"):
            refused = client.post(path, json=body_for(path))
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["connection"] == "close"
            assert "shutting down" in refused.json()["error"]["message"]
        assert client.post(MESSAGES, json={}).json()["error"]["type"] == "overloaded_error"
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "draining"
        assert "2 answers" in health.json()["reason"]
        assert samples(client)["mlx_mtp:requests_rejected_total{reason=draining}"] == 6
        valve.is_open = True
        assert all(job.result()["choices"] for job in running)
        wait_until(lambda: client.server.should_exit or is_closed(client))
        # Ended by itself, long before the limit.
        assert not client.server.force_exit


def is_closed(client: Served) -> bool:
    try:
        socket.create_connection(client.address, timeout=30).close()
    except OSError:
        return True
    return False


def test_idle_connections_do_not_hold_a_drain_up(serve: Serve) -> None:
    with serve(FakeEngine(answer([300])), drain_timeout=1000.0) as client:
        post(client)  # Leaves a connection that is kept alive.
        silent = socket.create_connection(client.address)
        half = socket.create_connection(client.address)
        half.sendall(b"POST /v1/chat/comp")
        client.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: is_closed(client))
        silent.close()
        half.close()


def test_a_hang_is_told_and_new_requests_are_refused_until_it_is_over(serve: Serve) -> None:
    valve = Valve()
    engine = FakeEngine(valve)
    with (
        serve(engine, keep_alive_seconds=0.02) as client,
        client.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        engine.hang_reason = "the engine hangs: it has been in a step for 6.0 s"
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "unhealthy", "reason": engine.hang_reason}
        refused = client.post(CHAT, json=chat_body())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_hung"
        assert "it has been in a step for 6.0 s" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert len(engine.submitted) == 1
        engine.hang_reason = None
        assert client.get("/health").status_code == 200
        valve.is_open = True
        rest = [line for line in lines if line.startswith("data")]
        assert rest[-1] == "data: [DONE]"
        assert not any('"error"' in line for line in rest)
        assert client.post(CHAT, json=chat_body()).status_code == 200


def test_an_engine_that_is_dead_for_good_refuses_before_the_body(serve: Serve) -> None:
    engine = FakeEngine(answer([300]))
    with serve(engine) as client:
        engine.unhealthy_reason = "the engine's thread died: RuntimeError: a bug"
        refused = client.post(CHAT, content=b"{")
        assert refused.status_code == 503
        assert "a bug" in refused.json()["error"]["message"]
        assert samples(client)["mlx_mtp:requests_rejected_total{reason=engine}"] == 1
