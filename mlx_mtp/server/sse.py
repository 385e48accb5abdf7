"""Streams: server-sent events, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_mtp.errors import MlxMtpError
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.writer import Writer

logger = logging.getLogger(__name__)

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


async def stream_events(
    generation: Generation, writer: Writer, patience: float
) -> AsyncIterator[bytes]:
    """One generation as server-sent events; those that are told at one time come as one piece.

    An error before the first of them is raised, so that it can still become an HTTP status; a later
    one is an event of the stream.

    Args:
        generation: its answers.
        writer: words them.
        patience: any longer silence is broken, in seconds.
    """
    begun = False
    try:
        async for events in _events(generation, writer, patience):
            begun = True
            yield events
    except Exception as error:
        if not begun:
            raise
        if not isinstance(error, MlxMtpError):
            logger.exception("a stream failed")
        yield b"".join((*writer.failure(error), writer.done))


async def _events(generation: Generation, writer: Writer, patience: float) -> AsyncIterator[bytes]:
    opened = False
    async for deltas in generation.deltas(patience):
        if not deltas:
            yield writer.keep_alive
            continue
        events = [] if opened else [*writer.opening(generation)]
        opened = True
        for delta in deltas:
            events.extend(writer.delta(delta, generation))
        if events:
            yield b"".join(events)
    yield b"".join((*writer.ending(generation), writer.done))


class EventStreamResponse(Response):
    """Sends a generation's events; when the client leaves, the generation ends within a step.

    Args:
        open_generation: called when the response is sent, so that a generation never waits unowned.
        writer: makes the events.
        patience: any longer silence is broken, in seconds.
    """

    media_type = "text/event-stream"

    def __init__(
        self, open_generation: Callable[[], Generation], writer: Writer, patience: float
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._open_generation = open_generation
        self._writer = writer
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send, until the end or until the client leaves."""
        # After the first byte nobody above could turn a disconnect into anything.
        with self._open_generation() as generation, contextlib.suppress(ClientDisconnect):
            await until_disconnect(receive, self._send(generation, send))

    async def _send(self, generation: Generation, send: Send) -> None:
        started = False
        async for events in stream_events(generation, self._writer, self._patience):
            if not started:
                # Not earlier: an error before the first event is still an HTTP status.
                start = {"type": "http.response.start", "status": self.status_code}
                await send({**start, "headers": self.raw_headers})
                started = True
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
