"""Server processes to measure, each started on a free port and ended with its context."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from mlx_mtp.errors import BenchError

# mlx_lm.server with the same BLAS as ours; otherwise the BLAS libraries would be compared.
_MLX_LM = "from mlx_mtp import backend; backend.prepare(); from mlx_lm.server import main; main()"


class Contender(NamedTuple):
    """A server to start: its name in tables, command without the port, and model in requests."""

    name: str
    command: tuple[str, ...]
    model: str


def ours(name: str, model: Path, *flags: str) -> Contender:
    """Returns this project's server; `flags` are for `serve`."""
    serve = ("-m", "mlx_mtp", "serve", str(model), "--served-model-name", "m")
    return Contender(name, (sys.executable, *serve, "--log-level", "warning", *flags), "m")


def mlx_lm(model: Path) -> Contender:
    """Returns mlx_lm.server with its defaults; requests must ask for greedy decoding."""
    command = (sys.executable, "-c", _MLX_LM, "--model", str(model), "--log-level", "ERROR")
    return Contender("mlx_lm.server", command, str(model))


@contextlib.contextmanager
def running(contender: Contender) -> Iterator[str]:
    """Start a server and wait until it answers; yields its address, like http://127.0.0.1:8000."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [*contender.command, "--host", "127.0.0.1", "--port", port]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, f"{url}/health")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise BenchError(f"{process.args!r} ended with status {process.returncode}.")
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url, timeout=30)
            return
        time.sleep(0.1)
    raise BenchError(f"{process.args!r} did not answer within a minute.")
