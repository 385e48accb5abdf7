"""Work that may never end, such as a template's, with a time limit."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_PAUSE = 0.05
_TRIES = 20


class TimeIsUp(BaseException):
    """Raised within the work; no `except Exception` of the work stops it."""


def run_limited(work: Callable[[], Result], seconds: float) -> Result:
    """Do some work in pure Python on a thread of its own, and wait for it.

    When its time is up an exception is raised in it, at its next bytecode: CPython has no other way
    to end a thread. A single call into C is not interrupted, but left behind.

    Raises:
        TimeoutError: it took longer.
    """
    lock = threading.Lock()
    given_up = running = False
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        nonlocal running
        # An interruption may come late: while the one before is dealt with.
        with contextlib.suppress(TimeIsUp):
            try:
                with lock:
                    if given_up:
                        return
                    running = True
                results.append(work())
            except BaseException as error:
                running = False  # At once, so that no other one comes when this is over.
                errors.append(error)
            with lock:
                running = False

    thread = threading.Thread(target=run, daemon=True, name="limited")
    thread.start()
    thread.join(seconds)
    if not thread.is_alive():
        if errors:
            raise errors[0]
        return results[0]
    for _ in range(_TRIES):
        with lock:
            given_up = True
            if running:  # Otherwise it has not begun, and never will, or is over.
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(TimeIsUp))
        thread.join(_PAUSE)
        if not thread.is_alive():
            raise TimeoutError
    logger.error("A thread does not end; it is abandoned.")
    raise TimeoutError
