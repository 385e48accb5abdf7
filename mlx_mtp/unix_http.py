"""Unix sockets: a directory for them, and a client of HTTP/1.1 that streams responses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from mlx_mtp.errors import UsageError

BROKEN = (OSError, asyncio.IncompleteReadError)
"""Errors raised by a request to a process that has ended."""
_PIECE = 1 << 16
_PATH_BYTES = 100  # maximum length of a socket's path on a Mac
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade".split()
)
"""Headers that apply to one connection, and so are not passed on."""
Headers = Sequence[tuple[bytes, bytes]]


class SocketAnswer:
    """A response of one of our own servers, whose body is read as it arrives."""

    def __init__(self, reader: asyncio.StreamReader, method: str) -> None:
        self._reader, self._method = reader, method
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()

    async def begin(self) -> None:
        """Read the status line and the headers; raises the errors that `BROKEN` lists."""
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
        self.status = int(first.split(b" ", 2)[1])
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers.append((name.lower(), value.strip()))

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields pieces of the body as they arrive; raises the errors that `BROKEN` lists."""
        headers = dict(self.headers)
        if self._method == "HEAD" or self.status in (204, 304):
            return
        if b"transfer-encoding" in headers:
            async for piece in self._chunks():
                yield piece
            return
        left = int(headers.get(b"content-length", 0))
        while left:
            piece = (await self._more())[:left]
            left -= len(piece)
            yield piece

    async def _chunks(self) -> AsyncIterator[bytes]:
        """Yields the data of all chunks that have arrived, joined."""
        data, left = b"", 0  # bytes of the current chunk that are missing, with its line end
        while True:
            data += await self._more()
            at, taken = 0, list[bytes]()
            while at < len(data):
                if not left:
                    if (end := data.find(b"\r\n", at)) < 0:
                        break
                    left = int(data[at:end].partition(b";")[0], 16) + 2
                    at = end + 2
                    if left == 2:
                        if taken:
                            yield b"".join(taken)
                        return
                here = min(left, len(data) - at)
                taken.append(data[at : at + min(here, max(left - 2, 0))])
                at, left = at + here, left - here
            if taken:
                yield b"".join(taken)
            data = data[at:]

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def _more(self) -> bytes:
        if not (data := await self._reader.read(_PIECE)):
            raise ConnectionResetError("The server ended within its answer.")
        return data


@contextlib.asynccontextmanager
async def ask(
    path: Path, method: str, target: bytes | str, headers: Headers = (), body: bytes = b""
) -> AsyncIterator[SocketAnswer]:
    """Send a request on a new connection, which is closed at the end of the block.

    Closing the connection cancels the answer. Raises the errors that `BROKEN` lists.
    """
    reader, writer = await asyncio.open_unix_connection(os.fspath(path))
    try:
        fixed = [(b"connection", b"close"), (b"content-length", b"%d" % len(body))]
        host = [] if any(name == b"host" for name, _ in headers) else [(b"host", b"localhost")]
        target = target if isinstance(target, bytes) else target.encode()
        lines = [b"%b: %b\r\n" % each for each in (*headers, *host, *fixed)]
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method.encode(), target, b"".join(lines))
        writer.write(head + body[:_PIECE])  # in one write, so the process is woken once
        if len(body) > _PIECE:
            writer.write(memoryview(body)[_PIECE:])
        with contextlib.suppress(OSError):  # It can answer before it has read the whole body.
            await writer.drain()
        answer = SocketAnswer(reader, method)
        await answer.begin()
        yield answer
    finally:
        writer.transport.abort()


def private_folder() -> Path:
    """Make a directory for sockets that only this user can enter.

    Raises UsageError if it can't be made, or its path is too long for sockets.
    """
    fault = ""
    # `tempfile.gettempdir` writes a file, which fails on a full disk; a socket takes no space.
    for base in (os.environ.get("TMPDIR"), "/tmp"):
        try:
            folder = Path(tempfile.mkdtemp(prefix="mlx-mtp-", dir=base or "/tmp"))  # of mode 0700
        except OSError as error:
            fault = f"a directory for sockets can't be made: {error}"
            continue
        if len(os.fsencode(folder)) + len("/999999") <= _PATH_BYTES:
            return folder
        folder.rmdir()
        fault = f"the path of the directory for temporary files is too long: {folder}"
    raise UsageError(f"{fault[0].upper()}{fault[1:]}.")
