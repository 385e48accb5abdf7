"""A private directory for Unix sockets, and an HTTP/1.1 client that streams answers from them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_mtp.errors import UsageError

_PIECE = 1 << 16  # bytes per read, and of the body in a request's first write
_PATH_BYTES = 100  # maximum length of a socket's path; macOS allows 103
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade".split()
)
"""Headers that concern a single connection and are not forwarded (RFC 9110, 7.6.1)."""
Headers = Sequence[tuple[bytes, bytes]]


def _take_none(_: bytes) -> bool:
    return False


class SocketAnswer:
    """A response of one of our own servers, with a body that can be read as it arrives.

    As a context manager it closes the connection at the end of the block; closing it early cancels
    the answer.
    """

    def __init__(self, sock: socket.socket, method: str) -> None:
        self._sock, self._method = sock, method
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()
        self._data = b""  # received but not parsed yet: part of the head or of a chunk-size line
        self._left = 0  # bytes to come of the body, or of the current chunk and its CRLF
        self._is_chunked = self._is_complete = False
        self._loop = asyncio.get_running_loop()
        self._is_watched = False  # True while the loop calls `_on_readable`
        self._got: asyncio.Future[bytes]  # what the last `_read` waits for
        self._take: Callable[[bytes], bool] = _take_none  # of the last `_read`

    def __enter__(self) -> SocketAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._unwatch()
        self._sock.close()
        self._take = _take_none  # The last one refers to this object: a cycle.

    async def begin(self) -> None:
        """Read the head; raises OSError."""
        while b"\r\n\r\n" not in self._data:
            self._data += await self._read(_take_none)
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        self.status = int(first.split(b" ", 2)[1])
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers.append((name.lower(), value.strip()))
        headers = dict(self.headers)
        self._is_chunked = b"transfer-encoding" in headers
        self._left = 0 if self._is_chunked else int(headers.get(b"content-length", 0))
        self._is_complete = self._method == "HEAD" or self.status in (204, 304)
        self._is_complete |= not (self._is_chunked or self._left)

    async def piece(self, take: Callable[[bytes], bool] = _take_none) -> bytes:
        """Returns the next piece of the body as it arrives, b"" at the end; raises OSError.

        Pieces for which `take` returns True are not returned, which saves a switch to the caller's
        task. What arrived with the head, and the last piece, are always returned.
        """
        piece = b"" if self._is_complete else self._body_of(b"")

        def is_taken(data: bytes) -> bool:
            nonlocal piece
            piece = self._body_of(data)
            return not self._is_complete and (not piece or take(piece))

        if not (piece or self._is_complete):
            await self._read(is_taken)
        return piece

    async def _read(self, take: Callable[[bytes], bool]) -> bytes:
        """Returns the next received bytes for which `take` returns False; raises OSError."""
        self._take, self._got = take, self._loop.create_future()
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._sock.fileno(), self._on_readable)
        return await self._got

    def _on_readable(self) -> None:
        if self._got.done():  # The caller is slower than the server, or has been cancelled.
            self._unwatch()
            return
        try:
            if not (data := self._sock.recv(_PIECE)):
                raise ConnectionResetError("The server ended within its answer.")
            if not self._take(data):
                self._got.set_result(data)
        except BlockingIOError:
            pass
        except Exception as error:
            self._got.set_exception(error)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._sock.fileno())

    def _body_of(self, data: bytes) -> bytes:
        """Returns the part of the body that `data`, the next received bytes, contains."""
        data, self._data = self._data + data, b""
        if not self._is_chunked:
            piece = data[: self._left]
            self._left -= len(piece)
            self._is_complete = not self._left
            return piece
        at, taken = 0, list[bytes]()
        while at < len(data) and not self._is_complete:
            if not self._left:
                if (end := data.find(b"\r\n", at)) < 0:
                    self._data = data[at:]
                    break
                self._left = int(data[at:end].partition(b";")[0], 16) + 2
                self._is_complete = self._left == 2
                at = end + 2
            here = min(self._left, len(data) - at)
            taken.append(data[at : at + min(here, max(self._left - 2, 0))])
            at, self._left = at + here, self._left - here
        return b"".join(taken)

    async def body(self) -> bytes:
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)


class Spare:
    """Keeps a connection open for the next request, so that it need not wait to be accepted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sock: socket.socket | None = None

    def open(self) -> None:
        """Open a connection unless there is one."""
        if self._sock is None:
            with contextlib.suppress(OSError):
                self._sock = _connected(self._path)

    def take(self) -> socket.socket | None:
        """Returns the connection, or None if there is none or the server has closed it."""
        sock, self._sock = self._sock, None
        if sock is not None:
            try:
                sock.recv(1)
            except BlockingIOError:
                return sock
            except OSError:  # The server has ended before it accepted the connection.
                pass
            sock.close()
        return None

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect(os.fspath(path))
    except OSError:
        sock.close()
        raise
    return sock


async def ask(
    path: Path,
    method: str,
    target: bytes | str,
    headers: Headers = (),
    body: bytes = b"",
    spare: Spare | None = None,
) -> SocketAnswer:
    """Send a request on a new connection; returns the answer once its head has arrived.

    The caller closes the answer. If `spare` has a connection, it is used; `spare` opens the next
    one when the head has arrived or the request has failed. Raises OSError.
    """
    # asyncio's streams and transports would take longer and switch tasks more often.
    loop, sock = asyncio.get_running_loop(), (spare and spare.take()) or _connected(path)
    answer = SocketAnswer(sock, method)
    try:
        fixed = [(b"connection", b"close"), (b"content-length", b"%d" % len(body))]
        host = [] if any(name == b"host" for name, _ in headers) else [(b"host", b"localhost")]
        target = target if isinstance(target, bytes) else target.encode()
        lines = [b"%b: %b\r\n" % each for each in (*headers, *host, *fixed)]
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method.encode(), target, b"".join(lines))
        with contextlib.suppress(OSError):  # The server may answer before it has read all.
            # One write for the head and the first piece, so that the process wakes only once.
            await loop.sock_sendall(sock, head + body[:_PIECE])
            if len(body) > _PIECE:
                await loop.sock_sendall(sock, memoryview(body)[_PIECE:])
        del body  # It may be large, and the answer may take long.
        await answer.begin()
    except BaseException:
        loop.remove_writer(sock.fileno())  # A cancelled call does so only after `close`.
        answer.close()
        raise
    finally:
        if spare is not None:
            loop.call_soon(spare.open)  # Later, so that the caller passes on the head first.
    return answer


def private_folder() -> Path:
    """Make a directory for sockets that only this user can enter; raises UsageError."""
    fault = ""
    # Not `tempfile.gettempdir`: it writes a file, which fails on a full disk.
    for base in (os.environ.get("TMPDIR"), "/tmp"):
        try:
            folder = Path(tempfile.mkdtemp(prefix="mlx-mtp-", dir=base or "/tmp"))  # mode 0700
        except OSError as error:
            fault = f"a directory for sockets can't be made: {error}"
            continue
        if len(os.fsencode(folder)) + len("/999999") <= _PATH_BYTES:
            return folder
        folder.rmdir()
        fault = f"the path of the directory for temporary files is too long: {folder}"
    raise UsageError(f"{fault[0].upper()}{fault[1:]}.")
