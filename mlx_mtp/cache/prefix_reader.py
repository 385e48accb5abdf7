"""Reads a prefix store's files ahead of their use, so that nobody waits in the disk.

It sees bytes, never an mlx array. What may be asked for at once is its caller's affair: all of it
counts in `nbytes` until it is taken or forgotten.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from mlx_mtp.cache.prefix_file import StoredNode

logger = logging.getLogger(__name__)

READ_SECONDS = 30.0
"""Nobody waits longer for a read: 4 GB from a disk that gives 150 MB a second. A file that takes
longer is taken to hang, and nothing is to be had until it has been given up or read."""
_STOP_SECONDS = 5.0
"""What a read of 4 MiB that has begun may still take when the reader is stopped."""


class _ForgottenError(Exception):
    """Nobody wants the node any more."""


class PrefixReader:
    """One thread and what it was asked for. It starts with the first question.

    Args:
        read: gives a node, or None if it can't be had; takes as long as the disk does. What it is
            given beside the key it calls between two pieces; that raises when the node isn't wanted
            any more.

    Attributes:
        on_done: called on the thread when all that was asked for has been read.
    """

    def __init__(self, read: Callable[[str, Callable[[], None]], StoredNode | None]) -> None:
        self.on_done: Callable[[], None] = lambda: None
        self._read = read
        self._lock = threading.Condition()
        self._asked: dict[str, int] = {}
        self._found: dict[str, StoredNode | None] = {}
        self._waiting: deque[str] = deque()
        self._began: float | None = None
        self._stopped_at: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Of all that was asked for and has not been taken. A file that hangs while it is forgotten
        holds what has been read of it besides."""
        return sum(self._asked.values())

    @property
    def done(self) -> bool:
        """All that was asked for has been read, or can't be."""
        return len(self._found) == len(self._asked)

    @property
    def hangs(self) -> bool:
        """It has been in one file for too long."""
        began = self._began
        return began is not None and time.monotonic() - began > READ_SECONDS

    def asked(self, key: str) -> bool:
        """The node was asked for, and has been neither taken nor forgotten."""
        return key in self._asked

    def ask(self, key: str, nbytes: int) -> None:
        """Have a node read that takes so many bytes, unless it was asked for already."""
        with self._lock:
            if key in self._asked or self._stopped_at is not None:
                return
            self._asked[key] = nbytes
            self._waiting.append(key)
            if self._thread is None:
                name = "mlx-mtp-prefix-reader"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._lock.notify()

    def take(self, key: str) -> StoredNode | None:
        """A node that has been read; None if it could not be, or was not asked for."""
        with self._lock:
            self._asked.pop(key, None)
            return self._found.pop(key, None)

    def forget(self) -> None:
        """Nothing that was asked for is wanted any more."""
        with self._lock:
            self._asked.clear()
            self._found.clear()
            self._waiting.clear()

    def stop(self) -> None:
        """Read nothing more; see `ended`."""
        self.forget()
        with self._lock:
            self._stopped_at = time.monotonic()
            self._lock.notify()

    def ended(self) -> bool:
        """Wait for the thread's end, for some seconds from `stop` on; False: the disk hangs."""
        assert self._stopped_at is not None
        if self._thread is not None:
            self._thread.join(max(self._stopped_at + _STOP_SECONDS - time.monotonic(), 0))
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._stopped_at is not None)
                if self._stopped_at is not None:
                    return
                key = self._waiting.popleft()
                if key in self._found:
                    continue  # It was forgotten and asked for again while it was read.
                self._began = time.monotonic()
            try:
                node = self._attempt(key)
            except _ForgottenError:
                # Should it have been asked for again meanwhile, it waits there.
                self._began = None
                continue
            with self._lock:
                self._began = None
                if key in self._asked:
                    self._found[key] = node
                done = self.done
            if done:
                self.on_done()

    def _attempt(self, key: str) -> StoredNode | None:
        def go_on() -> None:
            if key not in self._asked:
                raise _ForgottenError

        try:
            return self._read(key, go_on)
        except _ForgottenError:
            raise
        except Exception:
            logger.exception("A prefix could not be read; its tokens are computed instead")
            return None
