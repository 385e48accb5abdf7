"""Streams from within: what is written together, and who is cancelled."""

import asyncio
import dataclasses
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest

from mlx_mtp.config import ServerConfig
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.api.openai.protocol import ChatRequest
from mlx_mtp.server.api.openai.routes import ChatWriter
from mlx_mtp.server.context import Context
from mlx_mtp.server.generation.job import Job
from mlx_mtp.server.generation.writer import stream_events
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL
from tests.support.fake_engine import FakeEngine, endless, fake_logprobs, out
from tests.support.wire_help import chat_body

PARAMS = SamplingParams(max_tokens=8, top_logprobs=1)


@pytest.fixture(scope="module")
def context(tokenizer: Tokenizer) -> Iterator[Context]:
    context = Context(FakeEngine(endless(40)), tokenizer, ServerConfig(MODEL), {})
    yield context
    context.grammars.close()


class Stream:
    """The events of one chat; the test provides its steps."""

    def __init__(self, context: Context) -> None:
        self.name = "chatcmpl-" + uuid.uuid4().hex
        self._context = context

    async def open(self) -> None:
        body = chat_body(stream=True, stream_options={"include_usage": True})
        asked = ChatRequest.model_validate(body)
        job = Job(self._context, {}, asked, self.name, asked.options(), PARAMS)
        generation = await job.chat(asked.conversation())
        generation.__enter__()
        writer = ChatWriter(job, generation)
        self.pieces: AsyncIterator[bytes] = stream_events(writer, patience=30.0)

    def step(self, *tokens: int, finish: Any = None) -> None:
        """Deliver a step with these tokens."""
        request = cast(FakeEngine, self._context.engine).submitted[-1]
        logprobs = tuple(fake_logprobs(token, request) for token in tokens)
        output = out(*tokens, finish=finish, logprobs=logprobs)
        output = dataclasses.replace(output, request_id=f"{self.name}-0")
        self._context.dispatcher._dispatch(0.0, [output])


@pytest.fixture
def stream(context: Context) -> Stream:
    return Stream(context)


def events(piece: bytes) -> list[Any]:
    *found, rest = piece.decode().split("\n\n")
    assert not rest
    data = [event.removeprefix("data: ") for event in found]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


@pytest.mark.parametrize("together", [True, False])
def test_steps_that_have_come_together_are_written_at_once(
    stream: Stream, tokenizer: Tokenizer, together: bool
) -> None:
    tokens = tokenizer.encode("one two three")
    words = [tokenizer.token_text(token) for token in tokens]

    async def main() -> None:
        await stream.open()
        pieces = []
        for token in tokens:
            stream.step(token, finish="length" if token == tokens[-1] else None)
            if not together:
                pieces.append(events(await anext(stream.pieces)))
        *more, last = [events(piece) async for piece in stream.pieces]
        pieces += more
        assert len(pieces) == (1 if together else len(tokens))
        _, *contents, _ = [event["choices"][0] for piece in pieces for event in piece]
        # Each is still an event of its own, with its own logprobs.
        assert [choice["delta"]["content"] for choice in contents] == words
        logprobs = [choice["logprobs"]["content"] for choice in contents]
        assert [[entry["token"] for entry in each] for each in logprobs] == [[w] for w in words]
        assert last[1:] == ["[DONE]"]

    asyncio.run(main())


@pytest.mark.parametrize("ticks", range(4))
def test_a_reader_cancelled_as_something_arrives_is_cancelled(stream: Stream, ticks: int) -> None:
    async def main() -> None:
        await stream.open()
        reader = asyncio.ensure_future(anext(stream.pieces))
        await asyncio.sleep(0)
        stream.step(40)
        for _ in range(ticks):
            await asyncio.sleep(0)
        # cancel() tells whether it came in time; if so, the cancellation must not get lost.
        if reader.cancel():
            with pytest.raises(asyncio.CancelledError):
                await reader
        else:
            assert reader.result()

    asyncio.run(main())


def test_other_callbacks_run_between_the_outputs_of_a_large_step(context: Context) -> None:
    """And the outputs of a request keep their order, also if the next step comes meanwhile."""

    async def main() -> None:
        streams = [Stream(context) for _ in range(12)]
        got: list[tuple[str, int]] = []
        for each in streams:
            await each.open()
            generation = context.dispatcher.open[f"{each.name}-0"]
            generation.put = lambda _, output: got.append((output.request_id, output.token_ids[0]))  # type: ignore[method-assign]
        steps = [
            [dataclasses.replace(out(40 + n), request_id=f"{each.name}-0") for each in streams]
            for n in range(2)
        ]
        context.dispatcher._dispatch(0.0, steps[0])
        assert 0 < len(got) < len(streams)
        context.dispatcher._dispatch(0.0, steps[1])
        assert len(got) < len(streams)
        while len(got) < 2 * len(streams):
            before = len(got)
            await asyncio.sleep(0)
            assert len(got) <= before + 4
        assert got == [(o.request_id, o.token_ids[0]) for step in steps for o in step]

    asyncio.run(main())


def test_an_output_that_fails_takes_no_other_with_it(context: Context) -> None:
    async def main() -> None:
        broken, sound = Stream(context), Stream(context)
        for each in (broken, sound):
            await each.open()
        generations = [context.dispatcher.open[f"{each.name}-0"] for each in (broken, sound)]
        generations[0].put = None  # type: ignore[method-assign, assignment]
        outputs = [
            dataclasses.replace(out(40, finish="length"), request_id=f"{each.name}-0")
            for each in (broken, sound)
        ]
        context.dispatcher._dispatch(0.0, outputs)
        assert [event async for piece in sound.pieces for event in events(piece)][-1] == "[DONE]"
        with pytest.raises(TypeError):
            await anext(broken.pieces)
        assert not {f"{each.name}-0" for each in (broken, sound)} & context.dispatcher.open.keys()

    asyncio.run(main())
