"""Whatever bytes arrive: the right status, an error that says why, and a server that goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlx_mtp.server.http_protocol import FREE_CHUNKS, MAX_HEADER_BYTES, MAX_HEADERS
from mlx_mtp.server.json_text import MAX_DEPTH, MAX_ITEMS, MAX_PARTS
from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import FakeEngine, answer
from tests.server.raw_http import Answer, error_of, exchange, incoming, request_bytes

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
MAX_BODY = 4 << 20
HI = {"model": MODEL, "prompt": "hi"}
CHUNKED = {"Transfer-Encoding": "chunked"}
GOOD = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    TEXT: HI,
    MESSAGES: {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    COUNT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": MODEL, "input": "hi"},
    TOKENIZE: {"prompt": "hi"},
    DETOKENIZE: {"tokens": [300]},
}


@dataclass(frozen=True)
class Case:
    name: str
    status: int
    word: str
    body: bytes = b""
    path: str = TEXT
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""
    """The whole request, in place of all the above."""
    end: bool = False

    def send(self, client: Served) -> Answer:
        sent = self.raw or request_bytes(self.method, self.path, self.headers, self.body)
        return exchange(client, sent, end=self.end)


def text(value: str | bytes) -> bytes:
    """A good body but for one more field, `x`, whose JSON this is."""
    raw = value if isinstance(value, bytes) else value.encode()
    return b'{"model": "test/model", "prompt": "hi", "x": ' + raw + b"}"


def fields(path: str, **more: Any) -> bytes:
    return json.dumps(GOOD[path] | more).encode()


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def head(*lines: str, path: str = "/v1/models") -> bytes:
    return "\r\n".join((f"GET {path} HTTP/1.1", "Host: localhost", *lines, "", "")).encode()


BODIES = [
    Case("empty", 400, "empty"),
    Case("white space", 400, "empty", b" \r\n\t "),
    Case("cut off", 400, "not valid JSON", b'{"model": "x"'),
    Case("two values", 400, "Extra data", b"{} {}"),
    Case("a list", 400, "must be a JSON object", b"[]"),
    Case("a string", 400, "must be a JSON object", b'"hi"'),
    Case("null", 400, "must be a JSON object", b"null"),
    Case("single quotes", 400, "not valid JSON", b"{'model': 'x'}"),
    Case("a comma at the end", 400, "not valid JSON", b'{"model": "x",}'),
    Case("a comment", 400, "not valid JSON", b"{/* hi */}"),
    Case("a byte order mark", 400, "not valid JSON", b"\xef\xbb\xbf{}"),
    Case("UTF-16", 400, "UTF-8", json.dumps(HI).encode("utf-16")),
    Case("an invalid byte", 400, "not valid UTF-8", text(b'"\xff"')),
    Case("an overlong sequence", 400, "not valid UTF-8", text(b'"\xc0\xaf"')),
    Case("an encoded surrogate", 400, "not valid UTF-8", text(b'"\xed\xa0\x80"')),
    Case("half a character", 400, "surrogate", text(r'"\ud800"')),
    Case("half a character in a name", 400, "surrogate", text(r'{"\udc00": 1}')),
    Case("a control character", 400, "control character", text(b'"\x00"')),
    Case("NaN", 400, "NaN is not JSON", text("NaN")),
    Case("Infinity", 400, "Infinity is not JSON", text("-Infinity")),
    Case("1e999", 400, "1e999 is too large", text("1e999")),
    Case("5000 digits", 400, "too many digits", text("9" * 5000)),
    Case("5000 digits after the point", 400, "not a parameter", text("0." + "9" * 5000)),
    Case("a leading zero", 400, "not valid JSON", text("01")),
    Case("1000 lists deep", 400, f"at most {MAX_DEPTH} levels", text("[" * 1000 + "]" * 1000)),
    Case("1000 objects deep", 400, "levels", text('{"a":' * 1000 + "1" + "}" * 1000)),
    Case("1000 deep and cut off", 400, "levels", text("[" * 1000)),
    Case("as deep as allowed", 400, "not a parameter", text("[" * 255 + "]" * 255)),
    Case("brackets in a string", 400, "not a parameter", text('"' + r"[\"{" * 9000 + '"')),
    Case("too many lists", 400, str(MAX_PARTS), text("[" + "[]," * MAX_PARTS + "1]")),
    Case("too many strings", 400, str(MAX_PARTS), text("[" + '"",' * MAX_PARTS + "1]")),
    Case("too many values", 400, str(MAX_ITEMS), text("[" + "1," * (MAX_ITEMS + 1) + "1]")),
    Case("a name twice", 400, "'model' twice", b'{"model": "a", "model": "b"}'),
    Case("a name twice, escaped", 400, "'model' twice", rb'{"model": "a", "mod\u0065l": "b"}'),
    Case("a name twice, deep", 400, "'a' twice", text('[{"a": 1, "b": 2, "a": 3}]')),
    Case("too long", 413, "longer than", b" " * (MAX_BODY + 1)),
    Case("too long, in chunks", 413, "longer", chunks(b" " * MAX_BODY, b" ", b""), headers=CHUNKED),
    Case("too long, for Anthropic", 413, "longer", b" " * (MAX_BODY + 1), MESSAGES),
]
HEADERS = [
    Case("gzip", 415, "uncompressed", b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
    Case("brotli, for Anthropic", 415, "br", b"x", MESSAGES, headers={"Content-Encoding": "br"}),
    Case(
        "form", 415, "JSON", b"a=1", headers={"Content-Type": "application/x-www-form-urlencoded"}
    ),
    Case(
        "multipart", 415, "JSON", b"x", headers={"Content-Type": "multipart/form-data; boundary=x"}
    ),
    Case("text", 415, "application/json", b"{}", headers={"Content-Type": "text/plain"}),
    Case("no type at all", 415, "JSON", b"{}", headers={"Content-Type": ";;;"}),
    Case(
        "Latin-1", 415, "UTF-8", b"{}", headers={"Content-Type": "application/json; charset=latin1"}
    ),
    Case("foreign host", 403, "evil.example", method="GET", headers={"Host": "evil.example"}),
    Case("foreign origin", 403, "--cors-origin", headers={"Origin": "https://evil.example"}),
    Case("null origin", 403, "'null'", headers={"Origin": "null"}),
    Case("no host", 400, "Host", raw=b"GET /v1/models HTTP/1.1\r\n\r\n"),
    Case("two hosts", 400, "Host", raw=head("Host: localhost")),
    Case("1 MB of headers", 431, str(MAX_HEADER_BYTES), raw=head("X: " + "a" * (1 << 20))),
    Case("many headers", 431, f"{MAX_HEADERS} headers", raw=head(*["X: a"] * MAX_HEADERS)),
    Case("very many headers", 431, "headers", raw=head(*["X: a"] * 50_000)),
    Case("a long path", 431, "request line", raw=head(path="/" + "a" * MAX_HEADER_BYTES)),
    Case("a long path that fits", 404, "no route", raw=head(path="/" + "a" * 9000)),
    Case("a header without a colon", 400, "not valid HTTP", raw=head("Secret")),
    Case("a space before the colon", 400, "not valid HTTP", raw=head("Secret : x")),
    Case("control characters", 400, "not valid HTTP", raw=head("X: a\x00b")),
    Case("a length of letters", 400, "Length", raw=head("Content-Length: abc")),
    Case("a negative length", 400, "Length", raw=head("Content-Length: -1")),
    Case("two lengths", 400, "Length", raw=head("Content-Length: 5", "Content-Length: 6")),
    Case("a length of 30 digits", 400, "Length", raw=head("Content-Length: " + "9" * 30)),
    Case("a length too large", 413, "longer", b"{}", headers={"Content-Length": "9" * 12}),
    Case("a length too short", 400, "not valid JSON", b"{}  ", headers={"Content-Length": "1"}),
    Case("a length too long", 400, "ended", b"{}", headers={"Content-Length": "9"}, end=True),
    Case("no length", 400, "empty", raw=request_bytes("POST", TEXT) + b"{}", end=True),
    Case(
        "length and chunks", 400, "exclude", chunks(b""), headers=CHUNKED | {"Content-Length": "5"}
    ),
    Case("gzip in transfer", 400, "chunked", b"x", headers={"Transfer-Encoding": "gzip, chunked"}),
    Case("a chunk without a size", 400, "chunk", b"zz\r\n", headers=CHUNKED),
    Case("a chunk cut off", 400, "ended", b"ff\r\n{}", headers=CHUNKED, end=True),
    Case(
        "chunks of a byte",
        400,
        "chunks of the body are too small",
        chunks(*[b" "] * (FREE_CHUNKS + 100), b""),
        headers=CHUNKED,
    ),
    Case("trailers without end", 431, "headers", b"0\r\n" + b"X: a\r\n" * 30_000, headers=CHUNKED),
    Case("no HTTP", 400, "not valid HTTP", raw=b"hello\r\n\r\n"),
    Case("half a request line", 400, "ended", raw=b"GET /v1/mod", end=True),
    Case("TLS", 400, "not valid HTTP", raw=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    Case("HTTP/2", 400, "Host", raw=b"PRI * HTTP/1.1\r\n\r\nSM\r\n\r\n"),
    Case("a target with a space", 400, "request line", raw=head(path="/a b")),
    Case("no such method", 405, "Not Allowed", method="BREW"),
    Case("a very long method", 405, "Not Allowed", method="A" * 5000),
    Case("CONNECT", 404, "no route", method="CONNECT", path="evil.example:443"),
    Case("an absolute target", 404, "no route", path="http://localhost/v1/completions"),
    Case(
        "path traversal", 404, "not served", method="GET", path="/v1/models/..%2f..%2fetc%2fpasswd"
    ),
    Case("a zero in the path", 404, "not served", method="GET", path="/v1/models/%00%ff"),
]
FIELDS = [
    Case(
        "an image",
        400,
        "text only",
        fields(
            CHAT,
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
                }
            ],
        ),
        CHAT,
    ),
    Case(
        "a file",
        400,
        "text only",
        fields(
            CHAT,
            messages=[{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}],
        ),
        CHAT,
    ),
    Case(
        "sound",
        400,
        "text only",
        fields(
            CHAT,
            messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        ),
        CHAT,
    ),
    Case(
        "an image for Anthropic",
        400,
        "blocks of these types",
        fields(
            MESSAGES,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "url", "url": "http://169.254.169.254/"},
                        }
                    ],
                }
            ],
        ),
        MESSAGES,
    ),
    Case(
        "an image in a response's input",
        400,
        "'input_text'",
        fields(
            RESPONSES,
            input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        ),
        RESPONSES,
    ),
    Case("an adapter", 400, "adapters is not", fields(CHAT, adapters="/tmp/x"), CHAT),
    Case("another model", 404, "not served", fields(TEXT, model="../../etc")),
    Case("a model's path", 404, "not served", fields(CHAT, model="/etc/passwd"), CHAT),
    Case("a template", 400, "not a parameter", fields(CHAT, chat_template="{{ 1 }}"), CHAT),
    Case("a long label", 400, "512 characters", fields(TEXT, metadata={"a": "x" * 513})),
    Case("a long label's name", 400, "512 characters", fields(TEXT, metadata={"x" * 513: "a"})),
    Case("n without bound", 400, "1 to 16", fields(CHAT, n=1_000_000), CHAT),
    Case(
        "a stop of 257 characters",
        400,
        "at most 256",
        fields(MESSAGES, stop_sequences=["x" * 257]),
        MESSAGES,
    ),
    Case("17 stops", 400, "at most 16", fields(TEXT, stop=["x"] * 17)),
    Case(
        "4097 messages",
        400,
        "at most 4096",
        fields(COUNT, messages=GOOD[COUNT]["messages"] * 4097),
        COUNT,
    ),
    Case("1025 tools", 400, "at most 1024", fields(RESPONSES, tools=[1] * 1025), RESPONSES),
    Case("129 prompts", 400, "at most 128", fields(TEXT, prompt=["a"] * 129)),
    Case(
        "a prompt of many ids",
        400,
        "token ids; at most",
        fields(TEXT, prompt=[[1] * ((1 << 20) + 1)]),
    ),
    Case(
        "a token out of range", 400, "0 to 4095", fields(DETOKENIZE, tokens=[1 << 60]), DETOKENIZE
    ),
    Case("a token that is true", 400, "entry 1", fields(DETOKENIZE, tokens=[1, True]), DETOKENIZE),
    Case("two texts", 400, "give one of", fields(TOKENIZE, content="b"), TOKENIZE),
    Case("a long regex", 400, "at most 262144", fields(TEXT, guided_regex="a" * (1 << 18) + "b")),
    Case("a regex that is none", 400, "can't be enforced", fields(TEXT, guided_regex="(((")),
    Case("a text that never fits", 400, "1024 tokens", fields(TEXT, prompt="hello " * 400_000)),
]
CASES = [*BODIES, *HEADERS, *FIELDS]


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[Served]:
    with serve(FakeEngine(answer([300])), max_body_bytes=MAX_BODY) as client:
        yield client


def works(client: Served) -> None:
    answer = exchange(client, request_bytes("POST", TEXT, body=json.dumps(HI).encode()))
    assert answer.status == 200
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(client: Served, case: Case) -> None:
    answer = case.send(client)
    assert answer.status == case.status
    assert case.word in error_of(answer, "/" if case.raw else case.path)
    assert answer.headers["content-type"].startswith("application/json")
    works(client)


def test_the_table_is_long_enough_and_has_every_route() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60
    assert {case.path for case in CASES} >= set(GOOD)


@pytest.mark.parametrize("path", GOOD)
def test_the_good_bodies_are_good(client: Served, path: str) -> None:
    body = json.dumps(GOOD[path]).encode()
    for headers in (
        {},
        {"Content-Type": "application/json; charset=UTF-8"},
        {"Content-Encoding": "identity"},
        {"Origin": "http://localhost"},
        {"Host": "127.0.0.1:1234"},
        {"Host": "[::1]"},
        {"Expect": "100-continue"},
        {"Connection": "Upgrade", "Upgrade": "websocket"},
    ):
        assert exchange(client, request_bytes("POST", path, headers, body)).status == 200, headers
    halves = chunks(body[:9], body[9:], b"")
    assert exchange(client, request_bytes("POST", path, CHUNKED, halves)).status == 200


def test_http_1_0(client: Served) -> None:
    body = json.dumps(HI).encode()
    sent = f"POST {TEXT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    answer = exchange(client, sent)
    assert answer.status == 200
    assert answer.headers["connection"] == "close"


def test_pipelined_requests_are_answered_in_order(client: Served) -> None:
    body = json.dumps(HI).encode()
    sent = (
        request_bytes("GET", "/v1/models"),
        request_bytes("POST", TEXT, body=b"{"),
        request_bytes("POST", TEXT, body=body),
        b"GARBAGE\r\n\r\n",
    )
    with socket.create_connection(client.address, timeout=30) as sock:
        sock.sendall(b"".join(sent))
        source = incoming(sock)
        assert [Answer(source).status for _ in sent] == [200, 400, 200, 400]
        assert source.read(1) == b""


def test_headers_behind_a_request_are_bounded_too(client: Served) -> None:
    # They lie in the server's buffer as a whole by the time that it looks at them.
    sent = request_bytes("GET", "/v1/models") + head(*["X: a"] * 20_000)
    with socket.create_connection(client.address, timeout=30) as sock:
        sock.sendall(sent)
        source = incoming(sock)
        assert [Answer(source).status for _ in range(2)] == [200, 431]


def test_a_connection_survives_what_is_wrong_with_a_body(client: Served) -> None:
    with socket.create_connection(client.address, timeout=30) as sock:
        source = incoming(sock)
        for body, status in ((b"{", 400), (b"\xff", 400), (json.dumps(HI).encode(), 200)) * 3:
            sock.sendall(request_bytes("POST", TEXT, body=body))
            assert Answer(source).status == status


def test_an_error_repeats_no_header(client: Served) -> None:
    for line in (
        "Authorization : Bearer sk-secret",
        "Bearer sk-secret",
        "x-api-key\x00: sk-secret",
    ):
        assert b"secret" not in exchange(client, head(line)).body
