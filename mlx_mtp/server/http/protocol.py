"""HTTP/1.1 by uvicorn and h11, with limits that they lack, and with errors as JSON."""

import asyncio
import re
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from operator import itemgetter
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_mtp import errors
from mlx_mtp.config import ServerConfig
from mlx_mtp.server.http.admission import FULL
from mlx_mtp.server.http.errors import error_response
from mlx_mtp.server.http.middleware import REQUEST_ID, log_request
from mlx_mtp.server.http.record import record_of

MAX_HEADER_BYTES = 16 << 10  # request line and headers; node.js and h11 have the same bound
MAX_HEADERS = 100
# A body may have `FREE_CHUNKS` chunks of any size. Further ones must hold `CHUNK_BYTES` on average,
# as each takes 15 us of the event loop.
FREE_CHUNKS = 1024
CHUNK_BYTES = 256
# After a refusal, the rest of the request is read up to these limits: closing immediately would
# reset the connection before the client has read the response.
LINGER_SECONDS = 2.0
LINGER_BYTES = 16 << 20
WRITE = "mlx_mtp.write"  # key of `LimitedProtocol.write_now` in a request's state
_PIECE = 16 << 10
_CHUNKED = b"\r\nTransfer-Encoding: chunked\r\n"  # as h11 writes it
_BLANK_LINE = re.compile(rb"\n\r?\n")
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]*)([/?].*)?")
# Seconds between probes (`_probe`); each interval is four times the one before.
_FIRST_PROBE, _LAST_PROBE = 0.02, 10.0


class BoundedConnection(h11.Connection):
    """h11's state machine with limits on headers and chunks; raises RemoteProtocolError."""

    _num_chunks = _num_bytes = 0  # of the current body
    _head = b""  # of a response, to be written together with the body's first piece
    sends_chunks = False  # True while the current response is chunked and its body has begun

    def send(self, event: Any) -> Any:
        output = super().send(event)
        if type(event) is h11.Response:
            self._head, self.sends_chunks, output = output, False, b""
        elif self._head and output is not None:
            self.sends_chunks = bool(output) and _CHUNKED in self._head
            self._head, output = b"", self._head + output
        return output

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            self._num_chunks = self._num_bytes = 0
            data = self.trailing_data[0].lstrip(b"\r\n")
            blank = _BLANK_LINE.search(data)
            end = len(data) if blank is None else blank.end()
            if end > MAX_HEADER_BYTES or data.count(b"\n", 0, end) > MAX_HEADERS + 2:
                raise h11.RemoteProtocolError("too many or too long headers", 431)
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_end
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError("the chunks of the body are too small", 400)
        if not isinstance(event, h11.Request):
            return event
        # Refuse headers from which a proxy could read another length (request smuggling).
        names = [name for name, _ in event.headers]
        if event.http_version not in (b"1.0", b"1.1"):
            raise h11.RemoteProtocolError("its version is neither HTTP/1.0 nor HTTP/1.1", 400)
        if b"transfer-encoding" in names:
            if b"content-length" in names:
                message = "Content-Length and Transfer-Encoding exclude each other; send one of"
                raise h11.RemoteProtocolError(f"{message} them", 400)
            if event.http_version == b"1.0":
                raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding", 400)
        if (absolute := _ABSOLUTE.fullmatch(event.target)) is None:
            return event
        # RFC 9112, 3.2.2: the target's host replaces the Host header. The application gets a target
        # that begins with the path.
        host, target = absolute[1], absolute[2] or b"/"
        return h11.Request(
            method=event.method,
            target=target if target.startswith(b"/") else b"/" + target,
            headers=[(name, host if name == b"host" else value) for name, value in event.headers],
            http_version=event.http_version,
        )


