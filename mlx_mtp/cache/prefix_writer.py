"""Writes a prefix store's files in the background. It sees bytes, never an mlx array."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mlx_mtp.cache.prefix_file import HostArray, NodeHeader, encode
from mlx_mtp.cache.prefix_folder import PrefixFolder, UnfinishedFile
from mlx_mtp.cache.prefix_index import Entry, PrefixIndex

logger = logging.getLogger(__name__)


_ABANDON_SECONDS = 5.0
"""What a write of 4 MiB that has begun may still take when the store is closed."""


class _AbandonedError(Exception):
    """The store was closed before the write was done."""


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    header: NodeHeader
    arrays: Mapping[str, HostArray]
    nbytes: int


class PrefixWriter:
    """One thread and its queue. A write that finds no room is dropped; nobody ever waits for one.

    The lock is never held while the disk works, so that one that hangs stops this thread alone.

    Args:
        folder: where to.
        index: what is there; shared, so guarded by `lock`.
        max_bytes: of all files, the one that is being written included.
        max_queued_bytes: of what waits to be written.
        retry_seconds: for how long nothing is tried after the disk refused a write.

    Attributes:
        lock: guards the index and everything here.
        num_written, num_dropped: nodes, since the start.
        queued_bytes: waiting to be written.
    """

    def __init__(
        self,
        folder: PrefixFolder,
        index: PrefixIndex,
        max_bytes: int,
        max_queued_bytes: int,
        retry_seconds: float,
    ) -> None:
        self._folder = folder
        self._index = index
        self._max_bytes = max_bytes
        self._max_queued_bytes = max_queued_bytes
        self._retry_seconds = retry_seconds
        self.lock = threading.Condition(threading.RLock())
        self.num_written = self.num_dropped = self.queued_bytes = 0
        self._jobs: deque[_Write | str] = deque()
        self._pending: dict[str, _Write] = {}
        self._used: dict[str, int] = {}
        self._complaints: set[int | None] = set()
        self._refused_until = 0.0
        self._closing = self._abandon = self._busy = False
        self._thread = threading.Thread(target=self._run, name="mlx-mtp-prefix-store", daemon=True)
        self._thread.start()

    def pending(self, key: str) -> bool:
        """The node waits to be written, or is being written. The caller holds the lock."""
        return key in self._pending

    def pending_nbytes(self, key: str) -> int:
        """Bytes of its arrays if it waits to be written, else 0. The caller holds the lock."""
        job = self._pending.get(key)
        return 0 if job is None else job.nbytes

    def waiting(self, key: str) -> tuple[NodeHeader, Mapping[str, HostArray]] | None:
        """A node that waits to be written, or is being written."""
        with self.lock:
            job = self._pending.get(key)
        return None if job is None else (job.header, job.arrays)

    def has_room(self, nbytes: int) -> bool:
        """A node of so many bytes would be taken now; if not, it counts as dropped.

        The caller holds the lock.
        """
        room = (
            not self._closing
            and nbytes <= self._max_bytes
            and self.queued_bytes + nbytes <= self._max_queued_bytes
            and time.monotonic() >= self._refused_until
        )
        self.num_dropped += not room
        return room

    def put(self, header: NodeHeader, arrays: Mapping[str, HostArray], nbytes: int) -> None:
        """Queue a node for which `has_room`; one with its key that still waits is replaced."""
        with self.lock:
            job = _Write(header, arrays, nbytes)
            self._pending[header.key] = job
            self._jobs.append(job)
            self.queued_bytes += nbytes
            self.lock.notify_all()

    def remove(self, keys: Iterable[str]) -> None:
        """Forget nodes now, and remove their files soon."""
        with self.lock:
            for key in keys:
                self._index.remove(key)
                self._pending.pop(key, None)
                self._used.pop(key, None)
                self._jobs.append(key)
            self.lock.notify_all()

    def pending_under(self, keys: Iterable[str]) -> list[str]:
        """These keys, and the nodes that wait to be written and build on one of them."""
        found = dict.fromkeys(keys)
        with self.lock:
            # In the order of the queue: a parent comes before its children.
            for key, job in self._pending.items():
                if job.header.parent in found:
                    found[key] = None
        return list(found)

    def mark_used(self, keys: Iterable[str], now: int) -> None:
        """Note on the files when they were used, some time soon."""
        with self.lock:
            self._used.update(dict.fromkeys(keys, now))
            self.lock.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until all that was asked for is done; False if that takes longer."""
        with self.lock:
            return self.lock.wait_for(lambda: self._idle() or not self._thread.is_alive(), seconds)

    def _idle(self) -> bool:
        return not (self._jobs or self._pending or self._used or self._busy)

    def complain(self, error: OSError, what: str) -> None:
        """Log an error of the disk, once for each kind."""
        if error.errno not in self._complaints:
            self._complaints.add(error.errno)
            logger.warning(
                "The prefix cache's directory %s can't be %s: %s. The cache goes on in memory; "
                "this is said once.",
                self._folder.path,
                what,
                error.strerror or error,
            )

    def close(self, seconds: float) -> bool:
        """Finish what is queued, for so long at most, and end the thread.

        Returns:
            It has ended; False: the disk hangs, and the thread is left to the process's end.
        """
        with self.lock:
            self._closing = True
            self.lock.notify_all()
        self._thread.join(seconds)
        with self.lock:
            self._abandon = True
            self.lock.notify_all()
        self._thread.join(_ABANDON_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self._jobs or self._used or self._closing)
                used, self._used = self._used, {}
                job = self._jobs.popleft() if self._jobs else None
                ending = self._abandon or (self._closing and job is None)
                self._busy = True
            for key, when in used.items():
                self._folder.mark_used(key, when)
            if job is not None and not self._abandon:
                self._do(job)
            with self.lock:
                self._busy = False
                self.lock.notify_all()
            if ending:
                return

    def _do(self, job: _Write | str) -> None:
        try:
            if isinstance(job, str):
                self._unlink(job)
            else:
                self._write(job)
        except OSError as error:
            self._refused_until = time.monotonic() + self._retry_seconds
            self.complain(error, "written")
        except _AbandonedError:
            pass
        except Exception:
            logger.exception("A node of the prefix cache was not written")
        if isinstance(job, _Write):
            with self.lock:
                self.queued_bytes -= job.nbytes
                if self._pending.get(job.header.key) is job:
                    del self._pending[job.header.key]
                    self.num_dropped += 1

    def _unlink(self, key: str) -> None:
        """Remove a file, unless its node has been put again meanwhile and is there."""
        with self.lock:
            again = key in self._index
        if not again:
            self._folder.remove(key)

    def _write(self, job: _Write) -> None:
        if not self._wanted(job) or time.monotonic() < self._refused_until:
            return
        header = job.header
        pieces = list(encode(header, job.arrays))
        size = sum(map(len, pieces))
        if not self._make_room(job, size):
            return
        file = UnfinishedFile(self._folder, header.key)
        try:
            used = time.time_ns()
            file.write((piece for piece in pieces if self._go_on()), used)
            # Removed or replaced while it was written: then it is not wanted any more.
            if not self._wanted(job):
                file.discard()
                return
            file.publish()
            self._note_written(job, size, used)
        except BaseException:
            file.discard()
            raise
        self._folder.sync()

    def _note_written(self, job: _Write, size: int, used: int) -> None:
        """A file has got its name. If it was removed just then, that is the queue's next job."""
        header = job.header
        with self.lock:
            latest = self._pending.get(header.key)
            if latest is None:
                return
            self._index.add(Entry(header.key, header.parent, header.root, size, used))
            if latest is job:
                del self._pending[header.key]
                self.num_written += 1

    def _go_on(self) -> bool:
        if self._abandon:
            raise _AbandonedError
        return True

    def _wanted(self, job: _Write) -> bool:
        """It is still the latest of its key, and what it builds on is there."""
        header = job.header
        with self.lock:
            has_parent = header.parent == header.root or header.parent in self._index
            return self._pending.get(header.key) is job and has_parent

    def _make_room(self, job: _Write, size: int) -> bool:
        """Remove the least recently used until the file fits; if it can't, nothing is removed."""
        with self.lock:
            spared = self._index.lineage(job.header.parent) | {job.header.key}
            entries = (self._index.get(key) for key in spared)
            if sum(e.nbytes for e in entries if e is not None) + size > self._max_bytes:
                return False
        while True:
            with self.lock:
                if self._index.nbytes + size <= self._max_bytes:
                    return True
                entry = self._index.oldest_leaf(spared)
                if entry is None:
                    return False
                self._index.remove(entry.key)
            self._folder.remove(entry.key)
