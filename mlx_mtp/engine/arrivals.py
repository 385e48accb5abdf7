"""Waiting for what an engine delivers, for callers without an event loop."""

from __future__ import annotations

import queue
from typing import Protocol, TypeVar

from mlx_mtp.errors import EngineStoppedError

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds of silence after which the engine's health is looked at."""


class Health(Protocol):
    """What an engine says of itself."""

    @property
    def unhealthy_reason(self) -> str | None:
        """Why it takes no requests; None while it does."""


def next_arrival(arrived: queue.SimpleQueue[T], engine: Health) -> T:
    """What was put there next.

    Args:
        arrived: filled by the callback that the engine was started with.
        engine: asked when nothing comes.

    Raises:
        EngineStoppedError: nothing will come any more.
    """
    while True:
        reason = engine.unhealthy_reason
        try:
            return arrived.get(timeout=PATIENCE)
        except queue.Empty:
            # Asked before the wait: what a dying engine still sent has had the time to come.
            if reason is not None:
                raise EngineStoppedError(f"The engine has stopped: {reason}") from None
