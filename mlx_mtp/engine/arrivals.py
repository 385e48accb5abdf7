"""Reading what an engine delivers, for callers without an event loop."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from time import perf_counter

from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.request import RequestOutput
from mlx_mtp.errors import EngineStoppedError

Arrivals = queue.SimpleQueue[tuple[float, Sequence[RequestOutput]]]
"""The outputs of each step, with the time (`perf_counter`) at which they were delivered."""

PATIENCE = 1.0
"""Seconds of silence after which the engine's health is checked."""


def start(engine: Engine) -> Arrivals:
    """Start an engine; returns the queue of what it delivers."""
    arrived: Arrivals = queue.SimpleQueue()
    engine.start(lambda outputs: arrived.put((perf_counter(), outputs)))
    return arrived


def read_outputs(
    engine: Engine, arrived: Arrivals, num_requests: int
) -> Iterator[tuple[float, RequestOutput]]:
    """Yield outputs with their times until so many requests have ended.

    Raises the error of a request that fails, and EngineStoppedError if the engine dies silently.
    """
    while num_requests:
        reason = engine.unhealthy_reason
        try:
            at, outputs = arrived.get(timeout=PATIENCE)
        except queue.Empty:
            # Checked before the wait: what a dying engine still sent has had the time to come.
            if reason is not None:
                raise EngineStoppedError(f"The engine has stopped: {reason}") from None
            continue
        for output in outputs:
            if output.error is not None:
                raise output.error
            num_requests -= output.finish_reason is not None
            yield at, output
