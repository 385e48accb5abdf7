"""Helper processes for work on clients' input that can hang or crash."""

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
"""Time in which a process must be ready. Importing its libraries takes seconds, and longer while
the server itself starts."""
_END_SECONDS = 2.0  # for a process to end after it has closed its pipe
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)


class HelperError(Exception):
    """A question has ended the process; the next question starts another process.

    `status` is the exit status as in `subprocess`: a negative status is a signal.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class HelperUnavailableError(Exception):
    """No process can be started, or it was killed from outside: not the question's fault."""


class Helper:
    """A process that runs a module that calls `answer_questions`; for one thread at a time."""

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
                # Ctrl-C is for the server: a helper ends when its input ends.
                start_new_session=True,
            )
            # On a thread, as a long header fills the pipe before the process reads from it.
            threading.Thread(target=_send_lines, args=(self._process, self._header)).start()
        except (OSError, RuntimeError) as error:  # no more files, memory or threads
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
        """Returns the answer to a question, which is asked again if the process is killed.

        The process ends itself if a question takes too long; if it has neither answered nor ended
        after `seconds`, it must have been stopped, and is killed. Raises HelperError if the
        question ended the process, HelperUnavailableError if no process can be started or the
        process was killed twice.
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
            # The pipe is closed before the process has ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            self.close()
            raise HelperError(process.returncode)
        return json.loads(answer)

    def kill(self) -> None:
        """Kill the process and the processes that it started. Thread-safe."""
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
    with contextlib.suppress(OSError, ValueError):  # The process has ended, or was closed.
        for line in lines:
            print(json.dumps(line), file=process.stdin, flush=True)


def answer_questions(answers: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Run the helper process: `answers` gets the header and returns a function that answers."""
    source, sink = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Keep libraries from writing between answers.
    signal.alarm(int(START_SECONDS))  # A parent that was killed can't end this process.
    answer = answers(json.loads(source.readline()))
    signal.alarm(0)
    print("null", file=sink, flush=True)
    while line := source.readline():
        print(json.dumps(answer(json.loads(line))), file=sink, flush=True)
