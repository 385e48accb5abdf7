"""`mlx-mtp serve` on several ranks: checks that they agree, runs ranks 1 and up, and ends them."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import signal
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_mtp import __version__
from mlx_mtp.config import EngineConfig, flags_of
from mlx_mtp.distributed import world
from mlx_mtp.errors import RankError
from mlx_mtp.machine import memory_limit
from mlx_mtp.models.files import WEIGHTS, read_header
from mlx_mtp.ranks.links import Link, Links, connect
from mlx_mtp.server.serving import give_up

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine
    from mlx_mtp.models.model import LoadedModel
    from mlx_mtp.prefix.disk import PrefixStore

logger = logging.getLogger(__name__)

_ALIKE = ("dtype", "prefix_cache_dir", "prefix_cache_dir_size", "mtp_draft_vocab")
"""Options that must be the same on all ranks, in addition to those of the engine."""
_SAMPLE = 256  # bytes of each tensor that the fingerprint covers
_HANG_SECONDS = 10.0
"""All ranks end if a step seems to hang for this long."""
_LOOK_SECONDS = 1.0
_FLUSH_SECONDS = 2.0  # for clients to read the error, and for the log


def connect_ranks(options: argparse.Namespace, loaded: LoadedModel) -> Links | Link | None:
    """Connect rank 0 and each other rank; None for a single rank.

    Raises UsageError if versions, options or models differ between ranks.
    """
    if world().size == 1:
        return None
    values = {flag.name: getattr(options, flag.key) for flag in flags_of(EngineConfig)}
    values |= {f"--{key.replace('_', '-')}": getattr(options, key) for key in _ALIKE}
    facts = {
        "mlx-mtp": __version__,
        **{name: metadata.version(name) for name in ("mlx", "mlx-lm")},
        **{name: str(value) for name, value in values.items()},
        "MTP head": loaded.head is not None,
        "model": fingerprint(loaded.path),
    }
    return connect(world(), facts, memory_limit(options.memory_limit).nbytes, give_up)


def follow_rank_zero(loaded: LoadedModel, link: Link, store: PrefixStore | None) -> int:
    """Run a rank other than 0 until rank 0 ends; returns the exit status."""
    from mlx_mtp.ranks.follower import follow

    rank = world().rank
    # Rank 0 finishes the running requests, and then ends the other ranks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: logger.info("Rank %d ends when rank 0 does.", rank))
    loaded.load_weights()
    link.send("ready")
    logger.info("Rank %d of %d is ready.", rank, world().size)
    try:
        follow(loaded, link, store)
    except Exception as error:
        logger.debug("Why rank %d ends", rank, exc_info=True)
        cause = error if isinstance(error, RankError) else repr(error)
        reason = f"rank {rank} can't go on: {cause}"
        link.fail(reason)
        give_up(reason)
    if store is not None:
        store.close()
    return 0


def watch(engine: Engine, links: Links) -> None:
    """Wait until all ranks are ready; then end all ranks if one is lost or a step hangs."""
    links.wait()  # Reading the weights can take longer than `_HANG_SECONDS`.

    def end(reason: str) -> None:
        logger.critical("The ranks can't go on together: %s.", reason)
        engine.fail(reason)
        time.sleep(_FLUSH_SECONDS)
        give_up(reason)

    def watch_steps() -> None:
        since = reason = None
        while since is None or time.monotonic() - since < _HANG_SECONDS:
            time.sleep(_LOOK_SECONDS)
            reason = engine.hang_reason
            since = None if reason is None else since or time.monotonic()
        links.fail(f"{reason}; steps that others have computed: {links.launched_steps()}")

    links.on_failure = end
    threading.Thread(target=watch_steps, name="mlx-mtp-ranks", daemon=True).start()


def fingerprint(path: Path) -> str:
    """Returns a hash, 16 hex digits, of a model's config.json and each tensor's first bytes."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob(WEIGHTS)):
        start, header = read_header(file)
        header.pop("__metadata__", None)
        digest.update(json.dumps(header, sort_keys=True).encode())
        with file.open("rb") as content:
            for entry in header.values():
                content.seek(start + entry["data_offsets"][0])
                digest.update(content.read(_SAMPLE))
    return digest.hexdigest()[:16]
