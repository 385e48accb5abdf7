"""HTTP/1.1 by uvicorn and httptools, with limits that they lack, and with errors as JSON."""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from httptools import HttpParserCallbackError, HttpParserError, HttpRequestParser
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from mlx_mtp import errors
from mlx_mtp.config import ServerConfig
from mlx_mtp.server.http.admission import FULL
from mlx_mtp.server.http.errors import error_response
from mlx_mtp.server.http.middleware import REQUEST_ID, log_request
from mlx_mtp.server.http.record import record_of

MAX_HEADER_BYTES = 16 << 10  # request line and headers; node.js has the same bound
MAX_HEADERS = 100
# The sizes, extensions and trailers of chunks may have `MAX_HEADER_BYTES` more bytes than the
# data's divided by `FRAMING`, as each chunk takes time of the event loop.
FRAMING = 16
# The rest of a refused request is read up to these limits, as closing would lose the response.
LINGER_SECONDS = 2.0
LINGER_BYTES = 16 << 20
WRITE = "mlx_mtp.write"  # key of `LimitedProtocol.write_now` in a request's state
_MOST = f"at most {MAX_HEADER_BYTES} bytes and {MAX_HEADERS} headers are allowed"
_TOO_LARGE = f"The request line, the headers, or what surrounds the chunks are too large: {_MOST}."
_BLANK_LINE = re.compile(rb"\n\r?\n")
_END = b"\r\n\r\n"  # of the chunks of a body
# llhttp also takes other protocols, and reads no HTTP after CONNECT and after headers of upgrades.
_REQUEST_LINE = re.compile(rb"(?!CONNECT )[!-~]+ (?:/|https?://)[!\"$-~]* HTTP/1\.[01]\r\n", re.I)
_ABSOLUTE = re.compile(rb"https?://([^/?]*)/?(.*)", re.I)
_UPGRADE = re.compile(rb"\nUpgrade:", re.I)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_PROBE, _LAST_PROBE = 0.02, 10.0  # seconds between probes, each time four times as many


