"""Real server processes on the bundled model."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import httpx
import openai

MODEL = "mlx-mtp-demo"
CHAT = "/v1/chat/completions"
STORY = "Write a short story about a fox named Anna who finds a lamp in the forest."


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @cached_property
    def http(self) -> httpx.Client:
        # The server's end would break a kept connection; verifying would read certificates.
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.Client(base_url=self.url, timeout=120, limits=limits, verify=False)

    def post(self, path: str, **fields: object) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **fields})

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics").text
        found = re.search(rf'^mlx_mtp:{name}{{model_name="[^"]*"}} (\S+)$', text, re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found[1])

    def wait_until_empty(self) -> None:
        for _ in range(600):
            gauges = [self.metric(f"num_requests_{k}") for k in ("running", "waiting", "held")]
            if not any(gauges):
                return
            time.sleep(0.05)
        raise AssertionError(f"rows are left over: {gauges}")

    def gauges(self) -> dict[str, float]:
        """Returns each gauge of /metrics, by its name and labels."""
        text = self.http.get("/metrics").text
        names = set(re.findall(r"^# TYPE (\S+) gauge$", text, re.MULTILINE))
        samples = re.findall(r"^(([^\s{#]+)\S*) (\S+)$", text, re.MULTILINE)
        return {sample: float(value) for sample, name, value in samples if name in names}

    @property
    def resident_bytes(self) -> int:
        argv = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
        shown = subprocess.run(argv, capture_output=True, check=True)
        return 1024 * int(shown.stdout)


def with_log(path: Path) -> str:
    """Returns code for `running` by which the process writes its log to a file."""
    return f"import os\nos.dup2(os.open({str(path)!r}, os.O_WRONLY | os.O_CREAT), 2)\n"


def with_files(number: int) -> str:
    """Returns code for `running` that allows at most `number` open files (`ulimit -n`)."""
    return f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, {(number, number)})\n"


@contextlib.contextmanager
def running(*flags: str, code: str = "", read_log: bool = True) -> Iterator[Server]:
    """Yields a server with these flags, and kills it at the end if it still runs.

    `code` runs first in the server's process, to break something. Without `read_log` nobody reads
    the log, which fills its pipe.
    """
    arguments = ["serve", *([] if "--port" in flags else ["--port", "0"]), *flags]
    run = f"{code}\nimport sys\nfrom mlx_mtp.__main__ import main\nsys.exit(main({arguments!r}))"
    kept = ("MLX_MTP_CACHE_DIR", "MLX_MTP_CONFIG")
    environment = {k: v for k, v in os.environ.items() if k in kept or k[:8] != "MLX_MTP_"}
    argv = [sys.executable, *(["-c", run] if code else ["-m", "mlx_mtp", *arguments])]
    with (
        subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=None if read_log else subprocess.PIPE,
            text=True,
            env=environment,
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        assert process.stdout is not None
        reader = threading.Thread(target=process.stdout.read, daemon=True)
        stack.callback(lambda: reader.is_alive() and reader.join())
        stack.callback(process.kill)
        for line in process.stdout:
            address = re.search(r"address\s+(http://\S+)", line)
            if address:
                break
        else:
            raise AssertionError(f"the server ended with status {process.wait()}")
        if read_log:
            reader.start()
        server = Server(address[1], process)
        with server.client, server.http:
            yield server


def free_ports(count: int) -> list[int]:
    """Returns loopback ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in socks]


def start_ranks(folder: Path, commands: Many[Many[str]]) -> list[subprocess.Popen[str]]:
    """Start Python with these arguments for each rank, as `mlx.launch` does."""
    hosts, socks = folder / "hosts.json", [socket.socket() for _ in commands]
    for each in socks:
        each.bind(("127.0.0.1", 0))
    hosts.write_text(json.dumps([[f"127.0.0.1:{each.getsockname()[1]}"] for each in socks]))
    for each in socks:
        each.close()
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
