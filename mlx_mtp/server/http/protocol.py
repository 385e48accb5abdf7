"""HTTP/1.1 as uvicorn speaks it with h11, with the limits that it lacks and with errors as JSON."""

import asyncio
import re
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from operator import itemgetter
from typing import Any, cast

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_mtp import errors
from mlx_mtp.config import ServerConfig
from mlx_mtp.server.http.admission import RequestLimiter
from mlx_mtp.server.http.errors import error_response
from mlx_mtp.server.http.request_log import REQUEST_ID, log_request, record_of

MAX_HEADER_BYTES = 16 << 10  # Request line and headers; node.js and h11 have the same bound.
MAX_HEADERS = 100
# Chunks of a body that may be of any size; further ones must hold `CHUNK_BYTES` on average, as each
# costs 15 us of the event loop.
FREE_CHUNKS = 1024
CHUNK_BYTES = 256
# What is read of the rest of a rejected request, so that its client gets to read the response.
LINGER_SECONDS = 2.0
LINGER_BYTES = 16 << 20
_PIECE = 16 << 10
_BLANK_LINE = re.compile(rb"\n\r?\n")
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]*)([/?].*)?")
# Seconds after a client has said that it sends no more: see `_probe`.
_FIRST_PROBE, _LAST_PROBE = 0.02, 10.0
_SHORT = frozenset({"/health", "/metrics"})  # answered when all connections are busy, too


