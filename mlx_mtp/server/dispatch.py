"""Between the engine's thread and the event loop: one call per step, then one inbox per request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.errors import EngineStoppedError, MlxMtpError

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine


class Inbox:
    """The outputs of one HTTP request's sequences, in the order in which they came.

    Args:
        find_error: the error to end with when nothing has arrived; None while the engine works.
    """

    def __init__(self, find_error: Callable[[], MlxMtpError | None]) -> None:
        self._find_error = find_error
        self._arrived: list[tuple[float, RequestOutput]] = []
        self._error: MlxMtpError | None = None
        self._wakeup = asyncio.Event()

    async def receive(self, timeout: float) -> list[tuple[float, RequestOutput]]:
        """All that has arrived, each with its time; nothing after `timeout` seconds of silence.

        Raises:
            MlxMtpError: the engine died or is being stopped.
        """
        if self._error is None:
            # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that comes with
            # the wakeup, and a client that left would be answered for ever.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._wakeup.wait()
        self._wakeup.clear()
        arrived, self._arrived = self._arrived, []
        if not arrived:
            # What has arrived is sent first; the error follows.
            self._error = self._error or self._find_error()
            if self._error is not None:
                raise self._error
        return arrived

    def put(self, at: float, output: RequestOutput) -> None:
        """An output has arrived (on the event loop)."""
        self._arrived.append((at, output))
        self._wakeup.set()

    def fail(self, error: MlxMtpError) -> None:
        """Nothing more will come."""
        self._error = error
        self._wakeup.set()


class Dispatcher:
    """Starts and stops the engine, and passes each of its outputs to the request's inbox."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inboxes: dict[str, Inbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the engine; call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._engine.start(self._deliver)

    async def stop(self, timeout: float | None = None) -> None:
        """Stop the engine, waiting for so many seconds, and end what is still waiting for it."""
        # Joining the engine's thread takes up to a step, and its last outputs need this loop.
        await asyncio.to_thread(self._engine.stop, timeout)
        self.end_all()

    def end_all(self) -> None:
        """End every open request with an error, because the server is stopping."""
        for inbox in set(self._inboxes.values()):
            inbox.fail(EngineStoppedError("The server is shutting down."))

    def open(self, requests: Sequence[Request]) -> Inbox:
        """Submit sequences; all of them, or none and an error.

        Raises:
            RequestError, EngineError: as `Engine.submit` does.
        """
        inbox = Inbox(self._engine_failure)
        try:
            for request in requests:
                self._inboxes[request.request_id] = inbox
                self._engine.submit(request)
        except BaseException:
            self.cancel(request.request_id for request in requests)
            raise
        return inbox

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Free the rows of those sequences that have not ended."""
        for request_id in request_ids:
            if self._inboxes.pop(request_id, None) is not None:
                self._engine.cancel(request_id)

    def _engine_failure(self) -> MlxMtpError | None:
        if self._engine.healthy:
            return None
        return EngineStoppedError(f"The engine has stopped: {self._engine.unhealthy_reason}")

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        assert self._loop is not None, "the engine delivers only after start()"
        # On the engine's thread. The loop may have been closed by force.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._dispatch, time.perf_counter(), outputs)

    def _dispatch(self, at: float, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                if output.finish_reason is not None:
                    del self._inboxes[output.request_id]
                inbox.put(at, output)
