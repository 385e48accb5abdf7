"""Server-sent events out of timed network reads.

Reading and parsing are apart: while an answer comes, the client does nothing but note the time of
each read, so that it takes little from a server on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Read = tuple[float, bytes]
"""When bytes came, in seconds of the client's clock, and the bytes."""

DONE = "[DONE]"


def timed_events(reads: Iterable[Read]) -> Iterator[tuple[float, str]]:
    """Each event's data, with the time of the read that completed it.

    Lines end in LF or CRLF. Comments and fields other than `data` are skipped; data that no empty
    line follows counts when the stream ends.

    Raises:
        UnicodeDecodeError: the data is not UTF-8.
    """
    rest, data, at = b"", [], 0.0
    for at, received in reads:
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield at, b"\n".join(data).decode()
                data = []
    if rest.startswith(b"data:"):
        data.append(rest.removesuffix(b"\r")[5:].removeprefix(b" "))
    if data:
        yield at, b"\n".join(data).decode()
