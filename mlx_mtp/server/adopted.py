"""A server that another process of ours has started: the socket it is given, and its end."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

PARENT = "MLX_MTP_PARENT"
"""Variable of the environment: a listening Unix socket's descriptor, and how many API keys the
parent has, such as "5 2"."""
OWNED = "MLX_MTP_OWNED"
"""Variable of the environment, set where the server stops with the process that started it."""


class Adopted(NamedTuple):
    """What a parent process has given."""

    sock: socket.socket  # listens
    num_keys: int


def watch_starter(environ: MutableMapping[str, str] = os.environ) -> None:
    """End this process when the one of ours that started it, if one did, is gone.

    For the very start of the program, as imports and loads take a while. The watching thread waits
    in the system, which wakes it at once. Then it needs the interpreter's lock for a moment; mlx
    releases that while it reads weights and computes.
    """
    if PARENT in environ:
        with socket.socket(fileno=os.dup(_fields(environ[PARENT])[0])) as sock:
            path = Path(os.fsdecode(sock.getsockname()))
        threading.Thread(target=_end_with_parent, args=(path,), daemon=True).start()
    elif environ.pop(OWNED, None) is not None:
        threading.Thread(target=_stop_with_owner, daemon=True).start()


def adopted(environ: MutableMapping[str, str] = os.environ) -> Adopted | None:
    """Return what a parent has given to this process; None if no parent started it."""
    if (text := environ.pop(PARENT, None)) is None:
        return None
    fd, num_keys = _fields(text)
    return Adopted(socket.socket(fileno=fd), num_keys)


def _fields(text: str) -> tuple[int, int]:
    fd, num_keys = map(int, text.split())
    return fd, num_keys


def _end_with_parent(path: Path) -> None:
    _wait_for_other_side()
    # The parent was killed, or is through with this process: whom an answer was for has left.
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()
    os._exit(1)


def _stop_with_owner() -> None:
    _wait_for_other_side()
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_for_other_side() -> None:
    """Wait for the end of standard input, a pipe of which the other process has the other side."""
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 10):
            pass
