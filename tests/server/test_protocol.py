"""HTTP on the wire: whatever bytes arrive, they get the right answer, and the server goes on."""

import asyncio
import contextlib
import itertools
import json
import logging
import random
import socket
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest.mock import Mock

import h11
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from mlx_mtp.config import ServerConfig
from mlx_mtp.server.http.protocol import FRAMING, MAX_HEADER_BYTES, MAX_HEADERS, LimitedProtocol
from tests.server.conftest import MODEL, Serve, Served
from tests.server.test_fuzz import spoilt
from tests.support.fake_engine import FakeEngine, answer
from tests.support.in_process import GOOD, TEXT
from tests.support.raw_http import Answer, error_of, exchange, incoming, request_bytes

CHUNKED = {"Transfer-Encoding": "chunked"}
Read = tuple[bytes, bytes, set[tuple[bytes, bytes]], bytes]  # method, target, headers, body
BODY = json.dumps(GOOD[TEXT]).encode()


class Case(NamedTuple):
    name: str
    status: int
    word: str
    body: bytes = b""
    headers: dict[str, str] | None = None
    raw: bytes = b""  # the whole request, in place of a POST with the above
    end: bool = False


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def head(*lines: str, path: str = "/v1/models", method: str = "GET") -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", "")).encode()


LONG = str(MAX_HEADER_BYTES)
OLD = f"POST {TEXT} HTTP/1.0\r\n".encode()
CASES = [
    Case("no host", 400, "Host", raw=b"GET /v1/models HTTP/1.1\r\n\r\n"),
    Case("two hosts", 400, "Host", raw=head("Host: localhost")),
    # More than the system's buffers hold: the client can still read the answer.
    Case("8 MB of headers", 431, LONG, raw=head("X: " + "a" * (1 << 23))),
    Case("many headers", 431, f"{MAX_HEADERS} headers", raw=head(*["X: a"] * MAX_HEADERS)),
    Case("as many as allowed", 404, "no route", raw=head(*["X: a"] * 99, path="/x")),
    Case("headers without end", 431, "headers", raw=head(*["X: a"] * 5000)[:-2]),
    Case("a long path", 431, "request line", raw=head(path="/" + "a" * MAX_HEADER_BYTES)),
    Case("a header without a colon", 400, "not valid HTTP", raw=head("Secret")),
    Case("control characters", 400, "not valid HTTP", raw=head("X: a\x00b")),
    Case("two lengths", 400, "Length", raw=head("Content-Length: 5", "Content-Length: 6")),
    Case("a length too short", 400, "not valid JSON", b"{}  ", {"Content-Length": "1"}),
    Case("a length too long", 400, "ended", b"{}", {"Content-Length": "9"}, end=True),
    Case("no length", 400, "empty", raw=request_bytes("POST", TEXT) + b"{}", end=True),
    Case("chunks in HTTP/1.0", 400, "HTTP/1.0", raw=OLD + b"Transfer-Encoding: chunked\r\n\r\n"),
    Case("a version of the future", 400, "version", raw=b"GET / HTTP/9.9\r\nHost: a\r\n\r\n"),
    Case("a chunk without a size", 400, "chunk", b"zz\r\n", CHUNKED),
    Case("a wait for 100 Continue", 400, "chunk", b"zz\r\n", CHUNKED | {"Expect": "100-continue"}),
    Case("a chunk cut off", 400, "ended", b"ff\r\n{}", CHUNKED, end=True),
    Case("small chunks", 431, "chunks", chunks(*[b" "] * MAX_HEADER_BYTES, b""), CHUNKED),
    Case(
        "as many as allowed", 400, "empty", chunks(*[b" "] * (MAX_HEADER_BYTES // 6), b""), CHUNKED
    ),
    Case("trailers without end", 431, "headers", b"0\r\n" + b"X: a\r\n" * 30_000, CHUNKED),
    Case("a trailer without end", 431, "chunks", b"0\r\nX: " + b"a" * 90_000, CHUNKED),
    Case("an extension without end", 431, "chunks", b"1;" + b"a" * 90_000, CHUNKED),
    # The server looks for the end of the body at each of these.
    Case("blank lines in a chunk", 431, "chunks", chunks(b"\r\n\r\n" * 5000, b""), CHUNKED),
    # llhttp takes these.
    Case("no version", 400, "version", raw=b"GET /\r\n\r\n"),
    Case("HTTP/2", 400, "version", raw=b"GET / HTTP/2.0\r\nHost: a\r\n\r\n"),
    Case("RTSP", 400, "version", raw=b"GET / RTSP/1.0\r\nHost: a\r\n\r\n"),
    Case("two spaces", 400, "request line", raw=b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n"),
    Case("two codings", 400, "Encoding", b"0\r\n\r\n", {"Transfer-Encoding": "gzip, chunked"}),
    Case("a coding again", 400, "Encoding", b"0\r\n\r\n", {"TransfeR-Encoding": "x"} | CHUNKED),
    # h11 takes these.
    Case("bare line feeds", 400, "request line", raw=b"GET / HTTP/1.1\nHost: a\n\n"),
    Case("a folded header", 400, "whitespace", raw=head("X: a", " Transfer-Encoding: chunked")),
    Case("half a request line", 400, "ended", raw=b"GET /v1/mod", end=True),
    Case("TLS", 400, "not valid HTTP", raw=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    Case("a target with a space", 400, "request line", raw=head(path="/a b")),
    # llhttp knows all registered methods; others are no HTTP for it.
    Case("a very long method", 400, "method", raw=head(method="A" * 5000)),
    Case("CONNECT", 400, "request line", raw=head(path="evil.example:443", method="CONNECT")),
    # The host in an absolute target is the one that counts.
    Case("a foreign target", 403, "evil.example", raw=head(path="http://evil.example/v1/models")),
]


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[Served]:
    with serve(FakeEngine(answer([300]))) as client:
        yield client


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refusals(client: Served, case: Case, caplog: pytest.LogCaptureFixture) -> None:
    sent = case.raw or request_bytes("POST", TEXT, case.headers, case.body)
    caplog.set_level(logging.ERROR, "uvicorn.error")
    refused = exchange(client, sent, end=case.end)
    assert refused.status == case.status
    assert case.word in error_of(refused, "/")
    assert b"Secret" not in refused.body
    assert refused.headers["content-type"].startswith("application/json")
    assert exchange(client, request_bytes("POST", TEXT, body=BODY)).status == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_careful_clients_send_passes(client: Served) -> None:
    for headers in (
        {"Host": "[::1]"},
        {"Expect": "100-continue"},
        {"Connection": "Upgrade", "Upgrade": "websocket"},
    ):
        assert exchange(client, request_bytes("POST", TEXT, headers, BODY)).status == 200, headers
    halves = chunks(BODY[:9], BODY[9:], b"")
    assert exchange(client, request_bytes("POST", TEXT, CHUNKED, halves)).status == 200
    large = chunks(*[b" " * 8 * FRAMING] * MAX_HEADER_BYTES, BODY, b"")
    assert exchange(client, request_bytes("POST", TEXT, CHUNKED, large)).status == 200
    old = OLD + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
    assert exchange(client, old).headers["connection"] == "close"
    body = json.dumps(GOOD[TEXT] | {"stream": True}).encode()
    streamed = exchange(client, OLD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert "transfer-encoding" not in streamed.headers
    assert streamed.body.startswith(b"data: ") and streamed.body.endswith(b"data: [DONE]\n\n")
    for target in ("http://localhost", "HTTP://[::1]:8000/?a=b", f"http://localhost{TEXT}"):
        sent = request_bytes("POST" if target.endswith(TEXT) else "GET", target, body=BODY)
        assert exchange(client, sent.replace(b"Host: localhost", b"Host: evil")).status == 200


def test_who_expects_100_continue_gets_it(client: Served) -> None:
    expecting = {"Expect": "100-continue \t", "Content-Length": str(len(BODY))}
    with socket.create_connection(client.address, timeout=30) as sock:
        sock.sendall(request_bytes("POST", TEXT, expecting))
        assert sock.recv(1 << 10) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert Answer(incoming(sock)).status == 200


@pytest.mark.parametrize("path", [TEXT, "/v1/no/such/route", "/health"])
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_what_has_two_lengths_is_answered_once(client: Served, path: str, method: str) -> None:
    """Proxies disagree on whether the rest is part of the body or a second request."""
    smuggled = chunks(b"") + request_bytes("DELETE", "/v1/chat/completions/chatcmpl-1")
    both = CHUNKED | {"Content-Length": str(len(smuggled))}
    with socket.create_connection(client.address, timeout=30) as sock:
        sock.sendall(request_bytes(method, path, both, smuggled))
        source = incoming(sock)
        refused = Answer(source)
        assert "can't be present" in error_of(refused, "/")
        assert (refused.status, source.read(1)) == (400, b"")
        assert refused.headers["x-request-id"].startswith("req-")


TRAILERS = b"0\r\nConnection: close, upgrade\r\nUpgrade: h2c\r\nHost: b\r\n\r\n"
SEQUENCES = {
    "answers come in order": (
        (request_bytes("GET", "/v1/models"), 200),
        (request_bytes("POST", TEXT, body=b"{"), 400),
        (request_bytes("POST", TEXT, body=BODY), 200),
        (b"GARBAGE\r\n\r\n", 400),
    ),
    # The server reads on while it handles the exception of which the first answer tells.
    "garbage behind an unknown path": (
        (request_bytes("GET", "/no/such/path"), 404),
        (b"GARBAGE\r\n\r\n", 400),
    ),
    # llhttp would stop reading after these trailers.
    "trailers": (
        (request_bytes("POST", TEXT, CHUNKED, chunks(BODY) + TRAILERS), 200),
        (request_bytes("POST", TEXT, body=BODY), 200),
    ),
    # All of them are in the server's buffer when it looks at them.
    "headers behind a request": (
        (request_bytes("GET", "/v1/models"), 200),
        (head(*["X: a"] * 20_000), 431),
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_several_requests_on_one_connection(client: Served, name: str) -> None:
    sent, statuses = zip(*SEQUENCES[name])
    with socket.create_connection(client.address, timeout=30) as sock:
        sock.sendall(b"".join(sent))
        source = incoming(sock)
        assert [Answer(source).status for _ in sent] == list(statuses)
        assert statuses[-1] == 200 or source.read(1) == b""


def read_by_h11(data: bytes) -> list[Read]:
    """Returns the requests that h11 reads before the data ends or is wrong."""
    parser, read = h11.Connection(h11.SERVER), list[Read]()
    parser.receive_data(data)
    with contextlib.suppress(h11.RemoteProtocolError):
        while parser.their_state is not h11.MUST_CLOSE:
            match parser.next_event():
                case h11.Request() as request:
                    body = b""
                case h11.Data() as piece:
                    body += piece.data
                case h11.EndOfMessage():
                    headers = {(name, value.lower()) for name, value in request.headers}
                    read.append((request.method, request.target, headers, body))
                    parser.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                    parser.send(h11.EndOfMessage())
                    if parser.our_state is h11.DONE and parser.their_state is h11.DONE:
                        parser.start_next_cycle()
                case _:
                    break
    return read


async def read_by_server(pieces: Iterable[bytes], **settings: Any) -> list[Read]:
    """Returns the requests that the server's application gets, and checks its answers' writes."""
    read = list[Read]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, message = b"", await receive()
        while message.get("more_body"):
            body, message = body + message["body"], await receive()
        if message["type"] == "http.request":
            target = scope["raw_path"] + b"?" * bool(scope["query_string"]) + scope["query_string"]
            headers = {(name, value.lower()) for name, value in scope["headers"]}
            read.append((scope["method"].encode(), target, headers, body + message["body"]))
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"first piece", "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    written = list[bytes]()
    transport: Any = Mock(asyncio.Transport, write=written.append)
    transport.is_closing.return_value = False
    transport.close.side_effect = transport.abort.side_effect = lambda: setattr(
        transport.is_closing, "return_value", True
    )
    config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", lifespan="off")
    config.load()
    limits = ServerConfig(model_name=MODEL, **settings)
    connection = LimitedProtocol(limits, 9, config=config, server_state=ServerState(), app_state={})
    connection.connection_made(transport)
    for piece in pieces:
        if not transport.is_closing():
            connection.data_received(piece)
        for _ in range(9):
            await asyncio.sleep(0)
    connection.connection_lost(None)
    heads = [data for data in written if data.startswith(b"HTTP/1.1 200")]
    alone = [data for data in heads if b"first piece" not in data]
    assert len(heads) == len(read)
    assert len(alone) == [method for method, *_ in read].count(b"HEAD")
    return read


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 2000), pytest.param(2, 20_000, marks=pytest.mark.full)]
)
def test_the_server_reads_nothing_that_h11_reads_differently(seed: int, rounds: int) -> None:
    """However requests are damaged and cut into pieces, the server may only refuse more."""
    chance = random.Random(seed)
    seeds = [
        request_bytes("GET", "/a?b=c", {"X": " y \t", "Y": ""}),
        request_bytes("HEAD", "/", {"Connection": "close"}),
        request_bytes("POST", "/a", {"Connection": "Upgrade", "Upgrade": "h2c"}, BODY),
        request_bytes("POST", "/b", CHUNKED, chunks(b"\r\n\r\n", BODY, b"")),
        request_bytes("PUT", "/c", CHUNKED | {"Expect": "100-continue"}, chunks(BODY) + TRAILERS),
        OLD + b"Content-Length: 3\r\n\r\nabc",
    ]

    async def compare() -> int:
        num_read = 0
        for number in range(rounds):
            sent = b"".join(
                spoilt(one, TOKENS, chance) if chance.random() < 0.5 else one
                for one in chance.choices(seeds, k=3)
            )
            cuts = sorted(chance.choices(range(len(sent)), k=chance.choice((0, 1, 9))))
            pieces = [sent[a:b] for a, b in itertools.pairwise((0, *cuts, len(sent)))]
            ours, theirs = await read_by_server(pieces), read_by_h11(sent)
            # The server hides this header from its parser.
            ours = [
                (m, t, {(n.replace(b"ignored", b"upgrade"), v) for n, v in h}, b)
                for m, t, h, b in ours
            ]
            assert ours == theirs[: len(ours)], (number, pieces)
            num_read += len(ours)
        return num_read

    assert asyncio.run(compare()) > rounds / 2


def test_a_process_takes_headers_that_its_parent_adds() -> None:
    sent = head(*["X: a"] * MAX_HEADERS)
    for keys, num_read in (None, 0), (0, 1):
        assert len(asyncio.run(read_by_server([sent], parent_keys=keys))) == num_read


def is_whole(sent: bytes) -> bool:
    """True if there is a request to answer; else the server must be told that the input ends.

    The end of the input after a whole request would mean that nobody waits for the answer.
    """
    parser = h11.Connection(h11.SERVER)
    try:
        parser.receive_data(sent)
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return False
            if event is h11.PAUSED or isinstance(event, h11.EndOfMessage):
                return True
    except h11.RemoteProtocolError:
        return True


TOKENS = [
    *(
        b"transfer-encoding: identity\r\n",
        b"X: y \r\n",
        b"\r\n ",
        b"HTTP/1.0",
        b"RTSP/1.0",
        b"\x0b",
    ),
    *(b"\r\n", b"\n", b"\r", b" ", b":", b"\x00", b"\xff", b"Host: a\r\n", b"GET ", b"HTTP/1.1"),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"ffffffff\r\n"),
    *(b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"X" * 20_000),
]


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 300), *(pytest.param(s, 2000, marks=pytest.mark.full) for s in (2, 3))]
)
def test_spoilt_requests(client: Served, seed: int, rounds: int) -> None:
    """Each request is sent in two pieces, and gets an answer."""
    chance = random.Random(seed)
    seeds = [
        request_bytes("GET", "/v1/models"),
        request_bytes("HEAD", "/"),
        request_bytes("POST", TEXT, body=BODY),
        request_bytes("POST", TEXT, CHUNKED, chunks(BODY[:5], BODY[5:], b"")),
    ]
    for number in range(rounds):
        sent = spoilt(chance.choice(seeds), TOKENS, chance)
        cut = chance.randrange(len(sent) + 1)
        with socket.create_connection(client.address, timeout=30) as sock:
            try:
                sock.sendall(sent[:cut])
                sock.sendall(sent[cut:])
                if not is_whole(sent):
                    sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # refused before all was sent; the answer is there all the same
            if not sent.strip(b"\r\n"):
                continue
            method = "HEAD" if sent.lstrip().startswith(b"HEAD ") else "POST"
            got = Answer(incoming(sock), method)
            assert got.status == 200 or 400 <= got.status < 500, (number, sent)
            if got.status != 200 and method != "HEAD":
                error_of(got, "/")
    assert client.get("/v1/models").json()["data"][0]["id"] == MODEL
