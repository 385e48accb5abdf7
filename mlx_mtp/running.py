"""The servers that run on this machine, each with a file in the user's runtime directory.

A server keeps its file locked: if the file can be locked, its server was killed.
"""

import contextlib
import fcntl
import json
import logging
import os
import stat
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from mlx_mtp.errors import UNEXPECTED

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 16  # maximum bytes to read from a server's file


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers requests, or is about to end."""

    pid: int
    url: str  # for clients on this machine, without /v1
    models: list[str]  # the names that requests may ask for
    directories: list[str]  # of the models' files
    needs_key: bool
    started: float  # seconds since the epoch
    # The following are None if the server has several models, which are loaded on demand.
    max_model_len: int | None = None  # tokens of prompt and answer together
    weights: int | None = None  # bytes of the weights in memory, with the head's
    memory_limit: int | None = None  # bytes that the server's memory plan may use


@contextlib.contextmanager
def announced(server: RunningServer) -> Iterator[None]:
    """Let `running_servers` find a server while the context lasts.

    Only the user can read the server's file. If it can't be written, a warning is logged.
    """
    with contextlib.ExitStack() as stack:
        try:
            directory = _directory()
            path, draft = (directory / f"{server.pid}{end}" for end in (".json", ".new"))
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(directory.lstat(), stat.S_IFDIR):
                raise PermissionError(f"{directory} is not this user's alone")
            draft.unlink(missing_ok=True)
            descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            file = stack.enter_context(os.fdopen(descriptor, "w", encoding="utf-8"))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            json.dump(asdict(server), file)
            file.flush()
            draft.replace(path)
            stack.callback(path.unlink, missing_ok=True)
        except OSError as error:
            logger.warning("`mlx-mtp ps` will not show this server: %s", error)
        yield


def running_servers() -> list[RunningServer]:
    """Returns this user's servers, oldest first, and removes the files of servers that were killed.

    Server files that can't be read are skipped.
    """
    found = list[RunningServer]()
    with contextlib.suppress(OSError):
        directory = _directory()
        if _is_own(directory.lstat(), stat.S_IFDIR):
            found = [each for path in directory.glob("*.json") if (each := _read(path))]
    return sorted(found, key=lambda server: server.started)


def _read(path: Path) -> RunningServer | None:
    with contextlib.suppress(OSError, *UNEXPECTED):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            if not _is_own(os.fstat(descriptor), stat.S_IFREG):
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return RunningServer(**json.loads(file.read(_MOST_BYTES)))
            path.unlink()
    return None


def _is_own(status: os.stat_result, kind: int) -> bool:
    """Returns True for a file of this kind that this user owns and nobody else can access."""
    is_private = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.getuid() and is_private


def _directory() -> Path:
    with warnings.catch_warnings():
        # Without XDG_RUNTIME_DIR, platformdirs warns that it takes a directory in /tmp.
        warnings.simplefilter("ignore")
        return platformdirs.user_runtime_path("mlx-mtp")
