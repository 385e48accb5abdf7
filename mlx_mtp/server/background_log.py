"""Log lines are written by a thread of their own: who doesn't read them must not stop the server.

A pipe that nobody empties, or a terminal that was stopped with ctrl-S, blocks whoever writes to it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LOGGERS = ("", "uvicorn", "uvicorn.access")
_CAPACITY = 10_000
"""Records that wait to be written; those beyond it are lost."""
_END_SECONDS = 1.0
"""How long the last lines may take."""


class BackgroundLog:
    """A thread and its queue of records.

    Attributes:
        num_lost: records that found no room.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.num_lost = 0
        self._queue: queue.Queue[tuple[logging.Handler, logging.LogRecord] | None]
        self._queue = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._run, name="mlx-mtp-log", daemon=True)
        self._thread.start()

    def put(self, handler: logging.Handler, record: logging.LogRecord) -> None:
        """Have a record written some time soon."""
        try:
            self._queue.put_nowait((handler, record))
        except queue.Full:
            self.num_lost += 1

    def end(self, seconds: float = _END_SECONDS) -> bool:
        """Write what waits, for so long at most; False: nobody reads."""
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            return False
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            handler, record = job
            handler.handle(record)


class _Behind(logging.Handler):
    """Hands records on to the handler that it stands in for."""

    def __init__(self, handler: logging.Handler, log: BackgroundLog) -> None:
        super().__init__(handler.level)
        self._handler = handler
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.put(self._handler, record)


@contextmanager
def in_background(log: BackgroundLog, names: Iterable[str] = LOGGERS) -> Iterator[None]:
    """Within it the handlers of these loggers, of all by default, write in the background."""
    before = {name: logging.getLogger(name).handlers for name in names}
    for name, handlers in before.items():
        logging.getLogger(name).handlers = [_Behind(handler, log) for handler in handlers]
    try:
        yield
    finally:
        for name, handlers in before.items():
            logging.getLogger(name).handlers = handlers
