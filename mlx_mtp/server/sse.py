"""Streams: server-sent events, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlx_mtp.errors import MlxMtpError
from mlx_mtp.server.collect import Collector
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.writer import Writer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Keep = Callable[[dict[str, Any]], None]
"""Gets the JSON of a whole answer."""


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
    generation: Generation, writer: Writer, patience: float, keep: Keep | None = None
) -> AsyncIterator[bytes]:
    """One generation as server-sent events; those that have come together are one piece.

    An error before the first of them is raised, so that it can still become an HTTP status; a later
    one is an event of the stream.

    Args:
        generation: its answers, submitted.
        writer: words them.
        patience: any longer silence is broken, in seconds.
        keep: gets the whole answer at its end.
    """
    begun = opened = False
    collector = Collector(len(generation.streams))
    try:
        async for deltas in generation.deltas(patience):
            if not deltas:
                begun = True
                yield writer.keep_alive
                continue
            events = [] if opened else [*writer.opening(generation)]
            opened = True
            for delta in deltas:
                events += writer.delta(delta, generation)
                if keep is not None:
                    collector.add(delta)
            if events:
                begun = True
                yield b"".join(events)
        if keep is not None:
            # Before the client can know the end: from then on it may ask for the answer.
            keep(writer.whole(collector.answers(), generation))
        yield b"".join((*writer.ending(generation), writer.done))
    except Exception as error:
        if not begun:
            raise
        if not isinstance(error, MlxMtpError):
            logger.exception("a stream failed")
        yield b"".join((*writer.failure(error), writer.done))


class EventStreamResponse(Response):
    """Sends a generation's events; when the client leaves, the generation ends within a step.

    The generation is submitted when the response is sent, so that none runs without a reader. The
    arguments are those of `stream_events`.
    """

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, writer: Writer, patience: float, keep: Keep | None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._events = stream_events(generation, writer, patience, keep)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # After the first byte nobody above could turn a disconnect into anything.
        with self._generation, contextlib.suppress(ClientDisconnect):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        # Not before the first event: until then an error is still an HTTP status.
        start: Message | None = {"type": "http.response.start", "status": self.status_code}
        async for events in self._events:
            if start is not None:
                await send({**start, "headers": self.raw_headers})
                start = None
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
