"""Processes for work on clients' input that may never end, or end its process."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from mlx_mtp import safe_path

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Within which a process must be ready. Importing its libraries takes seconds, and more while the
server itself starts."""
_END_SECONDS = 2.0  # for a process to end after it has closed its pipe
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)


class HelperError(Exception):
    """The process has ended over a question; the next question starts another process.

    `status` is as `subprocess` has it: below 0 it is a signal.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class HelperUnavailableError(Exception):
    """No process can be started, or it was killed from outside: not the question's fault."""


class Helper:
    """One process of a module that calls `answer_questions`; for one thread at a time."""

    def __init__(self, module: str, header: Any) -> None:
        self._module, self._header = module, header
        self._process: subprocess.Popen[str] | None = None
        self._ready = False
        self.fault: str | None = None  # why the last start failed

    def start(self) -> None:
        """Start the process without waiting, unless one runs; may raise HelperUnavailableError."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is not None:
            return
        try:
            self._process = subprocess.Popen(
                safe_path.command_of(self._module),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                # ctrl-C is for the server: a helper ends when its input does.
                start_new_session=True,
            )
            # A long header fills the pipe before the process reads it.
            threading.Thread(target=_send_lines, args=(self._process, self._header)).start()
        except (OSError, RuntimeError) as error:  # No files, no memory, no more threads.
            self.close()
            self._fail(str(error))

    def make_ready(self) -> None:
        """Start the process and wait until it can answer; HelperUnavailableError if it can't."""
        self.start()
        if self._ready:
            return
        try:
            self._read(START_SECONDS)
        except HelperError:
            self._fail("it ended before it was ready")
        if self.fault is not None:
            logger.info("The process %s runs again.", self._module)
        self._ready, self.fault = True, None

    def ask(self, question: Any, seconds: float) -> Any:
        """Return the answer to a question, which is asked again if the process is killed.

        A process ends itself if a question takes too long. A process that has neither answered nor
        ended after `seconds` is stopped, and is killed. HelperError: the question ended the
        process. HelperUnavailableError: no process can be started, or it was killed twice.
        """
        for _ in range(2):
            self.make_ready()
            try:
                return self._read(seconds, question)
            except HelperError as error:
                if error.status not in _KILLED:
                    raise
        raise HelperUnavailableError(f"the process {self._module} was killed, or stopped")

    def _fail(self, reason: str) -> NoReturn:
        fault = f"the process {self._module} can't be started: {reason}"
        if self.fault is None:
            logger.warning("Requests that need it fail until it runs: %s.", fault)
        self.fault = fault
        raise HelperUnavailableError(fault) from None

    def _read(self, seconds: float, *questions: Any) -> Any:
        process, answer = self._process, ""
        assert process is not None
        assert process.stdout is not None
        late = threading.Timer(seconds, self.kill)
        late.start()
        try:
            _send_lines(process, *questions)
            with contextlib.suppress(OSError):
                answer = process.stdout.readline()
        finally:
            late.cancel()
        if not answer.endswith("\n"):
            # Its pipe is closed before it has ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            self.close()
            raise HelperError(process.returncode)
        return json.loads(answer)

    def kill(self) -> None:
        """Kill the process and what it has started. Thread-safe."""
        if (process := self._process) is not None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.communicate()
            self._process = None
        self._ready = False


def _send_lines(process: "subprocess.Popen[str]", *lines: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # It has ended, or was closed.
        for line in lines:
            print(json.dumps(line), file=process.stdin, flush=True)


def answer_questions(answers: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Run the process: `answers` takes the header and returns what answers a question."""
    source, sink = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # No library writes between the answers.
    signal.alarm(int(START_SECONDS))  # Who started it may have been killed, and ends it no more.
    answer = answers(json.loads(source.readline()))
    signal.alarm(0)
    print("null", file=sink, flush=True)
    while line := source.readline():
        print(json.dumps(answer(json.loads(line))), file=sink, flush=True)
