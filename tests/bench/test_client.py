"""Asking a server over HTTP: what is sent, what is timed, and every way in which it can fail."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from mlx_mtp.bench import client as client_module
from mlx_mtp.bench.answer import Split
from mlx_mtp.bench.client import HttpServer, base_url
from mlx_mtp.bench.prompts import Prompt
from mlx_mtp.bench.runs import Asking
from mlx_mtp.errors import BenchError, UsageError
from tests.bench.fake_server import (
    DONE,
    MODEL,
    FakeServer,
    Reply,
    as_json,
    closing,
    end,
    piece,
    plain_stream,
    refusal,
    ticking,
    usage,
)

PROMPTS = [Prompt("one", 1), Prompt("two", 2)]
ASKING = Asking(max_tokens=5, timeout=60)


def open_server(fake: FakeServer, **more: Any) -> HttpServer:
    return HttpServer(**{"url": fake.url, "asking": ASKING} | more)


def failure(fake: FakeServer, **more: Any) -> str:
    with pytest.raises(BenchError) as caught, open_server(fake, **more) as server:
        server.ask(PROMPTS)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_answers_come_in_the_order_of_the_prompts():
    with FakeServer() as fake, open_server(fake) as server:
        assert server.model == MODEL
        answers = server.ask(PROMPTS)
    assert [answer.num_tokens for answer in answers] == [5, 5]
    assert {answer.split for answer in answers} == {Split.SINGLE}
    hello, *asked = fake.asked
    assert hello["max_tokens"] == 8
    assert sorted(body["messages"][0]["content"] for body in asked) == ["one", "two"]
    for body in asked:
        assert body["stream"] is True
        assert (body["model"], body["max_tokens"], body["temperature"]) == (MODEL, 5, 0)
        assert not {"seed", "ignore_eos"} & set(body)


def test_all_are_asked_at_once():
    together = threading.Barrier(9, timeout=30)

    def chat(body: dict[str, Any]) -> Reply:
        if body["max_tokens"] == 5:
            together.wait()  # breaks unless nine requests are here
        return plain_stream(body)

    with FakeServer(chat) as fake, open_server(fake) as server:
        assert len(server.ask([Prompt(str(i), i) for i in range(9)])) == 9
    assert fake.most_at_once == 9


def test_what_is_asked_for_reaches_the_server():
    asking = Asking(max_tokens=3, temperature=0.5, ignore_eos=True)
    with FakeServer(key="k") as fake:
        with open_server(fake, asking=asking, api_key="k", model="b", name="N") as server:
            server.ask(PROMPTS)
        assert server.name == "N"
    asked = fake.asked[1:]
    for body in asked:
        assert (body["model"], body["temperature"], body["ignore_eos"]) == ("b", 0.5, True)
    seeds = {body["messages"][0]["content"]: body["seed"] for body in asked}
    assert seeds == {"one": 1, "two": 2}


@pytest.mark.parametrize(
    ("knows", "asked"),
    [
        (
            {"include_usage", "continuous_usage_stats"},
            {"include_usage": True, "continuous_usage_stats": True},
        ),
        ({"include_usage"}, {"include_usage": True}),
        (set(), None),
    ],
)
@pytest.mark.parametrize("status", [400, 422])
def test_a_strict_server_is_asked_for_the_usage_that_it_knows(knows, asked, status):
    def chat(body: dict[str, Any]) -> Reply:
        options = body.get("stream_options")
        if options is not None and (not knows or set(options) - knows):
            return refusal("stream_options.x is not a parameter", status)
        return plain_stream(body)

    with FakeServer(chat) as fake, open_server(fake) as server:
        answers = server.ask(PROMPTS)
    assert all(body.get("stream_options") == asked for body in fake.asked[-2:])
    assert {a.split for a in answers} == {Split.SINGLE if asked else Split.CHUNKS}


class Recorded(httpx.AsyncByteStream):
    """A body that arrives in exactly these reads."""

    def __init__(self, *reads: bytes) -> None:
        self._reads = reads

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for read in self._reads:
            yield read


def recorded(reads: Callable[[dict[str, Any]], tuple[bytes, ...]]) -> httpx.MockTransport:
    async def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": MODEL}]})
        body = json.loads(await request.aread())
        headers = {"Content-Type": "text/event-stream"}
        return httpx.Response(200, headers=headers, stream=Recorded(*reads(body)))

    return httpx.MockTransport(handle)


def test_times_are_those_of_the_reads():
    """By a clock that goes on by a second whenever it is looked at."""

    def reads(_: dict[str, Any]) -> tuple[bytes, ...]:
        two = piece("b", usage=usage(2)) + piece("c", usage=usage(3))
        cut = piece("d", usage=usage(5))
        return (piece("a", usage=usage(1)), two, cut[:9], cut[9:], closing() + end(5), DONE)

    transport = recorded(reads)
    with HttpServer("http://x", ASKING, transport=transport, clock=ticking()) as server:
        (answer,) = server.ask(PROMPTS[:1])
    sent = answer.sent
    assert answer.times == (sent + 1, sent + 2, sent + 4)
    assert answer.tokens == (1, 2, 2)
    assert (answer.ttft, answer.gaps, answer.ended) == (1, (1, 2), sent + 6)
    assert answer.decoding_rate == 4 / 3


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for model in (None, "m"):
        with pytest.raises(BenchError) as caught, HttpServer(url, ASKING, model=model):
            pass
        assert str(caught.value) == (
            f"{url}/v1 can't be reached: Connection refused. Is the server running?"
        )


@pytest.mark.parametrize("model", [None, "m"])
def test_a_key_is_wanted(model):
    with FakeServer(key="k") as fake:
        text = failure(fake, model=model)
        assert "answered 401: Incorrect API key." in text
        assert "--api-key" in text
        assert "--api-key" in failure(fake, api_key="wrong")


@pytest.mark.parametrize(
    "models",
    [
        as_json({"data": []}),
        as_json({"data": [{}]}),
        as_json({"object": "list"}),
        as_json([]),
        Reply([b"<html>"], kind="text/html"),
        refusal("no such route", 404),
    ],
)
def test_no_model_is_listed(models):
    with FakeServer(models=models) as fake:
        assert "--model" in failure(fake)
        with open_server(fake, model="m") as server:
            assert server.ask(PROMPTS)


def test_the_servers_own_words_are_passed_on():
    with FakeServer(lambda _: refusal("The model `x` does\nnot exist", 404)) as fake:
        text = failure(fake, model="x")
    assert text.endswith("/chat/completions answered 404: The model `x` does not exist.")
    with FakeServer(lambda _: Reply([b"busy"], 503, "text/plain")) as fake:
        assert failure(fake).endswith("answered 503: busy.")
    with FakeServer(lambda _: refusal("temperature must be 1")) as fake:
        assert failure(fake).endswith("answered 400: temperature must be 1.")


def test_an_answer_that_is_no_stream():
    with FakeServer(lambda _: as_json({"choices": []})) as fake:
        text = failure(fake)
    assert "application/json instead of text/event-stream" in text


def broken(reply: Reply) -> Callable[[dict[str, Any]], Reply]:
    """The first answer is whole, those that are measured are not."""
    return lambda body: plain_stream(body) if body["max_tokens"] == 8 else reply


def test_a_server_that_dies_in_the_middle_of_an_answer():
    half = [piece("a"), piece("b")]
    with FakeServer(broken(Reply(half, breaks=True))) as fake:
        assert "ended an answer in the middle: " in failure(fake)
    with FakeServer(broken(Reply(half))) as fake:
        assert "an answer was cut off after 2 chunks" in failure(fake)
    with FakeServer(broken(Reply([piece("a"), b'data: {"error": "oh"}\n\n']))) as fake:
        assert failure(fake) == f"{fake.url}/v1: an answer ended with the error: oh"


def test_a_server_that_goes_away_between_answers(monkeypatch):
    monkeypatch.setattr(client_module, "_RETRIES", 2)
    monkeypatch.setattr(client_module, "_RETRY_SECONDS", 0.0)
    gone: list[str] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        if gone:
            gone.append("tried")
            refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed")
            raise httpx.ConnectError("All connection attempts failed") from refused
        return await recorded(lambda _: (piece("a") + closing(), DONE)).handler(request)

    with HttpServer("http://x", ASKING, transport=httpx.MockTransport(handle)) as server:
        assert server.ask(PROMPTS)
        gone.append("gone")
        with pytest.raises(BenchError, match="no longer answers: Connection refused"):
            server.ask(PROMPTS[:1])
    assert gone.count("tried") == 3


def test_a_connection_that_is_turned_away_is_tried_again():
    """As by a server whose listen queue is full."""
    refused: list[str] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            text = json.loads(await request.aread())["messages"][0]["content"]
            if text == "one" and len(refused) < 3:
                refused.append(text)
                raise httpx.ReadError("Connection reset by peer")
        return await recorded(lambda _: (piece("a") + closing(), DONE)).handler(request)

    transport = httpx.MockTransport(handle)
    with HttpServer("http://x", ASKING, transport=transport) as server:
        answers = server.ask(PROMPTS)
    assert [answer.retries for answer in answers] == [3, 0]


def test_silence_ends_at_the_timeout():
    silent = threading.Event()

    def chat(body: dict[str, Any]) -> Reply:
        if body["max_tokens"] == 5:
            silent.wait(20)
        return plain_stream(body)

    with FakeServer(chat) as fake:
        text = failure(fake, asking=Asking(max_tokens=5, timeout=1.5))
        silent.set()
    assert text == f"{fake.url}/v1 was silent for 1.5 seconds (--timeout)."


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://[::1]:80/v1/", "http://[::1]/v1"),
        ("https://host.example/api/v1?x=1#y", "https://host.example/api/v1"),
    ],
)
def test_addresses(given, base):
    assert base_url(given) == base


@pytest.mark.parametrize(
    "given", ["", "127.0.0.1:8000", "localhost:1", "ftp://x", "http://", "a b"]
)
def test_what_is_no_address(given):
    with pytest.raises(UsageError, match="not a server's address"):
        base_url(given)
