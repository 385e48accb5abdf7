"""A server that a parent process has started (`mlx_mtp.router`): its socket, and its end."""

import contextlib
import os
import socket
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

PARENT = "MLX_MTP_PARENT"
"""Variable of the environment: a listening Unix socket's descriptor, and how many API keys the
parent has, such as "5 2"."""


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


def _end_with_parent(path: Path) -> None:
    """Wait for the end of standard input, a pipe of which the parent has the other side."""
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 10):
            pass
    # The parent was killed, or is through with this process: whom an answer was for has left.
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()
    os._exit(1)
