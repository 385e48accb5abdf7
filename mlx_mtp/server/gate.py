"""Who may come in: room in the queue, and a server that is neither ending nor stuck."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlx_mtp.errors import (
    DrainingError,
    EngineHungError,
    EngineStoppedError,
    InvalidRequestError,
    MlxMtpError,
    QueueFullError,
)

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine

MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
UNKNOWN_RETRY_SECONDS = 2
"""What a client is told to wait before anything has been finished to judge by."""
_NUM_REMEMBERED = 64

REASONS = ("queue_full", "draining", "engine", "connections")
"""Why requests are refused before they are looked at; labels of the metric."""


class Ticket:
    """Places that one HTTP request holds until it ends."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._places = 0

    def reserve(self, places: int) -> None:
        """Take so many places, or none.

        Raises:
            QueueFullError: there are not so many now.
            InvalidRequestError: there never are.
        """
        assert not self._places, "a request reserves once"
        self._gate.take(places)
        self._places = places

    def close(self) -> None:
        """Give them back."""
        self._gate.leave(self._places)
        self._places = 0


class Gate:
    """Counts the sequences of all requests, from their check to their end.

    As many may be here as the engine computes at once and `max_queue` more, so a request is never
    refused while a row is free.

    Args:
        engine: whose health is asked.
        max_queue: sequences that may wait for a row.
        clock: seconds.

    Attributes:
        capacity: most sequences that may be here.
        num_open: HTTP requests that have come in and not ended.
        draining: the server ends; nobody may come in.
        drain_seconds: how long that may still take.
        rejected: requests refused, by `REASONS`.
    """

    def __init__(
        self, engine: Engine, max_queue: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self.capacity = engine.info.max_num_seqs + max_queue
        self._max_queue = max_queue
        self._clock = clock
        self._held = 0
        self.num_open = 0
        self._ends: deque[tuple[float, int]] = deque(maxlen=_NUM_REMEMBERED)
        self.draining = False
        self.drain_seconds = 0.0
        self.rejected: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Sequences that are here."""
        return self._held

    def check(self) -> None:
        """Refuse a request of which nothing is known yet, if no request can be taken.

        Raises:
            DrainingError, EngineStoppedError, EngineHungError, QueueFullError: why.
        """
        if self.draining:
            raise self.draining_error()
        if not self._engine.healthy:
            self.rejected["engine"] += 1
            raise EngineStoppedError(f"The engine has stopped: {self._engine.unhealthy_reason}")
        hang = self._engine.hang_reason
        if hang is not None:
            self.rejected["engine"] += 1
            raise EngineHungError(
                f"No requests are accepted: {hang}.", retry_after=UNKNOWN_RETRY_SECONDS
            )
        if self._held >= self.capacity:
            raise self._full(1)

    def draining_error(self) -> MlxMtpError:
        """What new requests get while the server ends."""
        self.rejected["draining"] += 1
        wait = min(max(math.ceil(self.drain_seconds), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        return DrainingError("The server is shutting down.", retry_after=wait)

    def enter(self) -> Ticket:
        """An HTTP request begins; close its ticket when it ends."""
        self.num_open += 1
        return Ticket(self)

    def leave(self, places: int) -> None:
        """See `Ticket.close`."""
        self.num_open -= 1
        self._give_back(places)

    def take(self, places: int) -> None:
        """See `Ticket.reserve`."""
        if places > self.capacity:
            raise InvalidRequestError(
                f"The request is for {places} answers (prompts times n), but this server holds "
                f"{self.capacity} at most, running and waiting ones together."
            )
        if self._held + places > self.capacity:
            raise self._full(places)
        self._held += places

    def _give_back(self, places: int) -> None:
        if places:
            self._held -= places
            self._ends.append((self._clock(), places))
        assert self._held >= 0

    def retry_after(self, places: int) -> int:
        """Whole seconds until so many places will be free, going by the latest ends."""
        missing = self._held + places - self.capacity
        if len(self._ends) < 2:
            return UNKNOWN_RETRY_SECONDS
        # The first end only starts the clock; the time since the last counts, should nothing end.
        count = sum(places for _, places in list(self._ends)[1:])
        seconds = missing * (self._clock() - self._ends[0][0]) / count
        return min(max(math.ceil(seconds), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _full(self, places: int) -> QueueFullError:
        self.rejected["queue_full"] += 1
        return QueueFullError(
            f"The server is busy: {self._held} answers are running or waiting, and no more than "
            f"{self._max_queue} may wait (--max-queue). Try again later.",
            retry_after=self.retry_after(places),
        )
