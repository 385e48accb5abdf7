"""The prefix cache on disk: KV and snapshots of prefixes that outlive the process."""

import logging
import math
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path

import mlx.core as mx

from mlx_mtp import __version__
from mlx_mtp.config import EngineConfig
from mlx_mtp.distributed import own_folder
from mlx_mtp.errors import UsageError
from mlx_mtp.models.files import WEIGHTS
from mlx_mtp.models.gemm.routes import digest
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.prefix.directory import PrefixDirectory, StoredFile, kv_fingerprint, pack, unpack
from mlx_mtp.prefix.radix_tree import Fetch, prefix_keys, root_key
from mlx_mtp.prefix.segments import Entry, Segment, join_segments

logger = logging.getLogger(__name__)

# Maximum time of a read: 4 GB at 150 MB/s. A slower disk counts as hanging until it answers.
READ_SECONDS = 30.0
_RETRY_SECONDS = 60.0  # time without writes after the disk refused a write
_ABANDON_SECONDS = 5.0  # time for a task in progress, beyond the time for closing
_HEADER_BYTES = 256  # upper bound of an array's entry in a header, and of the header's rest
_MANY_TASKS = 10_000


class PrefixStore:
    """Prefixes in a directory. Methods are for the engine's thread, unless marked thread-safe.

    The store's own thread reads and writes the files, and sees only bytes. No failure of the disk
    reaches the engine: a failed write is dropped, and a file that can't be read is a miss. A file
    is usable only with its ancestors, the files that it builds on. Using a file also marks its
    ancestors as used, after the file. So no file builds on the least recently used one, which can
    be evicted.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        max_bytes: int,
        max_queued_bytes: int = 1 << 30,
        # Facts that must stay the same for files to be found. Called at first use, because they
        # are known only when the model is loaded.
        choices: Callable[[], str] = str,
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.on_read: Callable[[], None] = lambda: None  # called on the store's thread
        # The files that are being read, or that have been read but not fetched; then their content.
        self.reading: list[StoredFile] = []
        self._contents: deque[bytes] | None = None
        self._max_queued_bytes, self._get_choices = max_queued_bytes, choices
        self._directory = PrefixDirectory(path, fingerprint)
        self._lock = threading.Condition()  # guards all below; never held while the disk works
        self._files: dict[str, StoredFile] = {}  # by key; a file follows the files it builds on
        self._tasks: deque[Callable[[], None]] = deque()  # for the thread
        self._began: float | None = None  # when the thread began its current task
        self._num_written = self._num_dropped = self._last_use = 0
        self._refused_until = 0.0
        self._complaints: set[int | None] = set()
        self._deadline = math.inf
        with self._lock:
            self._fill()
        self._thread = threading.Thread(target=self._run, name="mlx-mtp-prefix-store", daemon=True)
        self._thread.start()

    def longest(self, salt: str, tokens: Sequence[int]) -> int:
        """Returns the length of the longest prefix that is stored with its snapshot, or 0."""
        with self._lock:
            prefixes = reversed(self._prefixes(salt, tokens))
            return next((end for end, key in prefixes if key + "s" in self._files), 0)

    def keep(self, salt: str, tokens: Sequence[int], entry: Entry) -> None:
        """Copy the parts of a prefix that are not stored yet, to write them in the background."""
        *segments, snapshot = entry
        with self._lock:
            prefixes = self._prefixes(salt, tokens)
            start, parent = max(
                (p for p in prefixes if p[1] in self._files), default=(0, self._root(salt))
            )
        end, key = prefixes[-1]
        try:
            if start < end:
                rows = join_segments([s for s in segments if s.end > start], start)
                if not self._put(StoredFile(key, parent, start, end), rows):
                    return
            self._put(StoredFile(key + "s", key, end, end), snapshot)
        except Exception:
            logger.exception("A prefix could not be given to the disk")

    def touch(self, salt: str, tokens: Sequence[int]) -> None:
        with self._lock:
            self._touch(self._snapshot_key(salt, tokens))

    def drop_snapshot(self, salt: str, tokens: Sequence[int]) -> None:
        with self._lock:
            self._remove(self._snapshot_key(salt, tokens))

    def fetch(
        self, salt: str, tokens: Sequence[int], start: int, make_room: Callable[[int], bool]
    ) -> Fetch | Entry:
        """Returns a prefix's KV from token `start` or an earlier one on, and then its snapshot.

        Or it returns the state of the read: call again while it is COMING. `make_room` is called
        with the number of bytes before they are read; it returns whether they fit in memory.
        """
        if self.seconds_left <= 0:
            return Fetch.LATE
        with self._lock:
            lineage = self._lineage(self._snapshot_key(salt, tokens))
            files = [f for f in lineage if f.end > start or f.start == f.end][::-1]
            if not files or files != self.reading:
                self.forget()
                if not files:
                    return Fetch.GONE
                if not make_room(sum(file.nbytes for file in files)):
                    return Fetch.NO_ROOM
                self.reading = files
                self._touch(files[-1].key)
                self._tasks.appendleft(partial(self._read, files))
            contents = self._contents
            if contents is None:
                return Fetch.COMING
            self.forget()
        # Popped, so that a file's bytes are freed before the arrays of the next file are made.
        return [Segment(file.start, file.end, *unpack(contents.popleft())) for file in files]

    @property
    def seconds_left(self) -> float:
        began, now = self._began, time.monotonic()
        return READ_SECONDS if began is None else began + READ_SECONDS - now

    def forget(self) -> None:
        """Drop the files that are being read, or that have been read but not fetched."""
        with self._lock:
            self.reading, self._contents = [], None

    def stats(self) -> dict[str, int]:
        """Returns the fields of `PrefixCacheStats` about files. Thread-safe."""
        with self._lock:
            written = [file.nbytes for file in self._files.values() if file.content is None]
            return {
                "num_files": len(written),
                "file_nbytes": sum(written),
                "num_files_written": self._num_written,
                "num_files_dropped": self._num_dropped,
            }

    def close(self, seconds: float = 10.0) -> None:
        """Write queued files for at most `seconds`, and unlock the directory."""
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

    def _put(self, file: StoredFile, content: Segment) -> bool:
        """Queue a file unless it is stored; returns False if there is no room for it."""
        at_most = content.nbytes + _HEADER_BYTES * (1 + len(content.arrays))
        with self._lock:
            self._touch(file.key)
            if file.key in self._files:
                return True
            ancestors = sum(each.nbytes for each in self._lineage(file.parent))
            queued = sum(len(each.content or b"") for each in self._files.values())
            if (
                ancestors + at_most > self.max_bytes
                or queued + at_most > self._max_queued_bytes
                or time.monotonic() < self._refused_until
                or self._deadline < math.inf
            ):
                self._num_dropped += 1
                return False
        file.content = pack(content.arrays, content.bits)
        file.nbytes = len(file.content)
        with self._lock:
            if file.start and file.parent not in self._files:
                return False
            self._files[file.key] = file
            self._tasks.append(partial(self._write, file))
            self._touch(file.key)
            self._evict()
        return True

    # These are called with the lock held.

    def _prefixes(self, salt: str, tokens: Sequence[int]) -> list[tuple[int, str]]:
        """Lengths and keys of a prompt's prefixes at which files end, and of the whole prompt."""
        ends = {file.end for file in self._files.values() if file.end < len(tokens)}
        return list(prefix_keys(self._root(salt), tokens, sorted({*ends, len(tokens)})))

    def _snapshot_key(self, salt: str, tokens: Sequence[int]) -> str:
        ((_, key),) = prefix_keys(self._root(salt), tokens, [len(tokens)])
        return key + "s"

    def _root(self, salt: str) -> str:
        """The root of the keys. Files of other choices have other keys, so they are not used."""
        return root_key(f"{salt} {self._choices}") if self._choices else salt

    @cached_property
    def _choices(self) -> str:
        return self._get_choices()

    def _lineage(self, key: str) -> Iterator[StoredFile]:
        while (file := self._files.get(key)) is not None:
            yield file
            key = file.parent

    def _touch(self, key: str) -> None:
        for file in self._lineage(key):
            self._last_use = file.used = max(self._last_use + 1, time.time_ns())
            # While the disk hangs, the queue must not grow without a limit.
            if len(self._tasks) < _MANY_TASKS:
                self._tasks.append(partial(self._directory.mark_used, file))
        self._lock.notify_all()

    def _remove(self, key: str) -> int:
        """Remove a file and all files that build on it; returns an upper bound of their number."""
        lost = {key}
        for file in list(self._files.values()):
            if file.key in lost or file.parent in lost:
                lost.add(file.key)
                del self._files[file.key]
                if file.content is None:
                    self._tasks.append(partial(self._directory.remove, file))
        self._lock.notify_all()
        return len(lost)

    def _evict(self) -> None:
        while sum(file.nbytes for file in self._files.values()) > self.max_bytes:
            self._remove(min(self._files.values(), key=lambda file: file.used).key)

    def _fill(self) -> None:
        """Take over the directory's files, except those that lack an ancestor or don't fit."""
        for file in sorted(self._directory.found, key=lambda file: (file.end, file.start)):
            if (file.start == 0 or file.parent in self._files) and file.key not in self._files:
                self._files[file.key] = file
            else:
                self._tasks.append(partial(self._directory.remove, file))
        for file in sorted(self._files.values(), key=lambda file: file.used):
            self._touch(file.key)
        self._evict()

    # The rest runs on the store's thread.

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
            if self.reading is not files:
                break  # Forgotten meanwhile.
            try:
                contents.append(file.content or self._directory.read(file))
            except Exception as error:
                if isinstance(error, OSError):
                    self._complain(error, "read")
                else:
                    logger.warning("A prefix in %s is removed: %s", self.path, error)
                with self._lock:
                    self._remove(file.key)
                break
        else:
            with self._lock:
                if self.reading is files:
                    self._contents = contents
        self.on_read()

    def _write(self, file: StoredFile) -> None:
        def goes_on() -> bool:
            return self._files.get(file.key) is file and time.monotonic() < self._deadline

        if file.content is None or not goes_on():
            return
        try:
            written = self._directory.write(file, file.content, goes_on)
        except Exception:
            with self._lock:
                self._num_dropped += self._remove(file.key)
            raise
        with self._lock:
            stored = written and self._files.get(file.key) is file
            if stored:
                file.content = None
                self._num_written += 1
        if written and not stored:
            self._directory.remove(file)

    def _complain(self, error: OSError, what: str) -> None:
        if error.errno not in self._complaints:
            self._complaints.add(error.errno)
            why = "%s. The cache goes on in memory; this is said once."
            message = f"The prefix cache's directory %s can't be %s: {why}"
            logger.warning(message, self.path, what, error.strerror or error)


