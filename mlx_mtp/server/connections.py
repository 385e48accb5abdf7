"""Connections that hold something and give nothing: slow heads, stalled readers, crowds.

uvicorn's own protocol waits for ever for a request's head, for a body that the application no
longer reads, and for a client to take its answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import h11
from starlette.types import Receive, Scope, Send

from mlx_mtp.errors import BodyTimeoutError, ConnectionLimitError
from mlx_mtp.server.gate import UNKNOWN_RETRY_SECONDS, Gate
from mlx_mtp.server.http_errors import error_response
from mlx_mtp.server.http_protocol import BoundedProtocol


@dataclass(frozen=True, slots=True)
class Limits:
    """What a connection may do.

    Args:
        connections: most at once.
        head_seconds: from its begin, or from the answer before, to the end of a request's head.
        stall_seconds: a client must take the bytes that wait for it (64 KiB at most) in this time.
    """

    connections: int
    head_seconds: float
    stall_seconds: float


class LimitedProtocol(BoundedProtocol):
    """One connection. Its request is a client's turn; between two of them it is idle.

    When there are too many connections, the one that has been idle for longest goes; when all are
    busy, the new one's request is answered with 503.
    """

    limits: Limits
    gate: Gate

    _idle_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _idle_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._become_idle()
        if len(self.connections) > self.limits.connections and not self._evict():
            self.app = self._refuse

    def data_received(self, data: bytes) -> None:
        """Some of a head or of a body."""
        super().data_received(data)
        if self._busy:
            self._become_busy()

    def on_response_complete(self) -> None:
        """An answer has been handed over; the client has some time to begin the next request."""
        self._become_idle()
        # This may begin the next request, if it has come already.
        super().on_response_complete()
        if self._busy:
            self._become_busy()

    def pause_writing(self) -> None:
        """The client takes its answer slower than it is made."""
        super().pause_writing()
        self._cancel("_stall_timer")
        self._stall_timer = self.loop.call_later(self.limits.stall_seconds, self._abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._cancel("_stall_timer")

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left, or was made to."""
        self._cancel("_idle_timer")
        self._cancel("_stall_timer")
        super().connection_lost(exc)

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _become_busy(self) -> None:
        self._cancel("_idle_timer")
        self._idle_since = None

    def _become_idle(self) -> None:
        self._cancel("_idle_timer")
        self._idle_since = self.loop.time()
        self._idle_timer = self.loop.call_later(self.limits.head_seconds, self._end_idle)

    def _end_idle(self) -> None:
        """No head, or not all of it; a body that nobody wants, or an answer that nobody takes."""
        self._idle_timer = None
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if begun and self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            self._answer_and_close(BodyTimeoutError("The request's head did not arrive in time."))
        elif self.transport.get_write_buffer_size():
            self._abort()
        else:
            self.transport.close()

    def _evict(self) -> bool:
        """End the connection that has been idle for longest, if there is one but this."""
        others = [c for c in self.connections if c is not self and isinstance(c, LimitedProtocol)]
        idle = [c for c in others if c._idle_since is not None and not c.transport.is_closing()]
        if not idle:
            return False
        min(idle, key=lambda c: c._idle_since or 0.0).transport.abort()
        return True

    def _abort(self) -> None:
        # close() would wait for the client to take what is left.
        self.transport.abort()

    def _cancel(self, name: str) -> None:
        timer = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.gate.rejected["connections"] += 1
        error = ConnectionLimitError(
            f"{self.limits.connections} clients are connected and busy; there is no room for more.",
            retry_after=UNKNOWN_RETRY_SECONDS,
        )
        await error_response(error, scope["path"])(scope, receive, send)


def limited(limits: Limits, gate: Gate) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn with these limits."""
    return type("Limited", (LimitedProtocol,), {"limits": limits, "gate": gate})
