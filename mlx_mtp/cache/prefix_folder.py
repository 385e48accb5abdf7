"""The directory of a prefix store: whose it is, who may use it, and what files lie in it.

It holds prompts in clear, so it is for its owner alone: the directory 0700, the files 0600, no
symbolic link is followed, and everything is reached through one descriptor of the directory, so
that nothing can be slipped in under its name later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from mlx_mtp.errors import UsageError

_PREFIX, _SUFFIX, _UNFINISHED = "mlx-mtp-prefix-", ".safetensors", ".tmp"
_LOCK = "mlx-mtp-prefix.lock"
_NODE = re.compile(rf"{_PREFIX}([0-9a-f]{{64}}){re.escape(_SUFFIX)}")
_TEMPORARY = re.compile(rf"{_PREFIX}[0-9a-f]{{64}}\.[0-9a-f]{{8}}{re.escape(_UNFINISHED)}")
_POLL_SECONDS = 0.1


class PrefixFolder:
    """An open, locked directory.

    Args:
        path: made if it isn't there; its parents too.
        lock_seconds: how long to wait for a server that is about to end.

    Raises:
        UsageError: it can't be made or opened, isn't safe, or another process uses it.
    """

    def __init__(self, path: Path, lock_seconds: float) -> None:
        self.path = path
        self._fd = _open_directory(path)
        try:
            self._lock = self._take_lock(lock_seconds)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Let go of the lock and the directory."""
        os.close(self._lock)
        os.close(self._fd)

    def node_keys(self) -> list[str]:
        """Of the nodes whose files are here; what bears our names and is no plain file goes.

        Unfinished files of a process that was killed are removed. Files of other names stay.
        """
        found = []
        for name in os.listdir(self._fd):
            node = _NODE.fullmatch(name)
            if node and stat.S_ISREG(self._lstat(name).st_mode):
                found.append(node[1])
            elif node or _TEMPORARY.fullmatch(name):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._fd)
        return found

    def open(self, key: str) -> io.FileIO:
        """A node's file, for reading.

        Raises:
            OSError: as `os.open`; ELOOP for a symbolic link.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return io.FileIO(os.open(_name(key), flags, dir_fd=self._fd))

    def remove(self, key: str) -> None:
        """Remove a node's file, if it is there.

        Raises:
            OSError: it can't be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_name(key), dir_fd=self._fd)

    def mark_used(self, key: str, used: int) -> None:
        """Set a file's times, in nanoseconds, for the next process to know what is old."""
        with contextlib.suppress(OSError):
            os.utime(_name(key), ns=(used, used), dir_fd=self._fd, follow_symlinks=False)

    def sync(self) -> None:
        """Make renames last."""
        os.fsync(self._fd)

    def _lstat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def _take_lock(self, seconds: float) -> int:
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            lock = os.open(_LOCK, flags, 0o600, dir_fd=self._fd)
        except OSError as error:
            raise UsageError(f"--prefix-cache-dir {self.path}: {_reason(error)}.") from None
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except OSError as error:
                taken = error.errno in (errno.EAGAIN, errno.EACCES)
                if taken and time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                    continue
                os.close(lock)
                why = "is in use by another server; give each a directory of its own"
                if not taken:
                    why = f"can't be locked: {_reason(error)}"
                raise UsageError(f"--prefix-cache-dir {self.path} {why}.") from None


class UnfinishedFile:
    """A node's file while it is written; it gets its name when it is whole and on the disk.

    Args:
        folder: where.
        key: of the node.

    Raises:
        OSError: here and from the methods, as the system says.
    """

    def __init__(self, folder: PrefixFolder, key: str) -> None:
        self._dir = folder._fd
        self._final = _name(key)
        self._name = f"{_PREFIX}{key}.{secrets.token_hex(4)}{_UNFINISHED}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._name, flags, 0o600, dir_fd=self._dir)

    def write(self, pieces: Iterable[bytes | memoryview], used: int) -> int:
        """Write all pieces through to the disk; returns how many bytes that was.

        Args:
            pieces: of the file.
            used: its times, in nanoseconds; the system's own are some milliseconds late.
        """
        written = 0
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    count = os.write(self._fd, view)
                    view, written = view[count:], written + count
            os.utime(self._fd, ns=(used, used))
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
        return written

    def publish(self) -> None:
        """Give it its name, in place of what has that now."""
        os.replace(self._name, self._final, src_dir_fd=self._dir, dst_dir_fd=self._dir)

    def discard(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._dir)


def _name(key: str) -> str:
    return f"{_PREFIX}{key}{_SUFFIX}"


def _open_directory(path: Path) -> int:
    flag = f"--prefix-cache-dir {path}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise UsageError(f"{flag} is a symbolic link; name the directory itself.") from None
        raise UsageError(f"{flag} can't be used: {_reason(error)}.") from None
    try:
        _check_safe(fd, flag)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_safe(fd: int, flag: str) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise UsageError(
            f"{flag} belongs to user {found.st_uid}, not to the server's user {os.geteuid()}; "
            "it would hold unencrypted prompts. Choose a directory of your own."
        )
    if found.st_mode & 0o022:
        raise UsageError(
            f"{flag} can be written by others (mode {found.st_mode & 0o777:o}); whoever writes "
            "there could change answers. Make it yours alone: chmod 700."
        )
    names = os.listdir(fd)
    if found.st_mode & 0o077 and all(name.startswith("mlx-mtp-prefix") for name in names):
        # Nobody else's files are hidden by that.
        os.fchmod(fd, 0o700)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
