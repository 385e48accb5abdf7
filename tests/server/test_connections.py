"""Clients that are slow, stalled, silent or too many; none of them may hold the others up."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_mtp.engine.request import Request
from tests.server.conftest import Serve, Served
from tests.server.fake_engine import FakeEngine, FakeInfo, Output, answer, out
from tests.server.test_metrics import samples
from tests.server.test_reliability import Valve, wait_until
from tests.server.test_stream import CHAT, chat_body, post, stream

POST = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def connect(client: Served, receive_buffer: int | None = None) -> socket.socket:
    raw = socket.socket()
    if receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(30)
    raw.connect(client.address)
    return raw


def ask(raw: socket.socket, **fields: object) -> None:
    payload = json.dumps(chat_body(**fields)).encode()
    head = f"{POST}Content-Length: {len(payload)}\r\n\r\n"
    raw.sendall(head.encode() + payload)


def rest_of(raw: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := raw.recv(1 << 16):
            got += piece
    return got


def drip(raw: socket.socket) -> None:
    """A byte now and then, until the server hangs up."""
    for _ in range(1500):
        try:
            raw.sendall(b"x")
        except OSError:
            return
        time.sleep(0.02)
    raise AssertionError("the server has not hung up")


def flood(_: Request) -> Iterator[Output]:
    """64 tokens a step, for ever."""
    while True:
        yield out(*[40] * 64)


def test_a_reader_that_stalls_is_ended_and_holds_nobody_up(serve: Serve) -> None:
    def script(request: Request) -> Iterator[Output]:
        return flood(request) if request.sampling.max_tokens > 10 else answer([300])(request)

    engine = FakeEngine(script)
    with serve(engine, stall_timeout=600.0) as client, connect(client, 4096) as raw:
        ask(raw, stream=True)
        connection = narrowed(client, raw)
        wait_until(lambda: connection.flow.write_paused)
        for _ in range(3):
            assert stream(client, max_tokens=5)
        assert connection.flow.write_paused
        assert engine.running == {engine.submitted[0].request_id}
    engine = FakeEngine(script)
    with serve(engine, stall_timeout=0.5) as client, connect(client, 4096) as raw:
        ask(raw, stream=True)
        narrowed(client, raw)
        wait_until(lambda: bool(engine.cancelled))
        assert engine.cancelled == {engine.submitted[0].request_id}
        wait_until(lambda: samples(client)["mlx_mtp:num_requests_held"] == 0)
        wait_until(lambda: len(client.server.server_state.connections) == 1)


def test_a_stalled_readers_answer_waits_in_a_bounded_buffer(serve: Serve) -> None:
    steps = 0

    def counted(request: Request) -> Iterator[Output]:
        nonlocal steps
        for output in flood(request):
            steps += 1
            yield output

    with serve(FakeEngine(counted), stall_timeout=60.0) as client, connect(client, 4096) as raw:
        ask(raw, stream=True)
        connection = narrowed(client, raw)
        wait_until(lambda: connection.flow.write_paused)
        held = []
        for _ in range(20):
            until = steps + 20
            wait_until(lambda until=until: steps >= until)
            held.append(connection.transport.get_write_buffer_size())
        # One write past the mark at which uvicorn waits, and not one more.
        assert max(held) < (64 << 10) + (32 << 10)
        assert held == sorted(held, reverse=True)  # The system may take some late.


def connection_of(client: Served, raw: socket.socket) -> Any:
    def found() -> list[Any]:
        known = list(client.server.server_state.connections)
        return [each for each in known if each.client == raw.getsockname()]

    wait_until(lambda: bool(found()))
    return found()[0]


def narrowed(client: Served, raw: socket.socket) -> Any:
    """The same, for which the system keeps little: by itself it takes megabytes, which a busy
    machine needs half a minute to write."""
    connection = connection_of(client, raw)
    own_end = connection.transport.get_extra_info("socket")
    own_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return connection


def test_a_reader_that_is_slow_but_reads_gets_all(serve: Serve) -> None:
    with serve(FakeEngine(answer([40] * 1000, sizes=[1])), stall_timeout=30.0) as client:
        with connect(client, 4096) as raw:
            ask(raw, stream=True, logprobs=True, top_logprobs=20)
            got = b""
            while b"[DONE]" not in got[-64:]:
                got += raw.recv(8192)
                time.sleep(0.001)
        assert len(got) > 1 << 20


def test_a_body_that_comes_too_slowly_is_a_408(serve: Serve) -> None:
    engine = FakeEngine(answer([300]))
    with serve(engine, body_timeout=0.5) as client, connect(client) as raw:
        raw.sendall(f"{POST}Content-Length: 1000\r\n\r\n".encode())
        with contextlib.suppress(OSError):
            for _ in range(20):
                raw.sendall(b" ")
                time.sleep(0.05)
        got = rest_of(raw)
        assert got.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in got.lower()
        assert b'"code":"body_timeout"' in got
        assert b"0.5 seconds" in got
        post(client)
    assert len(engine.submitted) == 1


@pytest.mark.parametrize(
    "sent", [b"", b"GET /heal", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: b"]
)
def test_a_head_that_does_not_come_ends_the_connection(serve: Serve, sent: bytes) -> None:
    # All but nothing must have come by then.
    seconds = 1.0 if sent else 0.3
    with serve(FakeEngine(answer([300])), head_timeout=seconds) as client, connect(client) as raw:
        for byte in sent:
            raw.sendall(bytes([byte]))
        got = rest_of(raw)
        assert got.startswith(b"HTTP/1.1 408") if sent else got == b""
        wait_until(lambda: not client.server.server_state.connections)


def test_dripping_heads_are_not_given_more_time(serve: Serve) -> None:
    with serve(FakeEngine(answer([300])), head_timeout=0.5) as client, connect(client) as raw:
        with contextlib.suppress(OSError):
            raw.sendall(b"GET /health HTTP/1.1\r\nX: ")
        drip(raw)


def test_a_body_that_nobody_wants_does_not_keep_the_connection(serve: Serve) -> None:
    engine = FakeEngine(answer([300]))
    with serve(engine, api_keys=("k",), head_timeout=1.0) as client, connect(client) as raw:
        raw.sendall(f"{POST}Content-Length: 9999\r\n\r\n".encode())
        assert raw.recv(12) == b"HTTP/1.1 401"
        drip(raw)


def test_a_kept_connection_serves_request_after_request(serve: Serve) -> None:
    with serve(FakeEngine(answer([300])), head_timeout=2.0) as client:
        while not is_kept(client, seconds=3.0, head_timeout=2.0):
            pass


def test_an_idle_connection_outlasts_the_clients_patience(serve: Serve) -> None:
    """httpx and the SDKs keep one for 5 s; uvicorn by itself would end it in the same moment."""
    with serve(FakeEngine(answer([300]))) as client:
        assert client.server.config.timeout_keep_alive > 5 + 10


def is_kept(client: Served, seconds: float, head_timeout: float) -> bool:
    """Whether a connection serves for so long; False if it was left idle, by a machine that paused,
    for as long as the server allows."""
    began = sent = time.monotonic()
    with connect(client) as raw:
        while sent - began < seconds:
            before, sent = sent, time.monotonic()
            try:
                raw.sendall((GET + b"\r\n") * 3)
                got = b""
                while got.count(b'{"status":"ok"}') < 3:
                    piece = raw.recv(1 << 16)
                    if not piece:
                        raise ConnectionResetError
                    got += piece
            except ConnectionError:
                # The server counts from its answer, which came after that was sent.
                assert time.monotonic() - before >= head_timeout
                return False
            time.sleep(0.1)
    return True


def test_long_answers_outlast_the_time_for_a_head(serve: Serve) -> None:
    valve = Valve()
    with (
        serve(FakeEngine(valve), head_timeout=1.0, keep_alive_seconds=0.1) as client,
        client.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        lines = response.iter_lines()
        for _ in range(20):
            assert next(lines) == ": keep-alive"
            assert next(lines) == ""
        valve.is_open = True
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_idle_connections_make_room_for_new_ones(serve: Serve) -> None:
    engine = FakeEngine(answer([300]), FakeInfo(max_num_seqs=1))
    with (
        serve(engine, max_queue=0, max_connections=1, head_timeout=60.0) as client,
        contextlib.ExitStack() as stack,
    ):
        # As many as can be held and some who only look: 1 + 64.
        crowd = [stack.enter_context(connect(client)) for _ in range(100)]
        post(client)
        assert len(client.server.server_state.connections) <= 65
        # Those that have been idle for longest are the ones that go.
        assert rest_of(crowd[0]) == b""
        crowd[-1].sendall(GET + b"\r\n")
        assert crowd[-1].recv(12) == b"HTTP/1.1 200"


def test_when_all_are_busy_the_next_is_a_503(serve: Serve) -> None:
    engine = FakeEngine(Valve(), FakeInfo(max_num_seqs=1))
    with (
        serve(engine, max_queue=0, max_connections=1) as client,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(65):
            raw = stack.enter_context(connect(client))
            raw.sendall(f"{POST}Content-Length: 9\r\n\r\n".encode())

        def busy() -> int:
            # A copy: the server's thread may add to them just now.
            return sum(each._busy for each in list(client.server.server_state.connections))

        wait_until(lambda: busy() == len(client.server.server_state.connections) == 65)
        refused = httpx.get(f"{client.base_url}/health", timeout=30)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert refused.headers["connection"] == "close"
