"""A server that another mlx-mtp process started: the socket that it inherits, and how it ends."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

PARENT = "MLX_MTP_PARENT"
"""Environment variable: the descriptor of a listening Unix socket and the parent's number of API
keys, such as "5 2"."""
OWNED = "MLX_MTP_OWNED"
"""Environment variable, set if the server must stop when the process that started it ends."""


class Adopted(NamedTuple):
    """What a server inherits from its parent process."""

    sock: socket.socket  # a listening Unix socket
    num_keys: int  # the parent's number of API keys


def watch_starter(environ: MutableMapping[str, str] = os.environ) -> None:
    """End this process, if another mlx-mtp process started it, when that process has ended.

    Call this at the very start of the program, as imports and loading take a while. The watching
    thread blocks in a read, which the system ends immediately. The thread then needs the GIL for a
    moment; mlx releases the GIL while it reads weights and computes.
    """
    if PARENT in environ:
        with socket.socket(fileno=os.dup(_fields(environ[PARENT])[0])) as sock:
            path = Path(os.fsdecode(sock.getsockname()))
        threading.Thread(target=_end_with_parent, args=(path,), daemon=True).start()
    elif environ.pop(OWNED, None) is not None:
        threading.Thread(target=_stop_with_owner, daemon=True).start()


def adopted(environ: MutableMapping[str, str] = os.environ) -> Adopted | None:
    """Returns what this process inherits from its parent; None if no parent started it."""
    if (text := environ.pop(PARENT, None)) is None:
        return None
    fd, num_keys = _fields(text)
    return Adopted(socket.socket(fileno=fd), num_keys)


def _fields(text: str) -> tuple[int, int]:
    fd, num_keys = map(int, text.split())
    return fd, num_keys


def _end_with_parent(path: Path) -> None:
    _wait_for_other_side()
    # The parent was killed, or has given up this process: nobody waits for its answers.
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()
    os._exit(1)


def _stop_with_owner() -> None:
    _wait_for_other_side()
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_for_other_side() -> None:
    """Wait for the end of standard input, a pipe whose other end the starting process holds."""
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 10):
            pass
