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
from mlx_mtp.errors import UNKNOWN_RETRY_SECONDS
from mlx_mtp.server.http.access import key_of
from mlx_mtp.server.http.fair_executor import FairExecutor

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine

MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
REASONS = ("queue_full", "draining", "engine", "connections", "bytes")  # labels of the metric

_MONITORING = re.compile("/health|/metrics|(/live|/page)(/.*)?|")  # answered to the end
_SLOTS = "mlx_mtp.slots"
PIECE = 64 << 10
"""Bytes of an answer that are written at once; as many of each body and answer are not counted:
they are bounded by the number of connections."""
# Bytes that a body takes until its request ends, for each of its own: text with one character
# beyond U+FFFF takes four; and for each of its objects, which become Python's.
BODY_BYTES, OBJECT_BYTES = 4, 512
_HELD = "mlx_mtp.held"


def client_of(scope: Scope, user: str | None) -> tuple[str, str]:
    """The client that an HTTP request belongs to; a `user` in its body replaces its agent.

    First comes what a client can't choose freely (API key and address), then what it says of
    itself. Waiting clients take turns by the first, and only within it by the second
    (`engine.fair_queue`): agents on one machine are distinguished, and inventing names gains
    nothing.
    """
    address = scope["client"][0] if scope.get("client") else ""
    agent = _digest(Headers(scope=scope).get("user-agent", ""))
    return f"{key_of(scope)[:16]}@{address}", f"user {_digest(user)}" if user else agent


def salt_of(scope: Scope, salt: str | None) -> str:
    """A request's `cache_salt`, such that the requests of different keys share no prefixes."""
    return f"{key_of(scope)} {salt or ''}"


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
        # Large bodies are parsed, and large answers written, one at a time.
        self.parsing, self.packing = FairExecutor(1), FairExecutor(1)
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


class HeldBytes:
    """What requests' bodies and unread answers take in memory: bounded in all, and for a client.

    It is held until the request's end. BytesLimitError: others leave too little for it.
    """

    def __init__(self, most: int, rejected: Counter[str]) -> None:
        self.most, self.total = most, 0
        self._of: Counter[str] = Counter()
        self._rejected = rejected

    def take_body(self, scope: Scope, piece: bytes) -> None:
        """Count a piece of a body."""
        self.take(scope, BODY_BYTES * len(piece) + OBJECT_BYTES * piece.count(b"{"))

    def take(self, scope: Scope, nbytes: int, *, always: bool = False) -> None:
        """Count more bytes of a request; `always`: whatever others hold."""
        client, own = client_of(scope, None)[0], _counted(scope)
        scope[_HELD] = scope.get(_HELD, 0) + nbytes
        more = _counted(scope) - own
        for held, most in ((self.total, self.most), (self._of[client], self.most * 3 // 4)):
            # A request alone is bounded by the longest body.
            if more and held > own and held + more > most and not always:
                scope[_HELD] -= nbytes
                self._rejected["bytes"] += 1
                raise errors.BytesLimitError(
                    "The bodies and unread answers of other requests take all memory that there "
                    "is for them. Try again later.",
                    retry_after=UNKNOWN_RETRY_SECONDS,
                )
        self.total += more
        self._of[client] += more

    def give_back(self, scope: Scope) -> None:
        client, own = client_of(scope, None)[0], _counted(scope)
        scope.pop(_HELD, None)
        self.total -= own
        self._of[client] -= own
        if not self._of[client]:
            del self._of[client]


def _counted(scope: Scope) -> int:
    return max(0, int(scope.get(_HELD, 0)) - PIECE)


def _retry(seconds: float) -> int:
    return min(max(math.ceil(seconds), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
