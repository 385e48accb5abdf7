"""Formats an answer for its API, whole or as a stream, and sends it to the client."""

import asyncio
import contextlib
import json
import logging
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from mlx_mtp.errors import MlxMtpError
from mlx_mtp.logs import Later
from mlx_mtp.server.context import context_of
from mlx_mtp.server.generation.generation import Generation
from mlx_mtp.server.generation.job import Job
from mlx_mtp.server.http.body import until_disconnect
from mlx_mtp.server.http.record import client_of, record_of
from mlx_mtp.text.parsing import events
from mlx_mtp.text.stream import Delta

logger = logging.getLogger(__name__)

T = TypeVar("T")
StoreAnswer = Callable[[dict[str, Any]], Awaitable[None]]
"""Called with the whole answer when it is complete, whether it was streamed or not."""
BlockKind = Literal["text", "reasoning", "call"]
BlockState = Literal["open", "complete", "cut"]
_KINDS: Mapping[type, BlockKind]
_KINDS = {events.Text: "text", events.Reasoning: "reasoning", events.ToolArguments: "call"}
Content = events.Text | events.Reasoning | events.ToolArguments


@dataclass(slots=True)
class Block:
    """A run of text, a run of reasoning or one tool call of a choice, as generated so far."""

    kind: BlockKind
    choice: int
    id: str = ""
    name: str = ""  # the function that a call is for
    number: int = 0  # index of a call among the choice's calls
    pieces: list[str] = field(default_factory=list)  # text, or the JSON text of a call's arguments
    tokens: list[events.OutputToken] = field(default_factory=list)  # if logprobs were asked for
    state: BlockState = "open"
    raw: str = ""  # a cut call as the model wrote it

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Writer(ABC):
    """Formats one answer: `write_deltas` adds deltas to blocks and returns a stream's events.

    A stream consists of the events of `opening`; `prompt_progress`; `block_start`, `block_delta`,
    `block_stop`; `choice_end`; and `ending` or `failure`. `whole` is the answer as one object.
    """

    media_type = "text/event-stream"
    keep_alive = b": keep-alive\n\n"  # sent when there have been no events for a while
    done = b""  # ends every stream
    prefixes: ClassVar[Mapping[BlockKind, str]] = {}  # of block ids
    cut_calls_are_text = False  # True if `whole` needs arguments that are a complete object
    record = True  # whether blocks keep their content, for `whole`
    slow = False  # whether the answer is formatted on a thread, not on the event loop

    def __init__(self, job: Job[Any], generation: Generation) -> None:
        self.answer_id, self.body, self.params = job.answer_id, job.body, job.params
        self.generation, self.streams = generation, job.body.stream
        self.tokenizer = job.context.tokenizer
        self.with_logprobs = job.params.top_logprobs is not None
        self.blocks: defaultdict[int, list[Block]] = defaultdict(list)  # by choice
        self._opened = False

    def write_deltas(self, deltas: Sequence[Delta]) -> list[bytes]:
        """Add deltas to the blocks; returns their events, [] if the answer isn't streamed."""
        written: list[bytes] = []
        if self.streams and not self._opened:
            self._opened = True
            written += self.opening()
        for delta in deltas:
            if delta.progress is not None and self.streams:
                written += self.prompt_progress(delta.index, delta.progress)
            for event in delta.events:
                match event:
                    case events.ToolStart():
                        written += self._start(delta, "call", name=event.name, number=event.call)
                    case events.ToolEnd():
                        written += self._stop(delta, "complete")
                    case events.ToolCut():
                        written += self._stop(delta, "cut", event.text)
                    case _:
                        written += self._extend(delta, _KINDS[type(event)], event)
            if delta.finish_reason is not None:
                state: BlockState = "cut" if delta.finish_reason == "length" else "complete"
                written += self._stop(delta, state)
                if self.streams:
                    written += self.choice_end(delta)
        return written

    def whole_blocks(self, choice: int) -> list[Block]:
        """Returns copies of a choice's blocks, adjacent texts joined.

        If `cut_calls_are_text`, cut calls are texts.
        """
        blocks: list[Block] = []
        for block in self.blocks[choice]:
            if self.cut_calls_are_text and block.kind == "call" and block.state == "cut":
                pieces = [block.raw or block.text]
                block = replace(block, kind="text", pieces=pieces, state="complete")
            if blocks and blocks[-1].kind == block.kind == "text":
                blocks[-1].pieces += block.pieces
                blocks[-1].tokens += block.tokens
            else:
                blocks.append(replace(block, pieces=[*block.pieces], tokens=[*block.tokens]))
        return blocks

    def _open(self, choice: int) -> Block | None:
        blocks = self.blocks[choice]
        return blocks[-1] if blocks and blocks[-1].state == "open" else None

    def _extend(self, delta: Delta, kind: BlockKind, content: Content) -> list[bytes]:
        written: list[bytes] = []
        block = self._open(delta.index)
        if block is None or block.kind != kind:
            written = self._start(delta, kind)
            block = self.blocks[delta.index][-1]
        if self.record:
            block.pieces.append(content.text)
            block.tokens += getattr(content, "tokens", ())
        return written + self.block_delta(block, content) if self.streams else []

    def _start(self, delta: Delta, kind: BlockKind, **fields: Any) -> list[bytes]:
        written = self._stop(delta, "complete")
        block_id = self.prefixes[kind] + uuid.uuid4().hex[:24] if kind in self.prefixes else ""
        block = Block(kind, delta.index, block_id, **fields)
        self.blocks[delta.index].append(block)
        return written + self.block_start(block) if self.streams else []

    def _stop(self, delta: Delta, state: BlockState, raw: str = "") -> list[bytes]:
        block = self._open(delta.index)
        if block is None:
            return []
        block.state, block.raw = state, raw
        return self.block_stop(block) if self.streams else []

    def opening(self) -> list[bytes]:
        return []

    def prompt_progress(self, choice: int, fields: Mapping[str, int]) -> list[bytes]:
        return []

    def block_start(self, block: Block) -> list[bytes]:
        return []

    @abstractmethod
    def block_delta(self, block: Block, content: Content) -> list[bytes]: ...

    def block_stop(self, block: Block) -> list[bytes]:
        return []

    def choice_end(self, delta: Delta) -> list[bytes]:
        return []

    @abstractmethod
    def ending(self) -> list[bytes]: ...

    @abstractmethod
    def failure(self, error: Exception) -> list[bytes]: ...

    @abstractmethod
    def whole(self) -> dict[str, Any]: ...


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
packed_json = _encoder.encode


