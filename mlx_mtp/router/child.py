"""A model's process: a server on a Unix socket in a private directory, and its log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from mlx_mtp.flags import PREFIX
from mlx_mtp.logs import log_again
from mlx_mtp.server.adopted import PARENT
from mlx_mtp.settings import VARIABLE
from mlx_mtp.unix_http import Spare, ask

logger = logging.getLogger(__name__)


class Child:
    """A model's process. It exits when the parent ends, because that closes its standard input."""

    def __init__(self, name: str, path: Path, process: asyncio.subprocess.Process) -> None:
        self.name, self.path, self._process = name, path, process
        self.spare = Spare(path)
        self.last_lines: deque[str] = deque(maxlen=10)  # of the process's log
        self._num_signals = 0
        self._log = asyncio.create_task(self._read_log())

    @classmethod
    async def start(cls, name: str, path: Path, command: Sequence[str], num_keys: int) -> Child:
        """Start `command` as a process that serves on a Unix socket at `path`; raises OSError."""
        # The command already has the settings of the variables and of the settings file.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(os.fspath(path))
            # Requests can be sent from now on; they wait until the process is ready.
            sock.listen(2048)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[sock.fileno()],
                env={**kept, VARIABLE: "", PARENT: f"{sock.fileno()} {num_keys}"},
                cwd=path.parent,
                limit=1 << 24,  # maximum bytes of a log line
                start_new_session=True,  # Ctrl-C reaches only the parent, which ends its processes.
            )
        return cls(name, path, process)

    async def wait(self) -> str:
        """Wait for the end of the process and of its log; return how it ended, in words."""
        status = await self._process.wait()
        with contextlib.suppress(TimeoutError):  # A descendant may hold the pipe open.
            await asyncio.wait_for(self._log, 1.0)
        self.path.unlink(missing_ok=True)
        self.spare.close()
        if status < 0:
            return f"was ended by signal {-status} ({signal.strsignal(-status)})"
        return f"has ended with status {status}"

    def terminate(self, most: int) -> None:
        """Send SIGTERM, unless `most` were sent: the first drains, the second ends answers."""
        if self._num_signals < most:
            self._num_signals += 1
            self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        # Not `Process.send_signal`: it may take the exit status from asyncio's waiting thread.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def is_healthy(self, seconds: float | None = None) -> bool:
        """Returns True if /health answers 200 within `seconds` (None: without a time limit)."""
        try:
            async with asyncio.timeout(seconds):
                with await ask(self.path, "GET", "/health") as answer:
                    return answer.status == 200
        except OSError:  # including TimeoutError
            return False

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        line = b"-"
        while line:
            with contextlib.suppress(ValueError):  # A line longer than `limit` is dropped.
                line = await self._process.stderr.readline()
                text = log_again(logger, line.decode(errors="replace"), self.name)
                self.last_lines += [text] if text else []
