"""Between the engine's thread and the event loop: one call per step."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.errors import EngineStoppedError, MlxMtpError

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine
    from mlx_mtp.server.generation import Generation


class Dispatcher:
    """Starts and stops the engine, and passes each of its outputs to the request's generation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[str, Generation] = {}
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
        for generation in set(self._open.values()):
            generation.fail(EngineStoppedError("The server is shutting down."))

    def submit(self, requests: Sequence[Request], generation: Generation) -> None:
        """Submit sequences; all of them, or none and an error.

        Raises:
            RequestError, EngineError: as `Engine.submit` does.
        """
        try:
            for request in requests:
                self._open[request.request_id] = generation
                self._engine.submit(request)
        except BaseException:
            self.cancel(request.request_id for request in requests)
            raise

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Free the rows of those sequences that have not ended."""
        for request_id in request_ids:
            if self._open.pop(request_id, None) is not None:
                self._engine.cancel(request_id)

    def engine_failure(self) -> MlxMtpError | None:
        """The error that requests end with when the engine can't serve them any more."""
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
            generation = self._open.get(output.request_id)
            if generation is not None:
                if output.finish_reason is not None:
                    del self._open[output.request_id]
                generation.put(at, output)
