"""Streams from within: what is written to the socket at one time, and the lock's interval."""

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
from mlx_mtp.server.choice import Choice
from mlx_mtp.server.detokenizer import Detokenizer
from mlx_mtp.server.dispatch import Dispatcher
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.metrics import Metrics
from mlx_mtp.server.openai.writer import ChatWriter, Envelope
from mlx_mtp.server.parsing.answer import AnswerParser, PlainParser
from mlx_mtp.server.parsing.formats import OutputFormat
from mlx_mtp.server.serve import SWITCH_SECONDS, Server, bind, run
from mlx_mtp.server.sse import stream_events
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, endless, fake_logprobs, out

PATIENCE = 30.0


class Stream:
    """One chat's events, whose steps the test brings."""

    def __init__(self, tokenizer: Tokenizer, parser: AnswerParser | None = None) -> None:
        self._parser = parser or PlainParser()
        self._text_bytes = tokenizer.text_bytes
        engine = FakeEngine(endless(40))
        self.dispatcher = Dispatcher(engine)
        self.request = Request("a", (1,), SamplingParams(max_tokens=8, top_logprobs=1))
        metrics = Metrics(engine, cast(RequestLimiter, None))
        generation = Generation(self.dispatcher, metrics, [self.request], self._choice)
        writer = ChatWriter(
            Envelope("a", 0, "m", 0, "f"),
            tokenizer,
            with_logprobs=True,
            include_usage=True,
            continuous_usage=False,
        )
        self.pieces: AsyncIterator[bytes] = stream_events(generation, writer, PATIENCE)

    def _choice(self, index: int) -> Choice:
        return Choice(index, Detokenizer(self._text_bytes), self._parser)

    def step(self, *tokens: int, finish: Any = None) -> None:
        """A step has brought tokens."""
        logprobs = tuple(fake_logprobs(token, self.request) for token in tokens)
        self._arrived(out(*tokens, finish=finish, logprobs=logprobs))

    def fail(self, error: StepError) -> None:
        """A step has failed."""
        self._arrived(out(finish="error", error=error))

    def _arrived(self, output: RequestOutput) -> None:
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


def test_the_tokens_of_a_step_are_one_event(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three")
    words = [tokenizer.token_text(token) for token in tokens]

    async def main() -> None:
        stream = Stream(tokenizer)
        stream.step(*tokens)
        _, content = events(await anext(stream.pieces))
        assert told(content) == ("one two three", words)
        stream.step(tokens[0], finish="length")
        content, _ = events(await anext(stream.pieces))
        assert told(content) == (words[0], words[:1])

    asyncio.run(main())


def test_reasoning_and_answer_of_a_step_are_two_events(tokenizer: Tokenizer) -> None:
    thought, said = tokenizer.encode("I think so."), tokenizer.encode("It is so.")
    tokens = (*thought, *tokenizer.encode("</think>"), *said)

    async def main() -> None:
        parser = OutputFormat("qwen3", "none").parser(thinking=True, schemas=None)
        stream = Stream(tokenizer, parser)
        stream._text_bytes = tokenizer.text_bytes_with(["</think>"])
        stream.step(*tokens)
        _, reasoning, content = events(await anext(stream.pieces))
        assert reasoning["choices"][0]["delta"] == {"reasoning_content": "I think so."}
        assert told(content) == ("It is so.", [tokenizer.token_text(token) for token in said])

    asyncio.run(main())


def test_what_came_before_an_error_is_written(tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("a")

    async def main() -> None:
        stream = Stream(tokenizer)
        stream.step(token)
        stream.fail(StepError("lost"))
        first, last = [events(piece) async for piece in stream.pieces]
        assert told(first[-1]) == ("a", ["a"])
        assert "lost" in last[0]["error"]["message"]
        assert last[1:] == ["[DONE]"]

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
        assert run(cast(Server, Stub()), sock, lambda: True)
    assert seen == [pytest.approx(SWITCH_SECONDS)]
