"""Unix sockets: where they are, and a client of HTTP/1.1 on them, with answers as they come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import h11

from mlx_mtp.errors import UsageError

BROKEN = (OSError, h11.RemoteProtocolError)
"""Errors of asking a process that has ended."""
_PIECE = 1 << 16
_PATH_BYTES = 100  # that a socket's path may have on a Mac
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade".split()
)
"""Headers that are of one connection."""
Headers = Sequence[tuple[bytes, bytes]]


class SocketAnswer:
    """A response, whose body is read as it comes."""

    def __init__(self, connection: h11.Connection, reader: asyncio.StreamReader) -> None:
        self._connection, self._reader = connection, reader
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()

    async def begin(self) -> None:
        """Read the head; raises what `BROKEN` lists."""
        while True:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                await self._receive()
            elif isinstance(event, h11.Response):
                self.status, self.headers = event.status_code, [*event.headers]
                return

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield what comes, as soon as it comes; raises what `BROKEN` lists."""
        pieces: list[bytes] = []
        while True:
            event = self._connection.next_event()
            if isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
                continue
            if pieces:
                yield b"".join(pieces)
                pieces.clear()
            if event is not h11.NEED_DATA:
                return
            await self._receive()

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def _receive(self) -> None:
        self._connection.receive_data(await self._reader.read(_PIECE))


@contextlib.asynccontextmanager
async def ask(
    path: Path, method: str, target: bytes | str, headers: Headers = (), body: bytes = b""
) -> AsyncIterator[SocketAnswer]:
    """Send a request on a connection of its own, which is closed with the block.

    Closing it cancels the answer. Raises what `BROKEN` lists.
    """
    reader, writer = await asyncio.open_unix_connection(os.fspath(path))
    try:
        connection = h11.Connection(h11.CLIENT)
        fixed = [(b"connection", b"close"), (b"content-length", b"%d" % len(body))]
        host = [] if any(name == b"host" for name, _ in headers) else [(b"host", b"localhost")]
        head = h11.Request(method=method, target=target, headers=[*headers, *host, *fixed])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        with contextlib.suppress(OSError):  # It may have answered before it read everything.
            await writer.drain()
        answer = SocketAnswer(connection, reader)
        await answer.begin()
        yield answer
    finally:
        writer.transport.abort()


def private_folder() -> Path:
    """Make a directory for sockets that only this user can enter; raises UsageError."""
    for base in (None, "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="mlx-mtp-", dir=base))  # of mode 0700
        if len(os.fsencode(folder)) + len("/999999") <= _PATH_BYTES:
            return folder
        folder.rmdir()
    raise UsageError(f"The path of the directory for temporary files is too long: {folder}.")
