"""The prefix cache on disk: KV and snapshots of prefixes that outlive the process.

The engine's thread asks and gives; one other thread reads and writes the files, and sees bytes
alone. Nothing that goes wrong with the disk reaches the engine: a write that fails is dropped, and
a file that can't be read is a miss.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mlx_mtp.cache.prefix_files import PrefixDirectory, StoredFile, pack, unpack
from mlx_mtp.cache.prefix_keys import prefix_keys
from mlx_mtp.cache.prefix_state import Arrays, Segment, Snapshot, join
from mlx_mtp.cache.prefix_tree import Fetch

logger = logging.getLogger(__name__)

READ_SECONDS = 30.0
"""How long a read is waited for: 4 GB from a disk that gives 150 MB a second. A disk that takes
longer is taken to hang, and nothing is read from it until it has answered."""
# For how long nothing is written after the disk refused a write.
_RETRY_SECONDS = 60.0
# How long what has begun may still take when the time for closing the store is over.
_ABANDON_SECONDS = 5.0
# More than an array's entry in a file's header takes, and more than the rest of the header.
_HEADER_BYTES = 256
_MANY_TASKS = 10_000
_SNAPSHOT = "s"


class StoreStats(NamedTuple):
    """Files on the disk and their bytes; files written and dropped since the start."""

    num_nodes: int
    nbytes: int
    num_written: int
    num_dropped: int


@dataclass
class ReadAhead:
    """The prefix that is being read, or has been and was not taken."""

    # Called on the store's thread when it has been read.
    on_done: Callable[[], None] = lambda: None
    files: list[StoredFile] = field(default_factory=list)
    # Of its files, up to the first that could not be read; None: still to come.
    contents: deque[bytes] | None = None

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


class PrefixStore:
    """Prefixes in a directory of their own. All methods are for the engine's thread.

    A file is of use only with those that it builds on, its ancestors. Using it uses these, after
    it: so nothing builds on the least recently used file, and it can be evicted.

    Args:
        path: of the directory; made if it isn't there.
        fingerprint: of all that the numbers depend on; files with another one are removed.
        max_bytes: of all files, those that wait to be written included.
        max_queued_bytes: of what waits to be written; beyond it writes are dropped.

    Raises:
        UsageError: the directory can't be used, isn't safe, or another process uses it.
    """

    def __init__(
        self, path: Path, fingerprint: str, max_bytes: int, max_queued_bytes: int = 1 << 30
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.reader = ReadAhead()
        self._max_queued_bytes = max_queued_bytes
        self._directory = PrefixDirectory(path, fingerprint)
        # Guards what follows, and is never held while the disk works.
        self._lock = threading.Condition()
        self._files: dict[str, StoredFile] = {}
        # Content of those of them that have not been written yet.
        self._pending: dict[str, bytes] = {}
        # What the thread is to do, and since when it has been at the task before these.
        self._tasks: deque[Callable[[], None]] = deque()
        self._began: float | None = None
        self._num_written = self._num_dropped = self._last_use = 0
        self._refused_until = 0.0
        self._complaints: set[int | None] = set()
        self._deadline = math.inf
        with self._lock:
            self._fill(self._directory.found)
        self._thread = threading.Thread(target=self._run, name="mlx-mtp-prefix-store", daemon=True)
        self._thread.start()

    def longest(self, salt: str, tokens: Sequence[int]) -> int:
        """Length of the longest prefix of the tokens that is here with its snapshot, or 0."""
        with self._lock:
            prefixes = reversed(self._prefixes(salt, tokens))
            return next((end for end, key in prefixes if key + _SNAPSHOT in self._files), 0)

    def keep(
        self, salt: str, tokens: Sequence[int], segments: Sequence[Segment], snapshot: Snapshot
    ) -> None:
        """Write what is not here of a prefix, in the background; its bytes are copied now.

        The segments are its KV from the first token to the last.
        """
        with self._lock:
            prefixes = self._prefixes(salt, tokens)
            start, parent = max((p for p in prefixes if p[1] in self._files), default=(0, salt))
        end, key = prefixes[-1]
        try:
            if start < end:
                rows = join([s for s in segments if s.end > start], start)
                if not self._put(StoredFile(key, parent, start, end), rows.arrays, rows.bits):
                    return
            self._put(StoredFile(key + _SNAPSHOT, key, end, end), snapshot.arrays)
        except Exception:
            logger.exception("A prefix could not be given to the disk")

    def touch(self, salt: str, tokens: Sequence[int]) -> None:
        """A prefix was used, perhaps from memory."""
        with self._lock:
            self._touch(_snapshot_key(salt, tokens))

    def drop_snapshot(self, salt: str, tokens: Sequence[int]) -> None:
        """Remove the snapshot at the end of a prefix."""
        with self._lock:
            self._remove(_snapshot_key(salt, tokens))

    def fetch(
        self, salt: str, tokens: Sequence[int], start: int, make_room: Callable[[int], bool]
    ) -> Fetch | tuple[list[Segment], Snapshot]:
        """A prefix's KV from the token `start` or one before it on, and its snapshot.

        Or how far it has come; to be asked again while it is COMING. `make_room` is called with its
        bytes before it is read, and says whether they fit in memory.
        """
        began, reader = self._began, self.reader
        if began is not None and time.monotonic() - began > READ_SECONDS:
            return Fetch.NEVER
        with self._lock:
            lineage = list(self._lineage(_snapshot_key(salt, tokens)))
            files = [*lineage[:1], *(file for file in lineage[1:] if file.end > start)][::-1]
            if not files or files != reader.files:
                self.forget()
                if not files:
                    return Fetch.GONE
                if not make_room(sum(file.nbytes for file in files)):
                    return Fetch.NEVER
                reader.files = files
                self._touch(files[-1].key)
                self._tasks.appendleft(partial(self._read, files))
            contents = reader.contents
            if contents is None:
                return Fetch.COMING
            self.forget()
        if len(contents) < len(files):
            return Fetch.GONE
        # Popped, so that the bytes of each are freed before the arrays of the next are made.
        segments = [Segment(f.start, f.end, *unpack(contents.popleft())) for f in files[:-1]]
        return segments, Snapshot(unpack(contents.popleft())[0])

    def forget(self) -> None:
        """Nothing that was fetched is wanted any more."""
        with self._lock:
            self.reader.files, self.reader.contents = [], None

    def stats(self) -> StoreStats:
        """Gauges and counters now; for any thread."""
        with self._lock:
            num_nodes = len(self._files) - len(self._pending)
            nbytes = self._nbytes() - self._queued_bytes()
            return StoreStats(num_nodes, nbytes, self._num_written, self._num_dropped)

    def flush(self, seconds: float) -> bool:
        """Wait until the thread has nothing left to do; False if that takes longer."""
        with self._lock:
            return self._lock.wait_for(lambda: not (self._began or self._tasks), seconds)

    def close(self, seconds: float = 10.0) -> None:
        """Write what is queued, for so long at most, and leave the directory to others."""
        if self._deadline < math.inf:
            return
        self.forget()
        with self._lock:
            self._deadline = time.monotonic() + seconds
            self._lock.notify_all()
        self._thread.join(seconds + _ABANDON_SECONDS)
        if self._thread.is_alive():
            logger.warning("The disk of %s hangs; it is left as it is.", self.path)
        else:
            self._directory.close()

    def _put(self, file: StoredFile, arrays: Arrays, bits: int | None = None) -> bool:
        """Queue a file unless it is here; False: there is no room for it."""
        at_most = _HEADER_BYTES + sum(array.nbytes + _HEADER_BYTES for array in arrays.values())
        with self._lock:
            self._touch(file.key)
            if file.key in self._files:
                return True
            ancestors = sum(each.nbytes for each in self._lineage(file.parent))
            if (
                ancestors + at_most > self.max_bytes
                or self._queued_bytes() + at_most > self._max_queued_bytes
                or time.monotonic() < self._refused_until
                or self._deadline < math.inf
            ):
                self._num_dropped += 1
                return False
        content = pack(arrays, bits)
        file.nbytes = len(content)
        with self._lock:
            if file.start and file.parent not in self._files:
                return False
            self._files[file.key] = file
            self._touch(file.key)
            self._evict()
            self._pending[file.key] = content
            self._tasks.append(partial(self._write, file))
        return True

    # These are called with the lock held.

    def _nbytes(self) -> int:
        return sum(file.nbytes for file in self._files.values())

    def _queued_bytes(self) -> int:
        return sum(map(len, self._pending.values()))

    def _prefixes(self, salt: str, tokens: Sequence[int]) -> list[tuple[int, str]]:
        """Lengths and keys of the prefixes of a prompt that files may end at, and of the whole."""
        ends = {file.end for file in self._files.values() if file.end < len(tokens)}
        return list(prefix_keys(salt, tokens, sorted({*ends, len(tokens)})))

    def _lineage(self, key: str) -> Iterator[StoredFile]:
        """A file, if it is here, and its ancestors."""
        while (file := self._files.get(key)) is not None:
            yield file
            key = file.parent

    def _touch(self, key: str) -> None:
        for file in self._lineage(key):
            self._last_use = file.used = max(self._last_use + 1, time.time_ns())
            # A disk that hangs must not make them grow without a bound.
            if len(self._tasks) < _MANY_TASKS:
                self._tasks.append(partial(self._directory.mark_used, file))
        self._lock.notify_all()

    def _remove(self, key: str) -> None:
        """Forget a file on which none builds, and have it unlinked, or not written."""
        file = self._files.pop(key, None)
        if file is not None and self._pending.pop(key, None) is None:
            self._tasks.append(partial(self._directory.remove, file))
        self._lock.notify_all()

    def _remove_under(self, key: str) -> int:
        """Remove a file and all that build on it; returns how many."""
        lost = {key: None}
        for file in sorted(self._files.values(), key=_depth):
            if file.parent in lost:
                lost[file.key] = None
        for each in lost:
            self._remove(each)
        return len(lost)

    def _evict(self) -> None:
        """Remove the least recently used files until the others fit."""
        while self._nbytes() > self.max_bytes:
            self._remove(min(self._files.values(), key=lambda file: file.used).key)

    def _fill(self, found: list[StoredFile]) -> None:
        """Take in what was there at the start, but for what lacks an ancestor or is too much."""
        for file in sorted(found, key=_depth):
            if (file.start == 0 or file.parent in self._files) and file.key not in self._files:
                self._files[file.key] = file
            else:
                self._tasks.append(partial(self._directory.remove, file))
        for file in sorted(self._files.values(), key=lambda file: file.used):
            self._touch(file.key)
        self._evict()

    # The rest is the thread's.

    def _run(self) -> None:
        while True:
            with self._lock:
                self._began = None
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._tasks or self._deadline < math.inf)
                if not self._tasks or time.monotonic() > self._deadline:
                    return
                task = self._tasks.popleft()
                self._began = time.monotonic()
            try:
                task()
            except OSError as error:
                self._refused_until = time.monotonic() + _RETRY_SECONDS
                self._complain(error, "written")
            except Exception:
                logger.exception("A file of the prefix cache was not written")

    def _read(self, files: list[StoredFile]) -> None:
        contents: deque[bytes] = deque()
        for file in files:
            if self.reader.files is not files:
                return
            try:
                contents.append(self._pending.get(file.key) or self._directory.read(file))
            except Exception as error:
                if isinstance(error, OSError):
                    self._complain(error, "read")
                else:
                    logger.warning("A prefix in %s is removed: %s", self.path, error)
                with self._lock:
                    self._remove_under(file.key)
                break
        with self._lock:
            if self.reader.files is files:
                self.reader.contents = contents
        self.reader.on_done()

    def _write(self, file: StoredFile) -> None:
        content = self._pending.get(file.key)

        def wanted() -> bool:
            return self._files.get(file.key) is file and time.monotonic() < self._deadline

        if content is None or not wanted():
            return
        try:
            written = self._directory.write(file, content, wanted)
        except Exception:
            with self._lock:
                self._num_dropped += self._remove_under(file.key)
            raise
        with self._lock:
            kept = written and self._files.get(file.key) is file
            if kept:
                del self._pending[file.key]
                self._num_written += 1
        if written and not kept:
            self._directory.remove(file)
        self._directory.sync()
        self._directory.mark_used(file)

    def _complain(self, error: OSError, what: str) -> None:
        """Log an error of the disk, once for each kind."""
        if error.errno not in self._complaints:
            self._complaints.add(error.errno)
            logger.warning(
                "The prefix cache's directory %s can't be %s: %s. The cache goes on in memory; "
                "this is said once.",
                self.path,
                what,
                error.strerror or error,
            )


def _snapshot_key(salt: str, tokens: Sequence[int]) -> str:
    ((_, key),) = prefix_keys(salt, tokens, [len(tokens)])
    return key + _SNAPSHOT


def _depth(file: StoredFile) -> tuple[int, int]:
    """Sorts what builds on a file behind it."""
    return file.end, file.start
