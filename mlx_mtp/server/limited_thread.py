"""A job on a thread of its own, of which the first part may take so long and no longer."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

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
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Result] = loop.create_future()
    lock = threading.Lock()
    state = "new"  # Then "first" and "rest"; or "never", where it would begin too late.
    timer: asyncio.TimerHandle

    def end(result: Any, error: BaseException | None) -> None:
        if error is None and not ended.done():
            ended.set_result(result)
        elif error is not None and not ended.done():
            ended.set_exception(error)

    def work() -> None:
        nonlocal state
        result, error = None, None
        # An interruption may come late: while the one before is dealt with.
        with contextlib.suppress(TimeIsUp):
            with lock:
                if state == "never":
                    return
                state = "first"
            try:
                try:
                    found = first()
                finally:
                    with lock:
                        state = "rest"
                result = rest(found)
            except BaseException as raised:
                error = TimeoutError() if isinstance(raised, TimeIsUp) else raised
            with contextlib.suppress(RuntimeError):  # The loop may have been closed by force.
                loop.call_soon_threadsafe(end, result, error)

    thread = threading.Thread(target=work, daemon=True, name="limited")

    def interrupt(tries: int) -> None:
        nonlocal state, timer
        with lock:
            state = "never" if state == "new" else state
            if state == "first" and thread.is_alive():
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(TimeIsUp))
        if state == "first" and tries:
            timer = loop.call_later(_PAUSE, interrupt, tries - 1)
        elif state != "rest":
            if state == "first":
                logger.error("A thread does not end; it is abandoned.")
            end(None, TimeoutError())

    timer = loop.call_later(seconds, interrupt, _TRIES)
    try:
        thread.start()
        return await ended
    finally:
        timer.cancel()
