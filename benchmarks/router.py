"""The overhead of the parent of several models, on streams of a child without a model."""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import Rows, row
from mlx_mtp.config import RouterConfig, ServerConfig
from mlx_mtp.router.app import create_router
from mlx_mtp.router.fleet import Fleet, ServedModel
from mlx_mtp.server.serving import bind, make_server

_FAKE = Path(__file__).with_name("fake_child.py").resolve()
_PATH = "/v1/chat/completions"


def router(
    streams: tuple[int, ...] = (1, 8, 32),
    rate: int = 1000,
    seconds_each: float = 2.0,
    spread: float = 0.5,
    rounds: int = 5,
) -> Rows:
    """Overhead of the parent of several models: streams through it, and from the child itself.

    The child has no model and sends by the clock. Both ways use TCP, and take turns in each round.
    "chunk" is the time from the child's sending to the client's reading, and "first" the time from
    the request to the first event. "core" is the CPU time of the parent alone, as a share of a core
    at 1,000 chunks per second.

    Args:
        streams: number of concurrent streams
        rate: chunks per second of all streams together
        seconds_each: length of a stream
        spread: seconds over which the streams begin, one after the other; 0: all at once
    """
    names = "streams | way | first, ms | chunk, ms | 99%, ms | chunks/s | core, %"
    with _running() as parent:
        for count in streams:
            chunks = max(1, int(rate * seconds_each / count))
            laps: dict[bool, list[_Lap]] = {True: [], False: []}
            for number in range(rounds):
                for direct in (False, True) if number % 2 else (True, False):
                    lap = asyncio.run(_ask_all(parent, direct, count, chunks, count / rate, spread))
                    laps[direct].append(lap)
            for direct, name in ((True, "the child itself"), (False, "through the parent")):
                middle = (statistics.median(each) for each in zip(*laps[direct]))
                yield row(names, count, name, *middle)


class _Parent(NamedTuple):
    process: subprocess.Popen[str]
    port: int
    child_port: int

    def cpu_seconds(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


class _Lap(NamedTuple):
    first_ms: float
    chunk_ms: float
    worst_ms: float
    rate: float
    core: float


@contextmanager
def _running() -> Iterator[_Parent]:
    command = [sys.executable, "-c", "from benchmarks.router import serve_fake; serve_fake()"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=_FAKE.parents[1], **pipes) as process:
        assert process.stdout is not None
        port, folder = json.loads(process.stdout.readline())
        try:
            asyncio.run(_ask(port, 10, 0.0))  # Starts the child.
            yield _Parent(process, port, asyncio.run(_child_port(os.path.join(folder, "1"))))
        finally:
            process.terminate()


def serve_fake() -> None:
    """Serve one fake model; prints its port and folder, and the CPU time for each line of stdin."""
    import threading

    async def plans(_: Sequence[ServedModel]) -> AsyncIterator[dict[str, Any]]:
        yield {"limit": 1, "source": "no model"}
        yield {"model": 0, "nbytes": 1}

    def answer_questions() -> None:
        print(json.dumps([port, str(fleet._folder)]), flush=True)
        for _ in sys.stdin:
            print(time.process_time(), flush=True)

    fleet = Fleet(
        [ServedModel("fake", float("inf"), names=("fake",))],
        RouterConfig(),
        command=lambda _: [sys.executable, "-S", "-E", str(_FAKE), "fake"],
        plans=plans,
    )
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        app = create_router(ServerConfig(model_name="fake"), fleet)
        ready = threading.Thread(target=answer_questions, daemon=True).start
        make_server(app, log_level="warning", on_ready=ready).run(sockets=[sock])


async def _ask_all(
    parent: _Parent, direct: bool, count: int, chunks: int, pause: float, spread: float
) -> _Lap:
    cpu, began = parent.cpu_seconds(), time.perf_counter()

    async def ask(number: int) -> tuple[float, list[float]]:
        await asyncio.sleep(spread * number / count)
        return await _ask(parent.child_port if direct else parent.port, chunks, pause)

    answers = await asyncio.gather(*map(ask, range(count)))
    seconds, cpu = time.perf_counter() - began, parent.cpu_seconds() - cpu
    firsts = [first for first, _ in answers]
    delays = sorted(delay for _, each in answers for delay in each)
    return _Lap(
        1e3 * statistics.median(firsts),
        1e3 * statistics.median(delays),
        1e3 * delays[int(0.99 * len(delays))],
        len(delays) / seconds,
        100 * cpu / (len(delays) / 1000),
    )


async def _child_port(socket_path: str) -> int:
    reader, writer = await asyncio.open_unix_connection(socket_path)
    writer.write(b"GET /health HTTP/1.1\r\n\r\n")
    body = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    return int(json.loads(body)["port"])


async def _ask(port: int, chunks: int, pause: float) -> tuple[float, list[float]]:
    """Returns the seconds to the first event, and from each chunk's sending to its reading."""
    body = json.dumps({"model": "fake", "stream": True, "chunks": chunks, "pause": pause}).encode()
    head = f"POST {_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    began, first, delays = time.perf_counter(), 0.0, []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    async for line in reader:
        if line.startswith(b"data: {"):
            now, fields = time.perf_counter(), json.loads(line[6:])
            first = first or now - began
            delays += [now - fields["sent"]] if "sent" in fields else []
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return first, delays
