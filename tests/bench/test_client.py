"""Asking a server over HTTP: what is sent, what is timed, and every way in which it can fail."""

import asyncio

import httpx
import pytest

from mlx_mtp.bench import client
from mlx_mtp.bench.answer import Split
from mlx_mtp.bench.client import HttpServer, base_url
from mlx_mtp.bench.measure import Asking
from mlx_mtp.bench.prompts import Prompt
from mlx_mtp.errors import BenchError, UsageError
from tests.bench import fake_server as fake
from tests.bench.fake_server import Reply, as_json, closing, end, measured, piece, refusal

PROMPTS = [Prompt("one", 1), Prompt("two", 2)]
ASKING = Asking(max_tokens=5, timeout=60)


def failure(server: fake.FakeServer, **more) -> str:
    with pytest.raises(BenchError) as caught, HttpServer(server.url, ASKING, **more) as asked:
        asked.ask(PROMPTS)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_what_is_asked_for_reaches_the_server(serve):
    plain, told = serve(), serve(key="kéy")
    with HttpServer(plain.url, ASKING) as server:
        assert (server.model, server.name) == (fake.MODEL, f"{plain.url}/v1")
        answers = server.ask(PROMPTS)
    assert [(answer.num_tokens, answer.split) for answer in answers] == [(5, Split.SINGLE)] * 2
    assert plain.asked[0]["max_tokens"] == 8
    assert sorted(plain.questions[1:]) == ["one", "two"]
    wanted = {"model": fake.MODEL, "max_tokens": 5, "temperature": 0, "stream": True}
    assert all(set(body) == {*wanted, "messages", "stream_options"} for body in plain.asked[1:])
    assert all(wanted.items() <= body.items() for body in plain.asked[1:])
    asking = Asking(max_tokens=3, temperature=0.5, ignore_eos=True, timeout=45)
    with HttpServer(told.url, asking, api_key="kéy", model="b", name="N") as server:
        server.ask(PROMPTS)
        assert server.name == "N"
    for body in told.asked[1:]:
        assert (body["model"], body["temperature"], body["ignore_eos"]) == ("b", 0.5, True)
    seeds = {question: body["seed"] for question, body in zip(told.questions, told.asked)}
    assert seeds == {"Say hello.": 0, "one": 1, "two": 2}
    for request in told.requests:
        assert request.headers["Accept-Encoding"] == "identity"
        assert request.extensions["timeout"] == {"connect": 30, "read": 45, "write": 45, "pool": 45}


def test_all_are_asked_at_once_and_answers_come_in_the_order_of_the_prompts(serve):
    together = asyncio.Barrier(200)

    async def chat(body: fake.Body) -> Reply:
        if body["max_tokens"] == 5:
            await asyncio.wait_for(together.wait(), 30)  # fails unless all requests are here
        usage = fake.usage(1, prompt=len(body["messages"][0]["content"]))
        return Reply([piece("a"), closing() + fake.event(usage=usage), fake.DONE])

    prompts = [Prompt("x" * i, i) for i in range(200)]
    with HttpServer(serve(chat).url, ASKING) as server:
        assert [answer.prompt_tokens for answer in server.ask(prompts)] == list(range(200))


@pytest.mark.parametrize(
    ("knows", "split", "status"),
    [
        ({"include_usage", "continuous_usage_stats"}, Split.SINGLE, 400),
        ({"include_usage"}, Split.SINGLE, 422),
        (set(), Split.CHUNKS, 400),
    ],
)
def test_a_strict_server_is_asked_for_the_usage_that_it_knows(serve, knows, split, status):
    def chat(body: fake.Body) -> Reply:
        options = body.get("stream_options")
        if options is not None and (not knows or set(options) - knows):
            return refusal("stream_options.x is not a parameter", status)
        return fake.plain_stream(body)

    asked = serve(chat)
    with HttpServer(asked.url, ASKING) as server:
        answers = server.ask(PROMPTS)
    for body in asked.asked[-2:]:
        assert body.get("stream_options", {}) == dict.fromkeys(knows, True)
    assert {answer.split for answer in answers} == {split}


def test_times_are_those_of_the_reads(serve, ticking):
    ticking(client)
    cut = piece("d", 5)
    reads = [piece("a", 1), piece("b", 2) + piece("c", 3), cut[:9], cut[9:], closing() + end(5)]
    with HttpServer(serve(lambda _: Reply([*reads, fake.DONE])).url, ASKING) as server:
        (answer,) = server.ask(PROMPTS[:1])
    assert [at - answer.sent for at in (*answer.times, answer.ended)] == [1, 2, 4, 6]
    assert answer.tokens == (1, 2, 2)


def test_no_model_is_listed(serve):
    page = Reply([b"<html>"], kind="text/html")
    lists = [as_json(each) for each in ({"data": []}, {"data": [{}]}, [])]
    for models in (*lists, page, refusal("no such route", 404)):
        server = serve(models=models)
        assert "--model" in failure(server)
        with HttpServer(server.url, ASKING, model="m") as asked:
            assert asked.ask(PROMPTS)


HALF = [piece("a"), piece("b")]
CLOSED = httpx.RemoteProtocolError("peer closed connection")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (refusal("No `x`\nhere", 404), "/chat/completions answered 404: No `x` here."),
        (Reply([b"busy"], 503, "text/plain"), "answered 503: busy."),
        (refusal("No!", 401), "answered 401: No! Give the server's key with --api-key."),
        (as_json({}), "application/json instead of text/event-stream: it does not stream."),
        ([*HALF, CLOSED], "/v1 ended an answer in the middle: peer closed connection."),
        ([httpx.ReadTimeout("")], "/v1 was silent for 60 seconds (--timeout)."),
    ],
)
def test_a_failure_is_one_line_that_says_what_the_server_did(serve, reply, words):
    server = serve((lambda _: reply) if isinstance(reply, Reply) else measured(*reply))
    text = failure(server, model="x")
    assert text.startswith(server.url)
    assert text.endswith(words)


@pytest.mark.parametrize("failures", [5, 6])
def test_a_connection_that_is_refused_is_tried_again(serve, monkeypatch, failures):
    """A refused connection, as from a full listen queue, is retried a limited number of times."""
    monkeypatch.setattr(client, "_RETRIES", 5)
    monkeypatch.setattr(client, "_RETRY_SECONDS", 0.0)
    refusing = {"one", "Say hello."}

    def chat(body: fake.Body) -> Reply:
        question = body["messages"][0]["content"]
        if question in refusing and server.questions.count(question) <= failures:
            raise fake.refused()
        return fake.plain_stream(body)

    # There is no retry before the first answer: there may be no server at all.
    server = serve(chat)
    assert "Is the server running?" in failure(server, model="m")
    assert len(server.asked) == 1
    refusing.remove("Say hello.")
    if failures == 6:
        assert failure(server) == f"{server.url}/v1 no longer answers: Connection refused."
        assert server.questions.count("one") == 6
        return
    with HttpServer(server.url, ASKING) as asked:
        assert [answer.retries for answer in asked.ask(PROMPTS)] == [failures, 0]


def test_addresses():
    for given, base in (
        ("http://[::1]:80/v1/", "http://[::1]/v1"),
        ("https://host.example/api/v1?x=1#y", "https://host.example/api/v1"),
    ):
        assert base_url(given) == base
    for wrong in ("", "127.0.0.1:8000", "localhost:1", "ftp://x", "http://", "a b"):
        with pytest.raises(UsageError, match="not a server's address"):
            base_url(wrong)
