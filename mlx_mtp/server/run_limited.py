"""Work that may never end, such as a template's: it is ended when its time is up."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_PAUSE = 0.05
_TRIES = 20


class TimeIsUp(BaseException):
    """Raised within the work; no `except Exception` of the work stops it."""


class _Work(Generic[Result]):
    """The work as a thread does it. It is only interrupted where it can tell: not before it has
    begun, nor when it is over."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._running = self._given_up = False
        self.result: list[Result] = []
        self.error: BaseException | None = None

    def __call__(self) -> None:
        # An interruption may come late: while the one before is dealt with.
        with contextlib.suppress(TimeIsUp):
            with self._lock:
                if self._given_up:
                    return
                self._running = True
            try:
                self.result.append(self._work())
            except BaseException as error:
                self.error = error
            with self._lock:
                self._running = False

    def interrupt(self, ident: int) -> None:
        """Raise `TimeIsUp` in the thread that does it; if none has begun, none will."""
        with self._lock:
            self._given_up = True
            if self._running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(ident), ctypes.py_object(TimeIsUp)
                )


def run_limited(work: Callable[[], Result], seconds: float) -> Result:
    """Do some work in pure Python on a thread of its own, and wait for it.

    When its time is up an exception is raised in it, at its next bytecode: CPython has no other way
    to end a thread. A single call into C is not interrupted, but left behind.

    Raises:
        TimeoutError: it took longer.
    """
    job = _Work(work)
    thread = threading.Thread(target=job, daemon=True, name="limited")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        _end(thread, job)
        raise TimeoutError
    if job.error is not None:
        raise job.error
    return job.result[0]


def _end(thread: threading.Thread, job: _Work[Result]) -> None:
    assert thread.ident is not None, "the thread was started"
    for _ in range(_TRIES):
        job.interrupt(thread.ident)
        thread.join(_PAUSE)
        if not thread.is_alive():
            return
    logger.error("A thread does not end; it is abandoned.")
