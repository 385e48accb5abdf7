"""A job on a thread of its own, of which the first part may take so long and no longer."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

First = TypeVar("First")
Result = TypeVar("Result")

_PAUSE = 0.05
_TRIES = 20


class TimeIsUp(BaseException):
    """Raised within the first part; no `except Exception` there stops it."""


async def run_in_thread(
    first: Callable[[], First], rest: Callable[[First], Result], seconds: float
) -> Result:
    """`rest(first())` on another thread; `first` is Python code that may never end.

    When its time is up an exception is raised in it, at its next bytecode: CPython has no other way
    to end a thread. A single call into C is not interrupted, but left behind.

    Raises:
        TimeoutError: `first` took more than `seconds`.
    """
    return await _Job(first, rest).run(seconds)


class _Job(Generic[First, Result]):
    def __init__(self, first: Callable[[], First], rest: Callable[[First], Result]) -> None:
        self._first = first
        self._rest = rest
        self._lock = threading.Lock()
        self._state = "new"  # Then "first" and "rest"; or "never", if it began too late.
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Result] = self._loop.create_future()
        self._thread = threading.Thread(target=self._work, daemon=True, name="limited")

    async def run(self, seconds: float) -> Result:
        self._timer = self._loop.call_later(seconds, self._interrupt, _TRIES)
        try:
            self._thread.start()
            return await self._future
        finally:
            self._timer.cancel()

    def _work(self) -> None:
        # An interruption may come late: while the one before is dealt with.
        with contextlib.suppress(TimeIsUp):
            with self._lock:
                if self._state == "never":
                    return
                self._state = "first"
            result: Result | None = None
            error: BaseException | None = None
            try:
                try:
                    found = self._first()
                finally:
                    with self._lock:
                        self._state = "rest"
                result = self._rest(found)
            except TimeIsUp:
                error = TimeoutError()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # The loop may have been closed by force.
                self._loop.call_soon_threadsafe(self._end, result, error)

    def _interrupt(self, tries: int) -> None:
        with self._lock:
            state = self._state
            if state == "new":
                self._state = "never"
            elif state == "first" and self._thread.is_alive():
                ident = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(TimeIsUp))
        if state == "first" and tries:
            self._timer = self._loop.call_later(_PAUSE, self._interrupt, tries - 1)
        elif state != "rest":
            if state == "first":
                logger.error("A thread does not end; it is abandoned.")
            self._end(None, TimeoutError())

    def _end(self, result: Result | None, error: BaseException | None) -> None:
        if self._future.done():
            return
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)  # type: ignore[arg-type]