def packed_slowly(value: Any) -> str:
    """Returns the same as `packed_json`, but lets other threads run meanwhile."""
    return "".join(_encoder.iterencode(value))


async def respond_packed(request: Request, size: int, content: Callable[[], str]) -> Response:
    """Returns a response with the JSON from `content`, about `size` characters.

    `content` runs on a thread, in the client's turn. Raises ClientDisconnect.
    """
    client, packing = client_of(request.scope), context_of(request).limiter.packing
    work = packing.run_by_size(size, client, content)
    return Response(await until_disconnect(request.receive, work), media_type="application/json")


def event(fields: dict[str, Any], name: str | None = None) -> bytes:
    """Returns the bytes of a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {packed_json(fields)}\n\n".encode()


async def respond(request: Request, writer: Writer, keep: StoreAnswer | None = None) -> Response:
    """Returns the response with the writer's answer; a disconnect cancels the generation.

    `keep` stores the answer. Raises ClientDisconnect or the error that ended the generation.
    """
    context, record = context_of(request), record_of(request.scope)
    patience = context.config.keep_alive_seconds
    record.id, record.generation = writer.answer_id, writer.generation
    for prompt in writer.generation.prompts if context.config.log_prompts else ():
        text = Later(partial(context.tokenizer.text_of, prompt))
        logger.info("%(id)s: the prompt is %(prompt)s", {"id": record.id, "prompt": text})
    if writer.streams:
        return _EventStream(writer, patience, keep)
    with writer.generation:
        answer = await until_disconnect(request.receive, _collect_response(writer, patience))
    if keep is not None:
        await keep(answer)
    if not writer.slow:
        return JSONResponse(answer)
    client = client_of(request.scope)
    content = await context.limiter.packing.run(client, partial(packed_slowly, answer))
    return Response(content, media_type="application/json")


async def _collect_response(writer: Writer, patience: float) -> dict[str, Any]:
    async for deltas in writer.generation.deltas(patience):
        writer.write_deltas(deltas)
    return await _written(writer, writer.whole)


async def _written(writer: Writer, write: Callable[[], T]) -> T:
    return await asyncio.to_thread(write) if writer.slow else write()


async def stream_events(
    writer: Writer, patience: float, keep: StoreAnswer | None = None
) -> AsyncIterator[bytes]:
    """Yields a generation as server-sent events; events of the same moment form one piece.

    An error before the first event is raised, as it can still become an HTTP status; a later error
    becomes an event. After each `patience` seconds without events a keep-alive is sent.
    """
    begun = False
    try:
        async for deltas in writer.generation.deltas(patience):
            if not deltas:
                begun = True
                yield writer.keep_alive
                continue
            if piece := b"".join(await _written(writer, partial(writer.write_deltas, deltas))):
                begun = True
                yield piece
        if keep is not None:
            # Before the client reads the end of the stream: then it may ask for the stored answer.
            await keep(await _written(writer, writer.whole))
        yield b"".join((*writer.ending(), writer.done))
    except Exception as error:
        writer.generation.fail(error)
        if not begun:
            raise
        if not isinstance(error, MlxMtpError):
            logger.exception("a stream failed")
        yield b"".join((*writer.failure(error), writer.done))


class _EventStream(Response):
    def __init__(self, writer: Writer, patience: float, keep: StoreAnswer | None) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=writer.media_type)
        del self.headers["content-length"]
        self._generation = writer.generation
        self._pieces = stream_events(writer, patience, keep)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Nobody is left to answer when the client has disconnected.
        with self._generation, contextlib.suppress(ClientDisconnect):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        # The response's head waits for the first event: until then an error can become a status.
        start: Message | None = {"type": "http.response.start", "status": self.status_code}
        async for piece in self._pieces:
            if start is not None:
                await send({**start, "headers": self.raw_headers})
                start = None
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