class LimitedProtocol(H11Protocol):
    """One connection, with time limits and a limit on the number of connections.

    Beyond `max_connections` an idle or unread connection is closed (`_make_room`); if there is
    none, requests on the new connection get 503.
    """

    def __init__(self, settings: ServerConfig, max_connections: int, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.conn: BoundedConnection = BoundedConnection(h11.SERVER, MAX_HEADER_BYTES)
        self.app_state = {**self.app_state, WRITE: self.write_now}
        self._settings, self._max_connections = settings, max_connections
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._discarded: int | None = None  # bytes read since a refusal; None: no refusal
        self._half_closed = False  # the client has closed its sending side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._settings.parent_keys is None:  # A parent's connections may wait for a request.
            self._start_timer("idle", self._settings.head_timeout, self._end_idle)
        if len(self.connections) > self._max_connections and not self._make_room():
            # uvicorn copies `app_state` to the scope of each request.
            self.app_state = {**self.app_state, FULL: self._max_connections}

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # In pieces: h11 checks the length of an incomplete head only once per call.
        for start in range(0, len(data), _PIECE):
            if self._discarded is not None:
                self._discarded += len(data) - start
                if self._discarded > LINGER_BYTES:
                    self.transport.close()
                break
            super().data_received(data[start : start + _PIECE])
        if self._busy:
            self._stop_timer("idle")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns True if the connection stays open, because the client may wait for an answer."""
        self._half_closed = True
        if self._discarded is not None:
            return False
        # An incomplete request after this one is refused when this one has been answered.
        if self._busy and self.conn.their_state is not h11.SEND_BODY:
            self._probe(_FIRST_PROBE)
            return True
        self._refuse_incomplete()
        return False

    def on_response_complete(self) -> None:
        self._start_timer("idle", self._settings.head_timeout, self._end_idle)
        super().on_response_complete()
        if self._busy:  # The next request has already arrived.
            self._stop_timer("idle")
        elif self._half_closed and self._discarded is None:
            self._refuse_incomplete()
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("stall", self._settings.stall_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("stall")

    def write_now(self, piece: bytes) -> bool:
        """Write a piece of a chunked body that has begun, past h11; return True if it was written.

        Returns False if the client must read first or has left; the application must then `send`.
        """
        is_open = self.conn.our_state is h11.SEND_BODY and self.conn.sends_chunks
        if self.flow.write_paused or not (is_open and piece):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def send_400_response(self, msg: str) -> None:
        cause = sys.exc_info()[1]
        error: errors.RequestError = errors.InvalidRequestError(msg)
        if isinstance(cause, h11.RemoteProtocolError):
            # h11 quotes the client's line, which may contain its API key.
            fault = str(cause).partition(": bytearray")[0]
            error = errors.InvalidRequestError(f"This is not valid HTTP: {fault}.")
            if cause.error_status_hint == errors.HeadersTooLargeError.status:
                most = f"at most {MAX_HEADER_BYTES} bytes and {MAX_HEADERS} headers are allowed"
                message = f"The request line and headers are too large: {most}."
                error = errors.HeadersTooLargeError(message)
        self._refuse_and_close(error)

    def _refuse_incomplete(self) -> None:
        if self._head_begun or self.conn.their_state is h11.SEND_BODY:
            error = errors.InvalidRequestError("The request ended before it was complete.")
            self._refuse_and_close(error)

    def _probe(self, after: float) -> None:
        """Find out if a half-closed client has left: send 100 Continue, which clients skip.

        If the client has closed its socket, its system answers with a reset, which ends the
        connection.
        """
        cycle = self.cycle
        answered = not self._busy or cycle.response_started or self._discarded is not None
        if answered or after > _LAST_PROBE:
            return
        if cycle.scope["http_version"] == "1.0":  # without informational responses
            self.transport.abort()
            return
        going_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        self.transport.write(self.conn.send(going_on) or b"")
        self._start_timer("probe", after, partial(self._probe, 4 * after))

    def _should_upgrade(self) -> bool:
        return False  # There are no WebSockets; the server ignores the Upgrade header.

    @property
    def _head_begun(self) -> bool:
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0].strip())

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_idle(self) -> None:
        if self._head_begun and self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            error = errors.BodyTimeoutError("The request's head did not arrive in time.")
            self._refuse_and_close(error)
        elif self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _make_room(self) -> bool:
        """Close another connection if necessary; return True if there is room for this one.

        Closes the one that has been idle for longest, or else the one whose client has not read
        for longest. Answers of routes that generate are never cut off for this, but others are,
        such as the page's files, which need no key.
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
            and not record_of(cast(Scope, each.cycle.scope)).route.generates
        ]
        if not (idle or unread):
            return False
        min(idle or unread, key=itemgetter(0))[1].transport.abort()
        return True

    def _refuse_and_close(self, error: errors.RequestError) -> None:
        cycle = self.cycle if self._busy else None
        scope: Any = {"client": self.client, "method": "-", "path": "-"}
        record = record_of(scope if cycle is None else cast(Scope, cycle.scope))
        answer = error_response(error, headers={"Connection": "close", REQUEST_ID: record.id})
        reason = HTTPStatus(error.status).phrase.encode()
        head = h11.Response(status_code=error.status, headers=answer.raw_headers, reason=reason)
        try:
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            self.transport.close()  # A response has begun: the error would become a part of it.
            return
        record.status, record.reason = error.status, str(error)
        if cycle is None:
            log_request(scope)
        else:  # Wake the application, which waits for the body: it ends and logs the request.
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
        self._discarded = 0
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
