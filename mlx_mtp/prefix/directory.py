"""The directory of the prefix cache on disk, and the format of its files.

The files hold keys, values and states of prompts and answers, unencrypted: the directory has mode
0700 and the files 0600, no symbolic link is followed, and every file is opened through one
descriptor of the directory. A file is written by `mx.save_safetensors`; its name says which rows of
which prefix it holds. A SHA-256 in its metadata covers the fingerprint, the name and all bytes but
its own; it is checked before anything is parsed.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mtp.errors import UsageError
from mlx_mtp.kernels.formats import TYPES

logger = logging.getLogger(__name__)

_PREFIX = "mlx-mtp-prefix-"
_NAME = re.compile(
    _PREFIX + r"([0-9a-f]{8})-([0-9a-f]{40}s?)-([0-9a-f]{40})-(\d+)-(\d+)\.safetensors"
)
# Files of any version of this program, finished or not.
_OURS = re.compile(_PREFIX + r"[0-9a-f]{8}[-.0-9a-fs]*\.(safetensors|tmp)")
_LOCK = "mlx-mtp-prefix.lock"
_LOCK_SECONDS = 3.0  # time to wait for a server that is about to end
_POLL_SECONDS = 0.1
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_SLICE = 4 << 20
_DIGEST = b'"sha256":"'
_BLANK = "0" * 64
_DIGEST_WITHIN = 4096  # bytes within which the digest is found: metadata comes first in a file
_HASH_BLOCK = 256 << 20  # bytes of weights per task: several threads read one large file
_HASH_PIECE = 1 << 18
_HASH_THREADS = 8


@dataclass(slots=True, eq=False)
class StoredFile:
    """A file with rows of KV that continue those of another file, or with a snapshot."""

    key: str  # key of the prefix up to `end` (see `prefix_keys`), and "s" for a snapshot
    parent: str  # key of the KV file that it builds on, or the salt's root
    start: int  # first token of its rows
    end: int  # token after its rows; equal to `start` for a snapshot
    nbytes: int = 0
    used: int = 0  # time of the last use, in nanoseconds
    content: bytes | None = None  # None once it is written


def pack(arrays: Mapping[str, mx.array], bits: int | None) -> bytes:
    """Returns a file's content with a blank digest.

    Only for the engine's thread, as CUDA can move a buffer.
    """
    file = io.BytesIO()
    mx.save_safetensors(file, dict(arrays), {"bits": str(bits or 0), "sha256": _BLANK})
    return file.getvalue()


def unpack(content: bytes) -> tuple[dict[str, mx.array], int | None]:
    """Returns the arrays and bits of a file's content, whose digest has been checked.

    `mx.load` would read a Python file on a thread that needs the GIL, and on a CPU
    `mx.clear_cache` holds the GIL while it waits for such threads: a deadlock.
    """
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    bits = int(header.pop("__metadata__")["bits"])
    arrays = {}
    with mx.stream(mx.cpu):  # A GPU's stream would first run everything launched before.
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            data = mx.array(np.frombuffer(content, np.uint8, end - begin, start + begin))
            arrays[name] = data.view(TYPES[entry["dtype"]]).reshape(entry["shape"])
        mx.eval(arrays)
    return arrays, bits or None


def kv_fingerprint(config: Mapping[str, Any], files: Iterable[Path], **facts: object) -> str:
    """Returns a hash, 64 hexadecimal digits, of everything that cached values depend on.

    Weights are hashed whole, and are then in the system's page cache for loading. Sizes, times and
    samples can stay equal when a file is replaced (reproducible images, `rsync -t`).
    """
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        blocks = [
            (path, pool.map(partial(_digest, path), range(0, path.stat().st_size, _HASH_BLOCK)))
            for path in sorted(files)
        ]
        weights = [(path.name, *digests) for path, digests in blocks]
    others = {name: str(value) for name, value in facts.items()}
    text = json.dumps([config, weights, others], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(path: Path, start: int) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(_HASH_PIECE))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        for _ in range(0, _HASH_BLOCK, _HASH_PIECE):
            digest.update(piece[: file.readinto(piece)])
    return digest.hexdigest()


class PrefixDirectory:
    """An open, locked directory; raises UsageError if it is in use, unsafe or unusable."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self._fingerprint = fingerprint
        self._mark = fingerprint[:8]
        flag = f"--prefix-cache-dir {path}"
        with contextlib.ExitStack() as opened:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700)
                self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
                opened.callback(os.close, self._fd)
                _check_safe(self._fd, flag)
                lock = os.open(_LOCK, os.O_RDONLY | os.O_CREAT | _SAFE, 0o600, dir_fd=self._fd)
                opened.callback(os.close, lock)
                _take_lock(lock, flag)
                self.found = self._scan()  # the files that were there
            except OSError as error:
                why = f"can't be used: {error.strerror or error}"
                if path.is_symlink():
                    why = "is a symbolic link; name the directory itself"
                raise UsageError(f"{flag} {why}.") from None
            self.close = opened.pop_all().close

    def read(self, file: StoredFile) -> bytes:
        """Returns a file's content; raises ValueError if it is not what was written."""
        name = self._name(file)
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _SAFE, dir_fd=self._fd)
        with io.FileIO(fd) as opened:
            if os.fstat(fd).st_size != file.nbytes:
                raise ValueError("its size is not what it was")
            content = opened.readall()
        before, digest, behind = self._signed(name, content)
        if content[len(before) : -len(behind)] != digest:
            raise ValueError("its content is damaged")
        return content

    def write(self, file: StoredFile, content: bytes, goes_on: Callable[[], bool]) -> bool:
        """Write a file; returns False if `goes_on` returned False meanwhile."""
        name = self._name(file)
        temporary = f"{_PREFIX}{self._mark}-{file.key}.{secrets.token_hex(4)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
        with contextlib.ExitStack() as stack:
            fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
            stack.callback(os.close, fd)
            try:
                for piece in self._signed(name, content):
                    while piece and goes_on():
                        piece = piece[os.write(fd, piece[:_SLICE]) :]
                if goes_on():
                    os.fsync(fd)
                if not goes_on():
                    return False
                os.replace(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                os.fsync(self._fd)  # for the name to survive a power failure
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=self._fd)
        return True

    def remove(self, file: StoredFile) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name(file), dir_fd=self._fd)

    def mark_used(self, file: StoredFile) -> None:
        """Set a file's times to its last use, for the next process."""
        with contextlib.suppress(OSError):
            times = file.used, file.used
            os.utime(self._name(file), ns=times, dir_fd=self._fd, follow_symlinks=False)

    def _scan(self) -> list[StoredFile]:
        """The directory's files; removes those of another fingerprint and unfinished ones."""
        files, num_removed = [], 0
        for name in os.listdir(self._fd):
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            match = _NAME.fullmatch(name)
            if match and match[1] == self._mark and stat.S_ISREG(status.st_mode):
                place = match[2], match[3], int(match[4]), int(match[5])
                files.append(StoredFile(*place, status.st_size, status.st_mtime_ns))
            elif _OURS.fullmatch(name):
                num_removed += 1
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._fd)
        if num_removed:
            why = "they are of another model, version or setting, or were not finished"
            logger.info("%d files in %s removed: %s", num_removed, self.path, why)
        return files

    def _name(self, file: StoredFile) -> str:
        """A file's name: at most the 143 bytes that eCryptfs allows."""
        keys = f"{self._mark}-{file.key}-{file.parent}"
        return f"{_PREFIX}{keys}-{file.start}-{file.end}.safetensors"

    def _signed(self, name: str, content: bytes) -> tuple[memoryview, ...]:
        """The content before its digest, the right digest, and the content after the digest."""
        start = content.find(_DIGEST, 0, _DIGEST_WITHIN) + len(_DIGEST)
        view = memoryview(content)
        before, behind = view[:start], view[start + len(_BLANK) :]
        digest = hashlib.sha256(f"{self._fingerprint} {name} ".encode())
        digest.update(before)
        digest.update(behind)
        return before, memoryview(digest.hexdigest().encode()), behind


def _check_safe(fd: int, flag: str) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"{flag} belongs to user {status.st_uid}, not to the server's user {os.geteuid()}; "
            "it would hold unencrypted prompts. Choose a directory of your own."
        )
    if status.st_mode & 0o022:
        raise UsageError(
            f"{flag} can be written by others (mode {status.st_mode & 0o777:o}); whoever writes "
            "there could change answers. Make it yours alone: chmod 700."
        )
    names = os.listdir(fd)
    if status.st_mode & 0o077 and all(name.startswith("mlx-mtp-prefix") for name in names):
        # Only if that hides no files of other programs.
        os.fchmod(fd, 0o700)


def _take_lock(lock: int, flag: str) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                why = "is in use by another server; give each a directory of its own"
                raise UsageError(f"{flag} {why}.") from None
            time.sleep(_POLL_SECONDS)
