"""The ranks that compute one model together, as `mlx.launch` starts them; else there is one."""

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
# What mlx.launch sets for each of mlx's backends.
_RING, _JACCL, _NCCL = "MLX_HOSTFILE", "MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"
_BACKENDS = {_RING: "ring", _JACCL: "jaccl", _NCCL: "nccl"}


class World(NamedTuple):
    """This process's rank, and how many there are."""

    rank: int = 0
    size: int = 1
    group: Any = None  # mlx's


@functools.cache
def world() -> World:
    """Join the other ranks at the first call, which waits for them."""
    found = next((key for key in _BACKENDS if os.environ.get(key)), None)
    if found is None or "MLX_RANK" not in os.environ or (found == _RING and not _ring()):
        return World()
    # mlx holds the interpreter's lock meanwhile, so nothing can be told later.
    logger.info("Waiting for the other ranks to start.")
    try:
        group = mx.distributed.init(strict=True, backend=_BACKENDS[found])
    except Exception as error:
        raise BackendError(f"This rank can't join the others: {error}") from error
    return World(group.rank(), group.size(), group)


def rank_zero_hosts() -> list[str]:
    """Where the others may reach rank 0, which asks and listens nowhere else.

    The addresses of a ring of three or more may be those of cables, and rank 0's that of the cable
    to the last rank; and a name may lead on its own machine to an address that others don't reach.
    So the address that the machine has for all others is the second there.
    """
    if os.environ.get(_RING):
        ring = _ring()
        found = ring[0][0].rpartition(":")[0]
        alone = len(ring) < 3 or found.startswith(("127.", "localhost"))
    else:
        coordinator = os.environ.get(_JACCL)
        found = coordinator.rpartition(":")[0] if coordinator else os.environ[_NCCL]
        alone = _is_address(found)
    return [found] if alone else [*dict.fromkeys([found, own_address()])]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def own_address(host: str = "0.0.0.0") -> str:
    """This machine's address on its network, or its name, where `host` means all addresses."""
    family, far = (
        (socket.AF_INET6, "2001:db8::1") if host == "::" else (socket.AF_INET, "192.0.2.1")
    )
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((far, 9))  # Chooses the way there, and sends nothing.
        return str(sock.getsockname()[0])
    return socket.gethostname()


@contextlib.contextmanager
def waiting(what: str | Callable[[], str]) -> Iterator[None]:
    """Log what is being waited for, such as another rank, every `NOTICE_SECONDS`."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(NOTICE_SECONDS):
            logger.warning("Waiting for %s.", what if isinstance(what, str) else what())

    thread = threading.Thread(target=tell, name="mlx-mtp-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ring() -> list[list[str]]:
    text = Path(os.environ[_RING]).read_text()
    return json.loads(text) if text.strip() else []  # Empty for one rank.


def own_folder(path: Path) -> Path:
    """Where this rank keeps its part of what is kept there: one of its own, unless it is alone."""
    rank, size, _ = world()
    return path if size == 1 else path / f"rank-{rank}-of-{size}"


def all_reduce(x: mx.array) -> mx.array:
    """The sum of all ranks' parts of a result."""
    ranks = world()
    return x if ranks.size == 1 else mx.distributed.all_sum(x, group=ranks.group)


def all_gather(x: mx.array) -> mx.array:
    """All ranks' parts of a result, in the order of ranks along the last axis."""
    ranks = world()
    if ranks.size == 1:
        return x
    parts = mx.distributed.all_gather(x[None], group=ranks.group)
    return mx.moveaxis(parts, 0, -2).flatten(-2)


def broadcast(tokens: mx.array) -> mx.array:
    """What rank 0 has drawn, on all ranks: the others know no grammar and no seed."""
    ranks = world()
    return tokens if ranks.size == 1 else all_reduce(tokens * int(ranks.rank == 0))
