"""Processes for work on clients' input that may never end, or end its process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

START_SECONDS = 120.0
"""In which a helper must be ready; importing its libraries takes seconds, and more where all else
starts too."""


class HelperError(Exception):
    """The helper has ended, by itself or for its time; the next question starts another."""


class Helper:
    """One process of a module that calls `answer_questions`; for one thread at a time."""

    def __init__(self, module: str, header: Any) -> None:
        self._command, self._header = [sys.executable, "-m", module], header
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Begin to start it, so that it is ready when it is needed."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                # ctrl-C is for the server: a helper ends when its input does.
                start_new_session=True,
            )
            self._ready = False
            # A long header fills the pipe before the process reads it.
            threading.Thread(target=_write, args=(self._process, self._header)).start()

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer to a question; HelperError: there is none within so many seconds."""
        self.start()
        if not self._ready:
            self._read(START_SECONDS)
            self._ready = True
        return self._read(seconds, question)

    def _read(self, seconds: float, *questions: Any) -> Any:
        process, answer = self._process, ""
        assert process is not None
        assert process.stdout is not None
        late = threading.Timer(seconds, self.kill)
        late.start()
        try:
            _write(process, *questions)
            with contextlib.suppress(OSError):
                answer = process.stdout.readline()
        finally:
            late.cancel()
        if not answer.endswith("\n"):
            self.close()
            raise HelperError
        return json.loads(answer)

    def kill(self) -> None:
        """End it, and what it has started, from whatever thread."""
        if (process := self._process) is not None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.communicate()
            self._process = None


def _write(process: "subprocess.Popen[str]", *lines: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # It has ended, or was closed.
        for line in lines:
            print(json.dumps(line), file=process.stdin, flush=True)


def answer_questions(answers: Callable[[Any], Callable[[Any], Any]]) -> None:
    """The process's side: `answers` makes of the header what answers questions, one at a time."""
    source, sink = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # No library writes between the answers.
    signal.alarm(int(START_SECONDS))  # Who started it may have been killed, and ends it no more.
    answer = answers(json.loads(source.readline()))
    signal.alarm(0)
    print("null", file=sink, flush=True)
    while line := source.readline():
        print(json.dumps(answer(json.loads(line))), file=sink, flush=True)
