"""Clients that are slow, stalled, silent or too many; none of them delays the others."""

import asyncio
import contextlib
import errno
import gc
import itertools
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from mlx_mtp.engine.request import Request
from mlx_mtp.server import serving
from mlx_mtp.server.context import Context
from mlx_mtp.server.http import protocol
from tests.server.conftest import Serve, Served
from tests.server.test_metrics import samples
from tests.server.test_reliability import HELD, Valve, post, small
from tests.support.fake_engine import FakeEngine, Output, answer, out
from tests.support.in_process import CHAT, GOOD
from tests.support.raw_http import Answer, incoming, request_bytes
from tests.support.waiting import wait_until

GET = request_bytes("GET", "/health")
POST = request_bytes("POST", CHAT, {"Content-Length": "1000"})


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.05)


def patiently(attempt: Callable[[float], bool]) -> None:
    """Try with longer and longer limits: on a busy machine data can arrive late."""
    assert any(attempt(seconds) for seconds in (0.25, 2.0, 10.0))


def connect(client: Served, receive_buffer: int | None = None) -> socket.socket:
    raw = socket.socket()
    if receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(30)
    raw.connect(client.address)
    return raw


def rest_of(raw: socket.socket) -> bytes:
    """Returns all data until the server hangs up."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := raw.recv(1 << 16):
            got += piece
    return got


def drip(raw: socket.socket) -> bytes:
    """Send a byte now and then until the server answers or hangs up; returns its answer."""
    for _ in range(1500):
        if select.select([raw], [], [], 0.02)[0]:
            return rest_of(raw)
        with contextlib.suppress(OSError):
            raw.sendall(b"x")
    raise AssertionError("the server has not hung up")


def flood(_: Request) -> Iterator[Output]:
    """Yields 64 tokens per step without end."""
    while True:
        yield out(*[40] * 64)


@contextlib.contextmanager
def narrow(client: Served) -> Iterator[Any]:
    """Yields a socket, and the server's side of its connection.

    The send buffer is small: by default it holds megabytes, which a busy machine needs half a
    minute to fill.
    """
    with connect(client, 4096) as raw:

        def found() -> list[Any]:
            known = list(client.server.server_state.connections)
            return [each for each in known if each.client == raw.getsockname()]

        wait_until(lambda: bool(found()))
        (connection,) = found()
        own_end = connection.transport.get_extra_info("socket")
        own_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield raw, connection


@contextlib.contextmanager
def stream_to(client: Served) -> Iterator[Any]:
    """Yields a stream's socket, and the server's side of its connection."""
    with narrow(client) as (raw, connection):
        body = json.dumps(GOOD[CHAT] | {"stream": True}).encode()
        raw.sendall(request_bytes("POST", CHAT, body=body))
        yield raw, connection


def test_a_reader_that_stalls_is_ended_and_holds_nobody_up(serve: Serve) -> None:
    def script(request: Request) -> Iterator[Output]:
        return flood(request) if request.sampling.max_tokens > 10 else answer([300])(request)

    engine = FakeEngine(script)
    with serve(engine, stall_timeout=600.0) as client, stream_to(client) as (_, connection):
        wait_until(lambda: connection.flow.write_paused)
        for _ in range(3):
            assert "[DONE]" in post(client, max_tokens=5, stream=True).text
        assert connection.flow.write_paused
        assert engine.running == {engine.submitted[0].request_id}
    engine = FakeEngine(script)
    with serve(engine, stall_timeout=0.2) as client, stream_to(client):
        wait_until(lambda: bool(engine.cancelled))
        assert engine.cancelled == {engine.submitted[0].request_id}
        wait_until(lambda: samples(client)[HELD] == 0)
        wait_until(lambda: len(client.server.server_state.connections) == 1)


def test_a_stalled_readers_answer_waits_in_a_bounded_buffer(serve: Serve) -> None:
    steps = 0

    def counted(request: Request) -> Iterator[Output]:
        nonlocal steps
        for output in flood(request):
            steps += 1
            yield output

    with (
        serve(FakeEngine(counted), stall_timeout=60.0) as client,
        stream_to(client) as (_, connection),
    ):
        wait_until(lambda: connection.flow.write_paused)
        held = []
        for _ in range(10):
            until = steps + 20
            wait_until(lambda until=until: steps >= until)
            held.append(connection.transport.get_write_buffer_size())
        # At most one write is held beyond the mark at which uvicorn waits.
        assert max(held) < (64 << 10) + (32 << 10)
        assert held == sorted(held, reverse=True)  # the system can take some data late


def test_a_reader_that_stalls_for_a_while_gets_all(serve: Serve) -> None:
    def attempt(seconds: float) -> bool:
        valve = Valve()

        def script(request: Request) -> Iterator[Output]:
            yield from itertools.islice(flood(request), 600)
            yield from valve(request)

        with (
            serve(FakeEngine(script), stall_timeout=seconds) as client,
            stream_to(client) as (raw, connection),
        ):
            wait_until(lambda: connection.flow.write_paused)
            raw.settimeout(1.5 * seconds)
            got = b""
            with contextlib.suppress(ConnectionResetError):
                # Read what has arrived, until nothing has come for longer than a stall may last.
                with contextlib.suppress(TimeoutError):
                    while raw.recv(1 << 16):
                        pass
                valve.is_open = True
                raw.settimeout(30)
                while b"[DONE]" not in got and (piece := raw.recv(1 << 16)):
                    got += piece
            return b"[DONE]" in got

    patiently(attempt)


def test_a_body_that_comes_too_slowly_is_a_408(serve: Serve) -> None:
    engine = FakeEngine(answer([300]))
    with serve(engine, body_timeout=0.2) as client, connect(client) as raw:
        raw.sendall(POST)
        got = drip(raw)
        assert got.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in got.lower()
        assert b'"code":"body_timeout"' in got
        assert b"0.2 seconds" in got
        assert post(client).status_code == 200
    assert len(engine.submitted) == 1


@pytest.mark.parametrize("sent", [b"", b"GET /heal", GET[:-2]])
def test_a_head_that_does_not_come_ends_the_connection(serve: Serve, sent: bytes) -> None:
    def attempt(seconds: float) -> bool:
        with serve(FakeEngine(answer([])), head_timeout=seconds) as client, connect(client) as raw:
            raw.sendall(sent)
            got = rest_of(raw)
            wait_until(lambda: not client.server.server_state.connections)
        return got.startswith(b"HTTP/1.1 408") if sent else got == b""

    patiently(attempt)


def test_dripping_heads_are_not_given_more_time(serve: Serve) -> None:
    with serve(FakeEngine(answer([300])), head_timeout=0.25) as client, connect(client) as raw:
        raw.sendall(GET[:-2] + b"X: ")
        drip(raw)


def test_a_parents_connection_may_wait_longer_for_its_request(serve: Serve) -> None:
    settings = {"head_timeout": 0.1, "parent_keys": 0}
    with serve(FakeEngine(answer([])), **settings) as client, connect(client) as raw:
        time.sleep(0.5)
        raw.sendall(GET)
        assert raw.recv(100).startswith(b"HTTP/1.1 200")


def test_long_answers_outlast_the_time_for_a_head(serve: Serve) -> None:
    def attempt(seconds: float) -> bool:
        valve = Valve()
        settings = {"head_timeout": seconds, "keep_alive_seconds": seconds / 10}
        with serve(FakeEngine(valve), **settings) as client, contextlib.suppress(httpx.HTTPError):
            body = GOOD[CHAT] | {"stream": True}
            with client.stream("POST", CHAT, json=body) as response:
                lines = (line for line in response.iter_lines() if line)
                assert [next(lines) for _ in range(15)] == [": keep-alive"] * 15
                valve.is_open = True
                assert list(lines)[-1] == "data: [DONE]"
                return True
        return False

    patiently(attempt)


def test_who_only_sends_no_more_is_answered_and_who_left_is_not(serve: Serve) -> None:
    """Half-closed and closed connections look the same until something is written."""
    valve = Valve()
    engine = FakeEngine(valve)
    body = request_bytes("POST", CHAT, body=json.dumps(GOOD[CHAT]).encode())
    with serve(engine) as client, connect(client) as waiting, connect(client) as left:
        left.sendall(body)
        wait_until(lambda: len(engine.submitted) == 1)
        waiting.sendall(body + GET)
        wait_until(lambda: len(engine.submitted) == 2)
        waiting.shutdown(socket.SHUT_WR)
        left.close()
        wait_until(lambda: engine.cancelled == {engine.submitted[0].request_id})
        valve.is_open = True
        answers = incoming(waiting)
        assert [Answer(answers).status for _ in range(2)] == [200, 200]
        assert answers.read(1) == b""


def test_who_sends_no_more_after_half_a_request_is_told_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """The first answer and the refusal of the broken second request are each sent once."""
    valve = Valve()
    engine = FakeEngine(valve)
    body = request_bytes("POST", CHAT, body=json.dumps(GOOD[CHAT]).encode())
    with serve(engine) as client, connect(client) as raw:
        raw.sendall(body + request_bytes("POST", CHAT, {"Transfer-Encoding": "chunked"}, b"zz\r\n"))
        raw.shutdown(socket.SHUT_WR)
        wait_until(lambda: len(engine.submitted) == 1)
        valve.is_open = True
        answers = incoming(raw)
        assert [Answer(answers).status for _ in range(2)] == [200, 400]
        wait_until(lambda: not client.server.server_state.connections)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_who_sends_several_requests_and_then_no_more_gets_all_answers(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    """The event loops tell of the client's end at different moments."""
    monkeypatch.setattr(Context, "loop", loop)
    whole = request_bytes("POST", CHAT, body=json.dumps(GOOD[CHAT]).encode())
    with serve(FakeEngine(answer([300]))) as client:
        for last, status in (GET, 200), (GET[:-2], 400), (POST, 400):
            for first in (GET, whole):
                with connect(client) as raw:
                    raw.sendall(first + GET + last)
                    raw.shutdown(socket.SHUT_WR)
                    answers = incoming(raw)
                    assert [Answer(answers).status for _ in range(3)] == [200, 200, status]
                    assert answers.read(1) == b""