class LimitedProtocol(HttpToolsProtocol):
    """One connection, with time limits and a limit on the number of connections.

    The parser gets a request's head as a whole, and the next request once this one is answered.
    Beyond `max_connections` an idle or unread connection is closed (`_make_room`); if there is
    none, requests on the new connection get 503.
    """

    def __init__(self, settings: ServerConfig, max_connections: int, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.app_state = {**self.app_state, WRITE: self.write_now}
        self._settings, self._max_connections = settings, max_connections
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._unread = bytearray()  # what the parser has not got yet
        self._left: int | None = 0  # bytes of the body that have not come; None: it has chunks
        self._tail, self._framing = b"", 0  # of chunks: the last bytes; see `FRAMING`
        self._head: bytes | None = None  # of the response, until it is sent; then empty
        self._discarded: int | None = None  # bytes read since a refusal; None: no refusal
        self._busy = False  # a request has begun, and its response is not complete
        self._half_closed = False  # the client has closed its sending side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._settings.parent_keys is None:  # A parent's connections may wait for a request.
            self._start_timer("idle", self._settings.head_timeout, self._end_idle)
        if len(self.connections) > self._max_connections and not self._make_room():
            self.app_state = {**self.app_state, FULL: self._max_connections}  # uvicorn copies it.

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self.close()
            return
        if self.transport.is_closing():
            return
        self._unread += data
        try:
            while self._unread and (end := self._next_end()):
                piece = bytes(self._unread[:end])
                del self._unread[:end]
                self.parser.feed_data(piece)
        except HttpParserError as error:
            # The context is what a callback raised.
            fault = error.__context__ if isinstance(error, HttpParserCallbackError) else error
            if not isinstance(fault, HttpParserError):
                raise
            self._refuse_and_close(errors.InvalidRequestError(f"This is not valid HTTP: {fault}."))
        except errors.HeadersTooLargeError as error:
            self._refuse_and_close(error)
        if self._busy:
            self._stop_timer("idle")
        if self._half_closed and self._discarded is None and not (self._busy and self._left == 0):
            self._refuse_incomplete()
            self.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns True if the connection stays open, because the client may wait for an answer."""
        self._half_closed = True
        # An incomplete request after this one is refused when this one has been answered.
        if self._busy and self._left == 0 and self._discarded is None:
            self._probe(_FIRST_PROBE)
            return True
        self._refuse_incomplete()
        return False

    def _next_end(self) -> int:
        """Returns how many bytes of `_unread` the parser gets next; 0: it must wait."""
        unread = self._unread
        if self._left is None:
            if self._framing > MAX_HEADER_BYTES:
                raise errors.HeadersTooLargeError(_TOO_LARGE)
            before, found, _ = (self._tail + unread[:MAX_HEADER_BYTES]).partition(_END)
            data = before + found
            end, self._tail = len(data) - len(self._tail), data[-3:]
            self._framing += end + FRAMING * bool(found)  # A piece takes time like a chunk.
        elif self._left > 0:
            end = min(self._left, len(unread))
            self._left -= end
        elif self._busy:
            self.flow.pause_reading()
            return 0
        else:
            blank = _BLANK_LINE.search(unread)
            end = len(unread) if blank is None else blank.end()
            of_parent = 1 if self._settings.parent_keys is None else 2  # It adds headers.
            num_lines = unread.count(b"\n", 0, end)
            if end > of_parent * MAX_HEADER_BYTES or num_lines > of_parent * MAX_HEADERS + 2:
                raise errors.HeadersTooLargeError(_TOO_LARGE)
            if blank is None and unread[0] > 0x20:
                return 0
            if not _REQUEST_LINE.match(unread):
                raise HttpParserError("the request line must have a method, a URL and a version")
            unread[:end] = _UPGRADE.sub(b"\nIgnored:", unread[:end])
            self.parser = HttpRequestParser(self)  # Trailers such as Connection change the old one.
        return end

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.strip(b" \t"))  # llhttp leaves spaces at the end.

    def on_headers_complete(self) -> None:
        headers, version = self.headers, self.parser.get_http_version()
        # Refuse headers from which a proxy could read another length (request smuggling).
        codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
        if codings and (version, codings) != ("1.1", [b"chunked"]):
            raise HttpParserError(f"HTTP/{version} may not have this Transfer-Encoding")
        num_hosts = [name for name, _ in headers].count(b"host")
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            raise HttpParserError("there must be one Host header")
        if absolute := _ABSOLUTE.fullmatch(self.url):
            # RFC 9112, 3.2.2: the target's host replaces the Host header.
            headers = [(n, absolute[1] if n == b"host" else v) for n, v in headers]
            self.url = b"/" + absolute[2]  # The application gets only the path.
        self.scope["headers"], self.headers = headers, []  # The latter gets the trailers.
        super().on_headers_complete()
        self._left = None if codings else int(dict(headers).get(b"content-length", 0))
        self._tail, self._framing, self._head, self._busy = b"", 0, None, True
        cycle: Any = self.cycle
        cycle.transport = self
        if version == "1.0":
            cycle.waiting_for_100_continue = False
            cycle.send = partial(self._send_unchunked, cycle.send)

    def on_body(self, body: bytes) -> None:
        self._framing = max(0, self._framing - len(body) - len(body) // FRAMING)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._left = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._busy = False
        self._start_timer("idle", self._settings.head_timeout, self._end_idle)
        super().on_response_complete()
        if self._unread or self._half_closed:
            self.data_received(b"")  # Not later, as `eof_received` may be called before.

    # The next three methods are called by uvicorn's response, as those of its transport.

    def is_closing(self) -> bool:
        return self.transport.is_closing()

    def close(self) -> None:
        """Close the connection when all is written; a client that doesn't read can prevent that."""
        self._start_timer("close", self._settings.stall_timeout, self.transport.abort)
        self.transport.close()

    def write(self, data: bytes) -> None:
        """Write a part of a response: the head together with the first part of the body."""
        if self._head is None and data != _CONTINUE and self.cycle.scope["method"] != "HEAD":
            self._head = data
        else:
            self.transport.write((self._head or b"") + data)
            self._head = self._head and b""

    async def _send_unchunked(self, send: Send, message: Message) -> None:
        # HTTP/1.0 has no chunks: the end of the connection ends a body.
        cycle, size = self.cycle, len(message.get("body", b""))
        cycle.chunked_encoding, cycle.expected_content_length = False, size
        await send(message)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("stall", self._settings.stall_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("stall")

    def write_now(self, piece: bytes) -> bool:
        """Write a piece of a chunked body that has begun; return True if it was written.

        Returns False if the client must read first or has left; the application must then `send`.
        """
        is_open = self._busy and self.cycle.chunked_encoding and not self.cycle.disconnected
        if self.flow.write_paused or not (is_open and piece):
            return False
        self.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def _refuse_incomplete(self) -> None:
        if self._left != 0 or self._unread.strip():
            self._refuse_and_close(errors.InvalidRequestError("The request ended too soon."))

    def _probe(self, after: float) -> None:
        """Find out if a half-closed client has left: send 100 Continue, which clients skip.

        If the client has closed its socket, its system answers with a reset, which ends the
        connection.
        """
        waits = self._busy and not self.cycle.response_started and self._discarded is None
        if waits and self.cycle.scope["http_version"] == "1.0":  # without informational responses
            self.transport.abort()
        elif waits and after <= _LAST_PROBE:
            self.transport.write(_CONTINUE)
            self._start_timer("probe", after, partial(self._probe, 4 * after))

    def _end_idle(self) -> None:
        if self._left == 0 and self._unread.strip() and not self.transport.is_closing():
            self._refuse_and_close(errors.BodyTimeoutError("The head did not arrive in time."))
        else:
            self.transport.abort()

    def _make_room(self) -> bool:
        """Close another connection if necessary; return True if there is room for this one.

        Closes the one that has been idle for longest, or else the one whose client has not read
        for longest. Answers of routes that generate are never cut off for this, but others are,
        such as the page's files, which need no key.
        """
        others: list[Any] = [x for x in self.connections - {self} if not x.transport.is_closing()]
        if len(others) < self._max_connections:
            return True
        for timer in ("idle", "stall"):
            found = [each for each in others if timer in each._timers]
            if timer == "stall":
                found = [each for each in found if not record_of(each.cycle.scope).route.generates]
            if found:
                min(found, key=lambda each: each._timers[timer].when()).transport.abort()
                return True
        return False

    def _refuse_and_close(self, error: errors.RequestError) -> None:
        cycle = self.cycle if self._busy else None
        if self._left != 0 if cycle is None else cycle.response_started:
            self.close()  # A response has begun: the error would become a part of it.
            return
        scope: Any = cycle.scope if cycle else {"client": self.client, "method": "-", "path": "-"}
        record = record_of(scope)
        record.status, record.reason = error.status, str(error)
        answer = error_response(error, headers={"Connection": "close", REQUEST_ID: record.id})
        head = [STATUS_LINE[error.status], *(b"%b: %b\r\n" % each for each in answer.raw_headers)]
        body = b"" if scope["method"] == "HEAD" else bytes(answer.body)
        self.transport.write(b"".join([*head, b"\r\n", body]))
        if cycle is None:
            log_request(scope)
        else:  # Wake the application, which waits for the body: it ends and logs the request.
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()
        self._discarded, self._left = len(self._unread), 0
        self._unread.clear()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._start_timer("linger", LINGER_SECONDS, self.close)

    def _start_timer(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, act)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()
