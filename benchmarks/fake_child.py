"""A model's process without a model: `python fake_child.py NAME [SECONDS_TO_LOAD|fail]`.

It serves the tests and the benchmark of `mlx_mtp.router`. A request's body describes the answer:
`stream`, `chunks` (number), `pause` (seconds before each chunk), `size` (characters of a chunk),
`die` (number of chunks before the process exits), `status`, and `hang`. It needs only Python.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

NAME = sys.argv[1] if __name__ == "__main__" else ""
SSE = "text/event-stream"
listeners: list[asyncio.Server] = []  # beside the parent's: on TCP, for the benchmark
counts = {"open": 0, "cancelled": 0, "finished": 0}
draining = asyncio.Event()


def event(fields: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class Answer:
    """One response."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._head = writer, b""

    def head(self, status: int, kind: str, length: int | None) -> None:
        size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        head = f"HTTP/1.1 {status} Fake\r\nContent-Type: {kind}\r\nX-Request-Id: id-{NAME}\r\n"
        # It is sent with the first piece of the body, as our servers do.
        self._head = f"{head}{size}\r\nConnection: close\r\n\r\n".encode()

    def whole(self, fields: Any, status: int = 200, kind: str = "application/json") -> None:
        body = fields.encode() if isinstance(fields, str) else json.dumps(fields).encode()
        self.head(status, kind, len(body))
        self._writer.write(self._head + body)

    async def chunk(self, data: bytes) -> None:
        self._writer.write(b"%b%x\r\n%b\r\n" % (self._head, len(data), data))
        self._head = b""
        await self._writer.drain()


async def generate(answer: Answer, body: dict[str, Any], seen: dict[str, Any]) -> None:
    """Send the answer that the body describes."""
    if body.get("hang"):
        await asyncio.sleep(3600)
    if (status := body.get("status", 200)) != 200:
        error = {"message": "as asked", "type": "fake", "param": None, "code": "fake"}
        answer.whole({"error": error}, status)
        return
    if not body.get("stream"):
        if body.get("die") == 0:
            os._exit(9)
        await asyncio.sleep(body.get("pause", 0))
        answer.whole(seen)
        return
    answer.head(200, SSE, None)
    await answer.chunk(event(seen))
    pause = body.get("pause", 0)
    began, text = time.monotonic(), "x" * body.get("size", 100)
    for number in range(body.get("chunks", 3)):
        if number == body.get("die"):
            await asyncio.sleep(0.1)
            os._exit(9)
        # Paced by the clock, because each sleep lasts a little too long.
        await asyncio.sleep(max(0.0, began + pause * (number + 1) - time.monotonic()))
        await answer.chunk(event({"number": number, "sent": time.perf_counter(), "text": text}))
    await answer.chunk(b"data: [DONE]\n\n")
    await answer.chunk(b"")


async def route(answer: Answer, path: str, seen: dict[str, Any], body: dict[str, Any]) -> None:
    """Answer one request."""
    if path == "/health":
        port = listeners[0].sockets[0].getsockname()[1]
        answer.whole({"status": "ok", "port": port})
    elif path == "/v1/models":
        answer.whole({"data": [{"max_model_len": 1000, "draft_sources": ["mtp"]}]})
    elif path == "/metrics":
        lines = [
            f"# HELP fake_{key} x\n# TYPE fake_{key} gauge\nfake_{key} {n}\n"
            for key, n in counts.items()
        ]
        answer.whole("".join(lines), kind="text/plain")
    elif path.startswith("/v1/responses/"):
        answer.whole(seen if NAME in path else {"error": {}}, 200 if NAME in path else 404)
    else:
        await generate(answer, body, seen)


async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve the single request of a connection."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        text = await reader.readexactly(int(fields.get("content-length", 0)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    path, body = head[0].split(" ")[1], json.loads(text or "{}")
    seen = {"model": NAME, "pid": os.getpid(), "path": path, "headers": fields, "body": body}
    counts["open"] += 1
    work = asyncio.ensure_future(route(Answer(writer), path, seen, body))
    left = asyncio.ensure_future(reader.read(1))
    await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
    with contextlib.suppress(ConnectionError):
        # Work that has failed could not write any more.
        is_finished = work.done() and not work.exception()
        counts["finished" if is_finished else "cancelled"] += path not in ("/health", "/metrics")
        if is_finished:
            await writer.drain()
    for each in (work, left):
        each.cancel()
    counts["open"] -= 1
    writer.close()


def end_with_parent() -> None:
    """Exit when the parent ends, which closes stdin."""
    while os.read(0, 100):
        pass
    os._exit(1)


async def main() -> None:
    """Wait as if loading a model, then serve until a signal."""
    how = sys.argv[2] if len(sys.argv) > 2 else "0"
    if how == "fail":
        sys.exit(f"{NAME} is broken")
    time.sleep(float(how))
    sock = socket.socket(fileno=int(os.environ["MLX_MTP_PARENT"].split()[0]))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(
            number, lambda: sys.exit(1) if draining.is_set() else draining.set()
        )
    server = await asyncio.start_unix_server(connected, sock=sock)
    listeners.append(await asyncio.start_server(connected, "127.0.0.1", 0))
    print(json.dumps({"level": "info", "message": f"{NAME} is up"}), file=sys.stderr, flush=True)
    await draining.wait()
    for each in (server, *listeners):
        each.close()
    while counts["open"]:
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    asyncio.run(main())