def test_an_answer_that_breaks_off_and_that_nobody_reads_is_dropped(serve: Serve) -> None:
    def some(_: Request) -> Iterator[Output]:
        yield from [out(*[40] * 64)] * 70
        yield from itertools.repeat(None)

    with (
        serve(FakeEngine(some), stall_timeout=0.2, head_timeout=600.0) as client,
        stream_to(client) as (_, connection),
    ):
        wait_until(lambda: connection.transport.get_write_buffer_size() > 0)
        assert not connection.flow.write_paused
        connection.loop.call_soon_threadsafe(connection.cycle.transport.close)
        wait_until(lambda: not client.server.server_state.connections)


def test_bodies_that_do_not_end_are_bounded_in_all(serve: Serve) -> None:
    begun = request_bytes("POST", CHAT, {"Content-Length": str(4 << 20)}) + b" " * (1 << 20)
    settings = {"max_held_bytes": 8 << 20, "max_connections": 100}
    with serve(FakeEngine(answer([300])), **settings) as client:
        held = client.server.context.held
        with contextlib.ExitStack() as stack:
            crowd = [stack.enter_context(connect(client)) for _ in range(5)]
            for raw in crowd:
                raw.sendall(begun)
            refused = select.select(crowd, [], [], 30)[0][0]
            assert b'"code":"too_many_bytes"' in rest_of(refused)
            # This is one client's share; others have the rest, and small requests need none.
            assert held.total <= held.limit * 3 // 4
            assert post(client).status_code == 200
        wait_until(lambda: held.total == 0)
        assert post(client, user="x" * (2 << 20)).status_code == 200  # alone any body fits
        assert "reason=bytes" in str(samples(client))