class BoundedConnection(h11.Connection):
    """h11's state machine, with limits for headers and chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._chunks = self._bytes = 0

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            self._chunks = self._bytes = 0
            self._check_head()
        event = super().next_event()
        if isinstance(event, h11.Request):
            return _one_meaning(event)
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_end
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError("the chunks of the body are too small", 400)
        return event

    def _check_head(self) -> None:
        data = self.trailing_data[0].lstrip(b"\r\n")
        blank = _BLANK_LINE.search(data)
        end = len(data) if blank is None else blank.end()
        if end > MAX_HEADER_BYTES or data.count(b"\n", 0, end) > MAX_HEADERS + 2:
            raise h11.RemoteProtocolError("too many or too long headers", 431)


def _one_meaning(request: h11.Request) -> h11.Request:
    """The request, if no proxy can take it for another one; its target begins with the path."""
    names = [name for name, _ in request.headers]
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError("its version is neither HTTP/1.0 nor HTTP/1.1", 400)
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            message = "Content-Length and Transfer-Encoding exclude each other; send one of them"
            raise h11.RemoteProtocolError(message, 400)
        if request.http_version == b"1.0":
            raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding", 400)
    absolute = _ABSOLUTE.fullmatch(request.target)
    if absolute is None:
        return request
    # RFC 9112, 3.2.2: the target's host counts, not the header's.
    host, target = absolute[1], absolute[2] or b"/"
    headers = [(name, host if name == b"host" else value) for name, value in request.headers]
    return h11.Request(
        method=request.method,
        target=target if target.startswith(b"/") else b"/" + target,
        headers=headers,
        http_version=request.http_version,
    )


class LimitedProtocol(H11Protocol):
    """One connection; of too many, the longest idle is closed, or the new one gets a 503."""

    def __init__(
        self, settings: ServerConfig, limiter: RequestLimiter, most: int, **of_uvicorn: Any
    ) -> None:
        super().__init__(**of_uvicorn)
        self.conn = BoundedConnection()
        self._settings, self._limiter, self._max_connections = settings, limiter, most
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._dropped: int | None = None  # bytes that were read after the last response
        self._ended = False  # the client sends no more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer("idle", self._settings.head_timeout, self._end_idle)
        if len(self.connections) > self._max_connections and not self._make_room():
            self._app, self.app = self.app, self._reject

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # In pieces: h11 looks at the length of what is incomplete only between two of them.
        for start in range(0, len(data), _PIECE):
            if self._dropped is not None:
                self._dropped += len(data) - start
                if self._dropped > LINGER_BYTES:
                    self.transport.close()
                break
            super().data_received(data[start : start + _PIECE])
        self._update_busy()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: the client may have left, or wait for its answer."""
        self._ended = True
        if self._dropped is not None:
            return False
        # What is incomplete behind a request is seen when that has been answered.
        if self._busy and self.conn.their_state is not h11.SEND_BODY:
            self._probe(_FIRST_PROBE)
            return True
        self._answer_half_a_request()
        return False

    def on_response_complete(self) -> None:
        self._start_timer("idle", self._settings.head_timeout, self._end_idle)
        super().on_response_complete()
        self._update_busy()  # The next request may have arrived already.
        if self._ended and not self._busy and self._dropped is None:
            self._answer_half_a_request()
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("stall", self._settings.stall_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("stall")

    def send_400_response(self, msg: str) -> None:
        cause = sys.exc_info()[1]
        error: errors.RequestError = errors.InvalidRequestError(msg)
        if isinstance(cause, h11.RemoteProtocolError):
            # h11 quotes the client's own line, which may hold its key.
            what = str(cause).partition(": bytearray")[0]
            error = errors.InvalidRequestError(f"This is not valid HTTP: {what}.")
            if cause.error_status_hint == errors.HeadersTooLargeError.status:
                most = f"at most {MAX_HEADER_BYTES} bytes and {MAX_HEADERS} headers are allowed"
                message = f"The request line and headers are too large: {most}."
                error = errors.HeadersTooLargeError(message)
        self._answer_and_close(error)

    def _answer_half_a_request(self) -> None:
        if self._head_begun or self.conn.their_state is h11.SEND_BODY:
            error = errors.InvalidRequestError("The request ended before it was complete.")
            self._answer_and_close(error)

    def _probe(self, after: float) -> None:
        """Write something that clients skip: the system of one that has left hangs up on it."""
        # That it has hung up is known at the next write.
        cycle = self.cycle
        answered = not self._busy or cycle.response_started or self._dropped is not None
        if answered or after > _LAST_PROBE:
            return
        if cycle.scope["http_version"] == "1.0":  # which knows nothing of the kind
            self.transport.abort()
            return
        going_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        self.transport.write(self.conn.send(going_on) or b"")
        self._start_timer("probe", after, partial(self._probe, 4 * after))

    def _should_upgrade(self) -> bool:
        return False  # There are no web sockets here; the request is answered as what it is.

    @property
    def _head_begun(self) -> bool:
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0].strip())

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _update_busy(self) -> None:
        if self._busy:
            self._stop_timer("idle")

    def _end_idle(self) -> None:
        if self._head_begun and self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            error = errors.BodyTimeoutError("The request's head did not arrive in time.")
            self._answer_and_close(error)
        elif self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest, if all others are still open.

        If none is idle, the one whose client has not read for longest, unless it is an answer that
        is generated for it: the page's files need no key.
        """
        others = [each for each in self.connections if isinstance(each, LimitedProtocol)]
        others = [each for each in others if not (each is self or each.transport.is_closing())]
        if len(others) < self._max_connections:
            return True
        idle = [(each._timers["idle"].when(), each) for each in others if "idle" in each._timers]
        unread = [
            (each._timers["stall"].when(), each)
            for each in others
            if "stall" in each._timers
            and record_of(cast(Scope, each.cycle.scope)).generation is None
        ]
        if not (idle or unread):
            return False
        min(idle or unread, key=itemgetter(0))[1].transport.abort()
        return True

    async def _reject(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].rstrip("/") in _SHORT:
            await self._app(scope, receive, send)
            return
        self._limiter.rejected["connections"] += 1
        most = self._max_connections
        message = f"{most} clients are connected and busy; there is no room for more."
        error = errors.ConnectionLimitError(message, retry_after=errors.UNKNOWN_RETRY_SECONDS)
        record = record_of(scope)
        record.status, record.reason = error.status, str(error)
        log_request(scope)
        headers = {REQUEST_ID: record.id}
        await error_response(error, scope["path"], headers)(scope, receive, send)

    def _answer_and_close(self, error: errors.RequestError) -> None:
        cycle = self.cycle if self._busy else None
        scope: Any = {"client": self.client, "method": "-", "path": "-"}
        record = record_of(scope if cycle is None else cast(Scope, cycle.scope))
        answer = error_response(error, "", {"Connection": "close", REQUEST_ID: record.id})
        reason = HTTPStatus(error.status).phrase.encode()
        head = h11.Response(status_code=error.status, headers=answer.raw_headers, reason=reason)
        try:
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            self.transport.close()  # A response had begun: what follows would be a part of it.
            return
        record.status, record.reason = error.status, str(error)
        if cycle is None:
            log_request(scope)
        else:  # If the application reads the body, it writes the line when it gives up.
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False  # It is too late for that.
            cycle.message_event.set()
        self._dropped = 0
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._start_timer("linger", LINGER_SECONDS, self.transport.close)

    def _start_timer(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, act)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()