def open_store(
    model: LoadedModel,
    config: EngineConfig,
    dtype: str,
    path: Path,
    max_bytes: int,
    make: Callable[..., PrefixStore] = PrefixStore,
) -> PrefixStore:
    """Open a model's directory of prefixes; raises UsageError if it can't be used."""
    if not config.prefix_cache_size:
        raise UsageError(f"--prefix-cache-dir {path}: prefix_cache_size is 0, so nothing is kept.")
    device = mx.device_info()
    packages = [f"{each.name} {each.version}" for each in metadata.distributions()]
    mark = kv_fingerprint(
        model.config,
        model.path.glob(WEIGHTS),
        head=model.head_source,
        kv_bits=config.kv_cache_quantization,
        dtype=dtype,
        exact=config.exact,
        # With --max-decode-pause the lengths of chunks vary with time in any case.
        prefill_step_size=config.prefill_step_size
        if config.exact or not config.max_decode_pause
        else None,
        device=[mx.default_device(), device.get("device_name"), device.get("architecture")],
        platform=[platform.system(), platform.machine()],
        # CUDA's libraries choose how they compute a product, and so its bits.
        packages=sorted(each for each in packages if each.startswith(("mlx", "nvidia-"))),
        version=__version__,
    )
    # The bits also depend on choices that are measured later, when the model is loaded.
    facts = partial(digest, model.model) if config.exact else str
    return make(own_folder(path), mark, max_bytes, choices=facts)