def test_answers_that_nobody_reads_are_bounded_in_all(serve: Serve) -> None:
    body = json.dumps({"tokens": [300] * (1 << 16)}).encode()
    with serve(FakeEngine(answer([300])), max_held_bytes=8 << 20) as client:
        held = client.server.context.held
        with contextlib.ExitStack() as stack:
            statuses = []
            for _ in range(12):
                raw, _ = stack.enter_context(narrow(client))
                raw.sendall(request_bytes("POST", "/detokenize", body=body))
                statuses.append(raw.recv(12, socket.MSG_PEEK)[-3:])
            assert statuses[0] == b"200"
            assert statuses[-1] == b"503"
            assert held.total <= held.limit * 3 // 4
            for each in list(client.server.server_state.connections):
                assert each.transport.get_write_buffer_size() < (64 << 10) + (96 << 10)
        wait_until(lambda: held.total == 0)
        assert client.post("/detokenize", content=body).status_code == 200


# The most connections: max_connections, and 64 for monitoring.
FEW = {"max_queue": 0, "max_connections": 1}


def test_idle_connections_make_room_for_new_ones(serve: Serve) -> None:
    with (
        serve(small(answer([300])), **FEW, head_timeout=60.0) as client,
        contextlib.ExitStack() as stack,
    ):
        crowd = [stack.enter_context(connect(client)) for _ in range(100)]
        assert post(client).status_code == 200
        assert len(client.server.server_state.connections) <= 65
        # The connections that have been idle for longest are closed.
        assert rest_of(crowd[0]) == b""
        crowd[-1].sendall(GET)
        assert crowd[-1].recv(12) == b"HTTP/1.1 200"


