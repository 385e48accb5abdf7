"""Rejects requests that can't be served now, before anything is computed for them."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_mtp import errors
from mlx_mtp.server.access import key_of

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine

MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
UNKNOWN_RETRY_SECONDS = 2  # Before enough has ended to estimate it.
REASONS = ("queue_full", "draining", "engine", "connections")  # labels of the metric
# What a client can't choose freely (API key and address), and what it says of itself (its agent).
# Waiting clients take turns by the first, and only within it by the second (`engine.fair_queue`):
# so agents on one machine are distinguished, and inventing names gains nothing.
Client = tuple[str, str]

_MONITORING = re.compile("/health|/metrics|(/live|/page)(/.*)?|")  # answered to the end
_SLOTS = "mlx_mtp.slots"


def client_of(scope: Scope, user: str | None) -> Client:
    """The client that an HTTP request belongs to; a `user` in its body replaces its agent."""
    address = scope["client"][0] if scope.get("client") else ""
    agent = _digest(Headers(scope=scope).get("user-agent", ""))
    return f"{key_of(scope)[:16]}@{address}", f"user {_digest(user)}" if user else agent


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


class RequestLimiter:
    """Holds as many sequences as the engine computes at once and `max_queue` more.

    They are counted over all HTTP requests, from their check to their end.
    """

    def __init__(
        self, engine: Engine, max_queue: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.capacity = engine.info.max_num_seqs + max_queue
        self.held = 0
        self.rejected: Counter[str] = Counter()
        self._drain_until = math.inf
        self._engine, self._max_queue, self._clock = engine, max_queue, clock
        self._ends: deque[tuple[float, int]] = deque(maxlen=64)

    def drain(self, seconds: float) -> None:
        self._drain_until = self._clock() + seconds

    @property
    def drain_seconds(self) -> float:
        return self._drain_until - self._clock()

    @property
    def draining(self) -> bool:
        return self._drain_until < math.inf

    def check(self, generating: Container[str], scope: Scope) -> None:
        path = scope["path"].rstrip("/")
        if self.draining and not _MONITORING.fullmatch(path):
            self.rejected["draining"] += 1
            left = _retry(self.drain_seconds)
            raise errors.DrainingError("The server is shutting down.", retry_after=left)
        if scope["method"] != "POST" or path not in generating:
            return
        if not self._engine.healthy:
            self.rejected["engine"] += 1
            reason = self._engine.unhealthy_reason
            raise errors.EngineStoppedError(f"The engine has stopped: {reason}")
        if self._engine.hang_reason is not None:
            self.rejected["engine"] += 1
            message = f"No requests are accepted: {self._engine.hang_reason}."
            raise errors.EngineHungError(message, retry_after=UNKNOWN_RETRY_SECONDS)
        if self.held >= self.capacity:
            raise self._queue_full(1)

    def reserve(self, scope: Scope, count: int) -> None:
        if count > self.capacity:
            asked = f"The request is for {count} answers (prompts times n), but this server holds"
            raise errors.InvalidRequestError(
                f"{asked} {self.capacity} at most, running and waiting ones together."
            )
        if self.held + count > self.capacity:
            raise self._queue_full(count)
        self.held += count
        scope[_SLOTS] = count

    def release(self, scope: Scope) -> None:
        if count := scope.pop(_SLOTS, 0):
            self.held -= count
            self._ends.append((self._clock(), count))

    def _queue_full(self, count: int) -> errors.QueueFullError:
        self.rejected["queue_full"] += 1
        retry_after = UNKNOWN_RETRY_SECONDS
        if len(self._ends) > 1:
            missing = self.held + count - self.capacity
            # The first end only starts the clock; the time since the last counts too.
            ended = sum(size for _, size in self._ends) - self._ends[0][1]
            retry_after = _retry(missing * (self._clock() - self._ends[0][0]) / ended)
        message = f"The server is busy: {self.held} answers are running or waiting, and no more"
        message += f" than {self._max_queue} may wait (--max-queue). Try again later."
        return errors.QueueFullError(message, retry_after=retry_after)


def _retry(seconds: float) -> int:
    return min(max(math.ceil(seconds), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
