"""Streams: server-sent events, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_mtp.errors import MlxMtpError
from mlx_mtp.server.answers import Dialect, Head
from mlx_mtp.server.generation import Delta, Generation
from mlx_mtp.server.http_errors import error_body

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` for as long as the client stays; the body must have been read.

    Raises:
        ClientDisconnect: the client left first; `work` has been cancelled.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """One generation as server-sent events.

    Args:
        head: what all chunks have in common.
        dialect: how the endpoint words them.
        include_usage: a usage chunk ends the stream, and the others have a null in its place.
        continuous_usage: they have the usage so far instead.
        keep_alive_seconds: a comment breaks any longer silence.
    """

    def __init__(
        self,
        head: Head,
        dialect: Dialect,
        *,
        include_usage: bool,
        continuous_usage: bool,
        keep_alive_seconds: float,
    ) -> None:
        self._head = head
        self._dialect = dialect
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._keep_alive_seconds = keep_alive_seconds

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The stream's bytes.

        An error before the first of them is raised, so that it can still become an HTTP status; a
        later one is an event of the stream.
        """
        begun = False
        try:
            async for event in self._answer(generation):
                begun = True
                yield event
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, MlxMtpError):
                logger.exception("a stream failed")
            yield _event(error_body(error))
        yield DONE

    async def _answer(self, generation: Generation) -> AsyncIterator[bytes]:
        opened = False
        async for deltas in generation.deltas(self._keep_alive_seconds):
            if not deltas:
                yield KEEP_ALIVE
                continue
            if not opened:
                opened = True
                for index in range(len(generation.choices)):
                    opening = self._dialect.opening(index)
                    if opening is not None:
                        yield self._chunk(generation, opening)
            for delta in deltas:
                if delta.text or delta.tokens:
                    yield self._chunk(generation, self._dialect.chunk(delta))
                if delta.finish_reason is not None:
                    yield self._closing(generation, delta)
        if self._include_usage:
            fields = self._head.fields(self._dialect.chunk_kind, [])
            yield _event(fields | {"usage": generation.usage(), "timings": generation.timings()})

    def _closing(self, generation: Generation, delta: Delta) -> bytes:
        choice = self._dialect.closing(delta)
        if generation.is_finished:
            return self._chunk(generation, choice, timings=generation.timings())
        return self._chunk(generation, choice)

    def _chunk(self, generation: Generation, choice: dict[str, Any], **more: object) -> bytes:
        fields = self._head.fields(self._dialect.chunk_kind, [choice])
        if self._include_usage:
            fields["usage"] = generation.usage() if self._continuous_usage else None
        return _event(fields | more)


class EventStreamResponse(Response):
    """Sends a generation's events; when the client leaves, the generation ends within a step.

    Args:
        open_generation: called when the response is sent, so that a generation never waits unowned.
        stream: makes the events.
    """

    media_type = "text/event-stream"

    def __init__(self, open_generation: Callable[[], Generation], stream: EventStream) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._open_generation = open_generation
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send, until the end or until the client leaves."""
        # After the first byte nobody above could turn a disconnect into anything.
        with self._open_generation() as generation, contextlib.suppress(ClientDisconnect):
            await until_disconnect(receive, self._send(generation, send))

    async def _send(self, generation: Generation, send: Send) -> None:
        started = False
        async for event in self._stream.events(generation):
            if not started:
                # Not earlier: an error before the first event is still an HTTP status.
                start = {"type": "http.response.start", "status": self.status_code}
                await send({**start, "headers": self.raw_headers})
                started = True
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(fields: dict[str, Any]) -> bytes:
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"data: {text}\n\n".encode()