def test_when_all_are_busy_the_next_is_a_503(serve: Serve) -> None:
    with serve(small(Valve()), **FEW) as client, contextlib.ExitStack() as stack:
        for _ in range(65):
            stack.enter_context(connect(client)).sendall(POST)

        def busy() -> int:
            # Copied, as the server's thread can add to them at the same time.
            return sum(each._busy for each in list(client.server.server_state.connections))

        wait_until(lambda: busy() == len(client.server.server_state.connections) == 65)
        for path in ("/health", "/metrics"):
            assert httpx.get(f"{client.base_url}{path}", timeout=30).status_code == 200
        refused = httpx.get(f"{client.base_url}/v1/models", timeout=30)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert refused.headers["connection"] == "close"


def test_connections_that_are_being_closed_take_no_place(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens when a whole burst of connections reaches the header timeout together."""
    made = protocol.LimitedProtocol.connection_made

    def made_as_others_close(self: protocol.LimitedProtocol, transport: Any) -> None:
        if len(self.connections) == 65:
            for each in self.connections:
                each.transport.close()
        made(self, transport)

    monkeypatch.setattr(protocol.LimitedProtocol, "connection_made", made_as_others_close)
    with serve(small(answer([300])), **FEW) as client, contextlib.ExitStack() as stack:
        for _ in range(65):
            stack.enter_context(connect(client))
        assert post(client).status_code == 200


def test_a_burst_of_silent_connections_is_accepted_as_it_can_be_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are accepted one by one, as a burst can exceed the process's limit of open files."""
    made, counts = protocol.LimitedProtocol.connection_made, []

    def counted(self: protocol.LimitedProtocol, transport: Any) -> None:
        made(self, transport)
        counts.append(len(self.connections))

    monkeypatch.setattr(protocol.LimitedProtocol, "connection_made", counted)
    with serve(small(answer([300])), **FEW) as client, contextlib.ExitStack() as stack:
        began, go_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            began.set()
            go_on.wait(30)

        client.server.context.dispatcher._loop.call_soon_threadsafe(stand_still)
        assert began.wait(30)
        crowd = [stack.enter_context(connect(client)) for _ in range(300)]
        go_on.set()
        assert post(client).status_code == 200
        assert rest_of(crowd[0]) == b""
        assert len(counts) == 301 and max(counts) <= 65 + 2


def test_without_files_connections_wait_and_the_log_says_so_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, refusals = socket.socket.accept, []

    def refused(self: socket.socket) -> Any:
        if len(refusals) < 3:
            refusals.append(self)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(serving, "_PAUSE_SECONDS", 0.05)
    with serve(small(answer([300]))) as client:
        monkeypatch.setattr(socket.socket, "accept", refused)
        for _ in range(3):
            assert httpx.get(f"{client.base_url}/health", timeout=30).status_code == 200
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("No connection is accepted for 0.05 s: Too many open files.") == 3


# asyncio leaves the transport that it had created to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_connection_that_cannot_be_begun_costs_no_other(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Mac, options can't be set on a connection that was reset."""
    begin, refused = asyncio.base_events._set_nodelay, []

    def reset(sock: socket.socket) -> None:
        if len(refused) < 3:
            refused.append(sock)
            raise OSError(errno.EINVAL, "Invalid argument")
        begin(sock)

    monkeypatch.setattr(serving, "_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr(asyncio.selector_events.base_events, "_set_nodelay", reset)
    with serve(small(answer([300]))) as client, contextlib.ExitStack() as stack:
        for _ in range(3):
            assert rest_of(stack.enter_context(connect(client))) == b""
        assert post(client).status_code == 200
    assert len(refused) == 3
    gc.collect()


def test_who_does_not_read_what_needs_no_key_makes_room(serve: Serve) -> None:
    page = request_bytes("GET", "/page/vendor/marked.js") * 100
    with (
        serve(small(answer([300])), api_keys=("k",), **FEW) as client,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(65):
            stack.enter_context(connect(client, 4096)).sendall(page)

        def stalled() -> int:
            return sum(
                "stall" in each._timers for each in list(client.server.server_state.connections)
            )

        wait_until(lambda: stalled() == 65)
        headers = {"Authorization": "Bearer k"}
        assert client.post(CHAT, json=GOOD[CHAT], headers=headers).status_code == 200
