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


def adopted(environ: MutableMapping[str, str] = os.environ) -> Adopted | None:
    """Return what a parent has given to this process, which from now on ends with the parent.

    None if no parent started it.
    """
    if (text := environ.pop(PARENT, None)) is None:
        return None
    fd, num_keys = map(int, text.split())
    sock = socket.socket(fileno=fd)
    path = Path(os.fsdecode(sock.getsockname()))
    threading.Thread(target=_end_with_parent, args=(path,), daemon=True).start()
    return Adopted(sock, num_keys)


def stop_with_owner(environ: MutableMapping[str, str] = os.environ) -> None:
    """Stop this process, as a signal would, when the `mlx-mtp launch` that started it is gone."""
    if environ.pop(OWNED, None) is not None:
        threading.Thread(target=_stop_with_owner, daemon=True).start()


def _stop_with_owner() -> None:
    _wait_for_other_side()
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_for_other_side() -> None:
    """Wait for the end of standard input, a pipe of which the other process has the other side."""
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 10):
            pass


def _end_with_parent(path: Path) -> None:
    _wait_for_other_side()
    # The parent was killed, or is through with this process: whom an answer was for has left.
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()
    os._exit(1)
