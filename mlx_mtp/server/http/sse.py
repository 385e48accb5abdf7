"""Generated answers over HTTP: whole, or as server-sent events, while the client stays."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from mlx_mtp.errors import MlxMtpError
from mlx_mtp.logs import Later
from mlx_mtp.server.context import context_of
from mlx_mtp.server.generation.writer import Writer, packed_slowly
from mlx_mtp.server.http.record import client_of, record_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
StoreAnswer = Callable[[dict[str, Any]], Awaitable[None]]
"""Called with the whole answer at its end, streamed or not."""


async def respond(request: Request, writer: Writer, keep: StoreAnswer | None = None) -> Response:
    """Run a generation while the client stays, and return the answer that the writer makes."""
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


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` while the client stays; raises ClientDisconnect when it leaves."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _collect_response(writer: Writer, patience: float) -> dict[str, Any]:
    async for deltas in writer.generation.deltas(patience):
        writer.read(deltas)
    return await _written(writer, writer.whole)


async def _written(writer: Writer, write: Callable[[], T]) -> T:
    return await asyncio.to_thread(write) if writer.slow else write()


async def stream_events(
    writer: Writer, patience: float, keep: StoreAnswer | None = None
) -> AsyncIterator[bytes]:
    """Yield a generation as server-sent events; events of one moment are one piece.

    An error before the first event is raised, as it can still become an HTTP status; a later one
    becomes an event. After each `patience` seconds without events a keep-alive is sent.
    """
    begun = False
    try:
        async for deltas in writer.generation.deltas(patience):
            if not deltas:
                begun = True
                yield writer.keep_alive
                continue
            events = await _written(writer, partial(writer.read, deltas))
            if events:
                begun = True
                yield b"".join(events)
        if keep is not None:
            # Before the client reads the end: from then on it may ask for the stored answer.
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
        self._events = stream_events(writer, patience, keep)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Nobody is left to answer when the client has disconnected.
        with self._generation, contextlib.suppress(ClientDisconnect):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        # The head waits for the first event: until then an error is still an HTTP status.
        start: Message | None = {"type": "http.response.start", "status": self.status_code}
        async for events in self._events:
            if start is not None:
                await send({**start, "headers": self.raw_headers})
                start = None
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
