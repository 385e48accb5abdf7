"""Bodies that arrive on a Unix socket in arbitrary pieces."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.unix_http import Spare, ask, private_folder


async def answered(sent: bytes, cuts: list[int], method: str = "GET") -> tuple[int, list[bytes]]:
    """Returns status and pieces of an answer that a server sends cut at `cuts`, and then closes.

    `take` takes the pieces of odd length.
    """
    folder, got = private_folder(), list[bytes]()

    def take(piece: bytes) -> bool:
        got.extend([piece] * (len(piece) % 2))
        return len(piece) % 2 == 1

    path = folder / "s"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start, end in zip([0, *cuts], [*cuts, len(sent)]):
            writer.write(sent[start:end])
            await asyncio.sleep(0)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        done.set()

    done = asyncio.Event()
    server = await asyncio.start_unix_server(serve, os.fspath(path))
    try:
        with await ask(path, method, "/") as answer:
            while piece := await answer.piece(take):
                got.append(piece)
            return answer.status, got
    finally:
        await done.wait()
        server.close()
        path.unlink(missing_ok=True)
        folder.rmdir()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(min_size=1, max_size=40)), st.data())
def test_a_chunked_body_is_whole_wherever_it_is_cut(
    chunks: list[bytes], data: st.DataObject
) -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])
    sent = CHUNKED + body
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    status, pieces = asyncio.run(answered(sent, cuts))
    assert (status, b"".join(pieces)) == (200, b"".join(chunks))
    cut = data.draw(st.integers(1, len(sent) - 3))  # in the last size line at the latest
    with pytest.raises(ConnectionResetError):
        asyncio.run(answered(sent[:cut], []))


def test_bodies_of_a_length_or_of_none() -> None:
    head = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\n"
    status, pieces = asyncio.run(answered(head + b"hello", [50]))
    assert (status, b"".join(pieces)) == (404, b"hello")
    assert asyncio.run(answered(head, [], "HEAD")) == (404, [])
    with pytest.raises(ConnectionResetError):
        asyncio.run(answered(head + b"hell", []))


def test_a_request_takes_the_spare_connection_unless_the_server_has_closed_it() -> None:
    async def statuses() -> list[int]:
        folder, open_ones = private_folder(), list[asyncio.StreamWriter]()
        path, seen = folder / "s", list[int]()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            open_ones.append(writer)
            number = 200 + len(open_ones)  # of the connection
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 %d OK\r\nContent-Length: 0\r\n\r\n" % number)
            writer.close()

        async with await asyncio.start_unix_server(serve, os.fspath(path)):
            spare = Spare(path)
            for closes in (False, False, True, False):
                if closes:
                    open_ones[-1].close()
                    await asyncio.sleep(0.05)
                with await ask(path, "GET", "/", spare=spare) as answer:
                    seen.append(answer.status)
                await asyncio.sleep(0.05)  # The server accepts the next one.
            spare.close()
            await asyncio.sleep(0.05)
        path.unlink()
        folder.rmdir()
        return seen

    # Number 203 was opened in advance, and closed; 204 took its place, and 205 is its successor.
    assert asyncio.run(statuses()) == [201, 202, 204, 205]


def test_a_spare_connection_ends_with_a_server_that_has_not_accepted_it() -> None:
    folder = private_folder()
    path = folder / "s"
    spare = Spare(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(path))
        listening.listen()
        spare.open()
    assert spare.take() is None
    spare.open()  # Nobody listens.
    assert spare.take() is None
    spare.close()
    path.unlink()
    folder.rmdir()


def test_sockets_are_in_a_directory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    for base in (long, tmp_path / "absent"):
        monkeypatch.setenv("TMPDIR", str(base))
        folder = private_folder()
        folder.rmdir()
        assert str(folder).startswith("/tmp/")
    assert [*long.iterdir()] == []
