"""HTTP/1.1 as uvicorn speaks it with h11, bounded, and with errors that clients can read.

What h11 and uvicorn leave open: complete headers of any number that arrive in one piece, chunked
bodies of single bytes (each of them costs 15 us of the event loop), and errors in plain text that
are lost when the connection is reset under a client that still sends.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mlx_mtp.errors import HeadersTooLargeError, InvalidRequestError, RequestError
from mlx_mtp.server.http_errors import error_body

MAX_HEADER_BYTES = 16 << 10
"""Longest request line and headers together; node.js and h11 have the same bound."""
MAX_HEADERS = 100
FREE_CHUNKS = 1024
"""Chunks of a body that may be of any size; further ones must hold `CHUNK_BYTES` on average."""
CHUNK_BYTES = 256
LINGER_SECONDS = 2.0
"""How long the rest of a refused request is read and thrown away, so that its client comes to read
the answer."""
LINGER_BYTES = 16 << 20
_PIECE = 16 << 10
_BLANK_LINE = re.compile(rb"\n\r?\n")


class BoundedConnection(h11.Connection):
    """h11's state machine, which refuses what is dear before it looks at it."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._chunks = self._bytes = 0

    def next_event(self) -> Any:
        """See `h11.Connection`.

        Raises:
            h11.RemoteProtocolError: also for headers and chunks beyond the bounds.
        """
        if self.their_state is h11.IDLE:
            self._chunks = self._bytes = 0
            self._check_head()
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_end
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError("the chunks of the body are too small", 400)
        return event

    def _check_head(self) -> None:
        data, _ = self.trailing_data
        data = data.lstrip(b"\r\n")
        blank = _BLANK_LINE.search(data)
        end = len(data) if blank is None else blank.end()
        if end > MAX_HEADER_BYTES:
            raise h11.RemoteProtocolError(
                f"the headers are longer than {MAX_HEADER_BYTES} bytes", 431
            )
        if data.count(b"\n", 0, end) > MAX_HEADERS + 2:
            raise h11.RemoteProtocolError(f"there are more than {MAX_HEADERS} headers", 431)


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol on a `BoundedConnection`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = BoundedConnection()
        self._thrown_away: int | None = None
        self._linger: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        # In pieces: h11 looks at the length of what is incomplete only between two of them.
        for start in range(0, len(data), _PIECE):
            if self._thrown_away is not None:
                self._throw_away(len(data) - start)
                return
            super().data_received(data[start : start + _PIECE])

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        if self._linger is not None:
            self._linger.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client sends no more: if that is too early, it is told so."""
        state = self.conn.their_state
        begun = state is h11.IDLE and bool(self.conn.trailing_data[0].strip())
        if self._thrown_away is None and (begun or state is h11.SEND_BODY):
            self._answer_and_close(InvalidRequestError("The request ended before it was complete."))

    def _should_upgrade(self) -> bool:
        return False  # There are no web sockets here; the request is answered as what it is.

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, or out of bounds, and end the connection."""
        cause = sys.exc_info()[1]
        error = _refusal(cause) if isinstance(cause, h11.RemoteProtocolError) else None
        self._answer_and_close(error or InvalidRequestError(msg))

    def _answer_and_close(self, error: RequestError) -> None:
        body = json.dumps(error_body(error)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        try:
            for event in (
                h11.Response(
                    status_code=error.status,
                    headers=headers,
                    reason=HTTPStatus(error.status).phrase.encode(),
                ),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            # An answer had begun, and what follows would be taken for a part of it.
            self.transport.close()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._thrown_away = 0
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _throw_away(self, count: int) -> None:
        assert self._thrown_away is not None, "only after an answer that ends the connection"
        self._thrown_away += count
        if self._thrown_away > LINGER_BYTES:
            self.transport.close()


def _refusal(cause: h11.RemoteProtocolError) -> RequestError:
    if cause.error_status_hint == HeadersTooLargeError.status:
        return HeadersTooLargeError(
            f"The request line and headers are too large: at most {MAX_HEADER_BYTES} bytes and "
            f"{MAX_HEADERS} headers are allowed."
        )
    # h11 quotes the client's own line, which may hold its key.
    return InvalidRequestError(f"This is not valid HTTP: {str(cause).partition(': bytearray')[0]}.")
