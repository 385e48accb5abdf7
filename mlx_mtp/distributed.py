"""The processes (ranks) that `mlx.launch` starts for one model, and their collective operations.

Without `mlx.launch` there is one rank, and the collective operations return their argument.
"""

import contextlib
import functools
import ipaddress
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_mtp.errors import BackendError

logger = logging.getLogger(__name__)

NOTICE_SECONDS = 10.0
# The environment variable that mlx.launch sets for each of mlx's backends.
_RING, _JACCL, _NCCL = "MLX_HOSTFILE", "MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"
_BACKENDS = {_RING: "ring", _JACCL: "jaccl", _NCCL: "nccl"}


class World(NamedTuple):
    """This process's rank, and the number of ranks."""

    rank: int = 0
    size: int = 1
    group: Any = None  # mlx.core.distributed.Group


@functools.cache
def world() -> World:
    """Join the other ranks; the first call waits for them. Raises BackendError if that fails."""
    variable = next((key for key in _BACKENDS if os.environ.get(key)), None)
    if variable is None or "MLX_RANK" not in os.environ or (variable == _RING and not _ring()):
        return World()
    # mlx holds the GIL while it waits, so log first.
    logger.info("Waiting for the other ranks to start.")
    try:
        group = mx.distributed.init(strict=True, backend=_BACKENDS[variable])
    except Exception as error:
        raise BackendError(f"This rank can't join the others: {error}") from error
    return World(group.rank(), group.size(), group)


def rank_zero_hosts() -> list[str]:
    """Returns rank 0's addresses: it listens on all of them, and other ranks try them in order.

    A hostfile's address of rank 0 can belong to a cable to the last rank alone (in a ring of three
    or more), and a host name can resolve on its own machine to an address that others can't reach.
    In these cases the second address is the machine's own on its network.
    """
    if os.environ.get(_RING):
        ring = _ring()
        host = ring[0][0].rpartition(":")[0]
        reachable = len(ring) < 3 or host.startswith(("127.", "localhost"))
    else:
        coordinator = os.environ.get(_JACCL)
        host = coordinator.rpartition(":")[0] if coordinator else os.environ[_NCCL]
        reachable = _is_address(host)
    return [host] if reachable else [*dict.fromkeys([host, own_address()])]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def own_address(host: str = "0.0.0.0") -> str:
    """Returns this machine's address on its network, or its host name if that is unknown.

    `host` is "0.0.0.0" for an IPv4 address, "::" for IPv6.
    """
    family, remote = (
        (socket.AF_INET6, "2001:db8::1") if host == "::" else (socket.AF_INET, "192.0.2.1")
    )
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((remote, 9))  # Chooses a network interface; UDP sends nothing here.
        return str(sock.getsockname()[0])
    return socket.gethostname()


@contextlib.contextmanager
def waiting(what: str | Callable[[], str]) -> Iterator[None]:
    """While the block runs, log every `NOTICE_SECONDS` that the process waits for `what`."""
    done = threading.Event()

    def log() -> None:
        while not done.wait(NOTICE_SECONDS):
            logger.warning("Waiting for %s.", what if isinstance(what, str) else what())

    thread = threading.Thread(target=log, name="mlx-mtp-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _ring() -> list[list[str]]:
    text = Path(os.environ[_RING]).read_text()
    return json.loads(text) if text.strip() else []  # Empty for one rank.


def own_folder(path: Path) -> Path:
    """Returns this rank's folder in `path`, or `path` itself if there is one rank."""
    rank, size, _ = world()
    return path if size == 1 else path / f"rank-{rank}-of-{size}"


def all_reduce(x: mx.array) -> mx.array:
    """Sum `x` over all ranks."""
    ranks = world()
    return x if ranks.size == 1 else mx.distributed.all_sum(x, group=ranks.group)


def all_gather(x: mx.array) -> mx.array:
    """Concatenate the arrays of all ranks, in rank order, along the last axis."""
    ranks = world()
    if ranks.size == 1:
        return x
    parts = mx.distributed.all_gather(x[None], group=ranks.group)
    return mx.moveaxis(parts, 0, -2).flatten(-2)


def broadcast(tokens: mx.array) -> mx.array:
    """Returns rank 0's `tokens` on all ranks: only rank 0 knows a request's seed and grammar."""
    ranks = world()
    return tokens if ranks.size == 1 else all_reduce(tokens * int(ranks.rank == 0))
