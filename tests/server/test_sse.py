"""Streams from within: what is written at one time, who is cancelled, and the lock's interval."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest

from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.errors import StepError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.admission import RequestLimiter
from mlx_mtp.server.detokenizer import Detokenizer
from mlx_mtp.server.dispatch import Dispatcher
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.metrics import Metrics
from mlx_mtp.server.openai.writer import ChatWriter
from mlx_mtp.server.output_stream import OutputStream
from mlx_mtp.server.parsing.formats import OutputFormat
from mlx_mtp.server.serve import SWITCH_SECONDS, Server, bind, run
from mlx_mtp.server.sse import stream_events
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, endless, fake_logprobs, out

PATIENCE = 30.0


class Stream:
    """One chat's events, whose steps the test brings."""

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool = False) -> None:
        form = OutputFormat.choose(tokenizer.template)
        engine = FakeEngine(endless(40))
        self.dispatcher = Dispatcher(engine)
        self.request = Request("a", (1,), SamplingParams(max_tokens=8, top_logprobs=1))
        detokenizer = Detokenizer(tokenizer.text_bytes_with(form.markers))
        stream = OutputStream(0, detokenizer, form.parser(thinking=thinking, schemas=None))
        metrics = Metrics(engine, cast(RequestLimiter, None))
        generation = Generation(self.dispatcher, metrics, [self.request], [stream])
        writer = ChatWriter(
            "a", {}, tokenizer, with_logprobs=True, include_usage=True, continuous_usage=False
        )
        generation.__enter__()
        self.pieces: AsyncIterator[bytes] = stream_events(generation, writer, PATIENCE)

    def step(self, *tokens: int, finish: Any = None) -> None:
        """A step has brought tokens."""
        logprobs = tuple(fake_logprobs(token, self.request) for token in tokens)
        self.arrived(out(*tokens, finish=finish, logprobs=logprobs))

    def arrived(self, output: RequestOutput) -> None:
        self.dispatcher._dispatch(0.0, [dataclasses.replace(output, request_id="a")])


def events(piece: bytes) -> list[Any]:
    *found, rest = piece.decode().split("\n\n")
    assert not rest
    data = [event.removeprefix("data: ") for event in found]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def told(event: Any) -> tuple[str, list[str]]:
    """A chunk's text, and its tokens by the logprobs."""
    (choice,) = event["choices"]
    logprobs = choice["logprobs"] or {"content": []}
    return choice["delta"].get("content", ""), [entry["token"] for entry in logprobs["content"]]


def test_steps_that_have_come_together_are_written_at_once(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three")
    assert len(tokens) > 2
    words = [tokenizer.token_text(token) for token in tokens]

    async def main() -> None:
        stream = Stream(tokenizer)
        for token in tokens:
            stream.step(token, finish="length" if token == tokens[-1] else None)
        first, last = [events(piece) async for piece in stream.pieces]
        role, *contents, finish = first
        assert told(role) == ("", [])
        # Each still is an event of its own, with its own logprobs.
        assert [told(event) for event in contents] == [(word, [word]) for word in words]
        assert finish["choices"][0]["finish_reason"] == "length"
        assert last[0]["usage"]["completion_tokens"] == len(tokens)
        assert last[1:] == ["[DONE]"]

    asyncio.run(main())


def test_a_step_does_not_wait_for_the_next(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three")

    async def main() -> None:
        stream = Stream(tokenizer)
        for number, token in enumerate(tokens):
            stream.step(token, finish="length" if token == tokens[-1] else None)
            piece = await anext(stream.pieces)
            assert tokenizer.token_text(token) in [told(e)[0] for e in events(piece)]
            assert (b'"role"' in piece) == (number == 0)
        (last,) = [piece async for piece in stream.pieces]
        assert events(last)[-1] == "[DONE]"

    asyncio.run(main())


def test_what_a_step_brings_of_one_kind_is_one_event(tokenizer: Tokenizer) -> None:
    said = tokenizer.encode("It is so.")
    words = [tokenizer.token_text(token) for token in said]
    tokens = (*tokenizer.encode("I think so."), *tokenizer.encode("</think>"), *said)

    async def main() -> None:
        stream = Stream(tokenizer, thinking=True)
        stream.step(*tokens)
        _, reasoning, content = events(await anext(stream.pieces))
        assert reasoning["choices"][0]["delta"] == {"reasoning_content": "I think so."}
        assert told(content) == ("It is so.", words)
        stream.step(said[0], finish="length")
        content, _ = events(await anext(stream.pieces))
        assert told(content) == (words[0], words[:1])

    asyncio.run(main())


def test_what_came_before_an_error_is_written(tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("a")

    async def main() -> None:
        stream = Stream(tokenizer)
        stream.step(token)
        stream.arrived(out(finish="error", error=StepError("lost")))
        first, last = [events(piece) async for piece in stream.pieces]
        assert told(first[-1]) == ("a", ["a"])
        assert "lost" in last[0]["error"]["message"]
        assert last[1:] == ["[DONE]"]

    asyncio.run(main())


@pytest.mark.parametrize("ticks", range(4))
def test_a_reader_cancelled_as_something_arrives_is_cancelled(
    tokenizer: Tokenizer, ticks: int
) -> None:
    async def main() -> None:
        stream = Stream(tokenizer)
        reader = asyncio.ensure_future(anext(stream.pieces))
        await asyncio.sleep(0)
        stream.step(40)
        for _ in range(ticks):
            await asyncio.sleep(0)
        # cancel() tells whether it came in time; if it did, it must not be forgotten.
        if reader.cancel():
            with pytest.raises(asyncio.CancelledError):
                await reader
        else:
            assert reader.result()

    asyncio.run(main())


@pytest.fixture
def switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switch_interval")
def test_a_server_has_its_threads_take_turns_more_often() -> None:
    seen = []

    class Stub:
        def run(self, sockets: object) -> None:
            seen.append(sys.getswitchinterval())

    with bind("127.0.0.1", 0) as sock:
        assert run(cast(Server, Stub()), sock, lambda _: True)
    assert seen == [pytest.approx(SWITCH_SECONDS)]
