"""Log lines are written in a thread of their own, so that a blocked log blocks nothing else.

A pipe that nobody empties, or a terminal stopped with ctrl-S, blocks any thread that writes to it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Iterable, Iterator

LOGGERS = ("", "uvicorn", "uvicorn.access")
_CAPACITY = 10_000
_CLOSE_SECONDS = 1.0
_Records = queue.Queue[tuple[logging.Handler, logging.LogRecord] | None]


class BackgroundLog:
    """A thread that writes log records; more than `capacity` waiting ones are dropped."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._records: _Records = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._write, name="mlx-mtp-log", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def attached(self, names: Iterable[str] = LOGGERS) -> Iterator[None]:
        """Within it, the handlers of these loggers write in the background."""
        before = {name: logging.getLogger(name).handlers for name in names}
        for name, handlers in before.items():
            queued: list[logging.Handler] = [_Queued(each, self._records) for each in handlers]
            logging.getLogger(name).handlers = queued
        try:
            yield
        finally:
            for name, handlers in before.items():
                logging.getLogger(name).handlers = handlers

    def close(self, seconds: float = _CLOSE_SECONDS) -> bool:
        """Write what waits, for so long at most; returns whether all of it was written."""
        try:
            self._records.put(None, timeout=seconds)
        except queue.Full:
            return False
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _write(self) -> None:
        while (waiting := self._records.get()) is not None:
            handler, record = waiting
            handler.handle(record)


class _Queued(logging.Handler):
    """Replaces a handler that is to write in the background."""

    def __init__(self, handler: logging.Handler, records: _Records) -> None:
        super().__init__(handler.level)
        self._handler = handler
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._records.put_nowait((self._handler, record))
