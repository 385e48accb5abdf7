"""Limits what requests use: slots of the engine, threads, memory for bodies and unread answers.

A request that can't be served now is refused before anything is computed for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Scope

from mlx_mtp import errors
from mlx_mtp.engine.fair_queue import FLAT_COST, QUANTUM, FairQueue
from mlx_mtp.errors import UNKNOWN_RETRY_SECONDS
from mlx_mtp.server.http.record import known_client, record_of

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine

T = TypeVar("T")

MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
REASONS = ("queue_full", "draining", "engine", "connections", "bytes")  # of `requests_rejected`
FULL = "mlx_mtp.full"  # key in the state of a connection beyond the limit, with the limit as value
PIECE = 64 << 10
"""Bytes of an answer that are written at a time. The first `PIECE` bytes of each request, body and
answer together, are not counted: the number of connections bounds them."""
# Bytes of memory that a body takes until its request ends: per byte of the body, as a Python text
# with one character beyond U+FFFF takes four per character, and per JSON object, for a dict.
BODY_BYTES, OBJECT_BYTES = 4, 512
SMALL = 1 << 18
"""Characters or bytes: texts up to this size take only milliseconds to read or write."""


class RequestLimiter:
    """Bounds the sequences that are running or waiting, over all HTTP requests.

    There are `max_num_seqs` slots for running sequences, and `max_queue` for waiting ones. A
    request holds its slots from its check to its end.
    """

    def __init__(
        self, engine: Engine, max_queue: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.capacity = engine.info.max_num_seqs + max_queue
        self.num_reserved = 0  # slots in use
        self.rejected: Counter[str] = Counter()
        self.draining = False
        # Large bodies are parsed, and large answers written, one at a time.
        self.parsing, self.packing = FairExecutor(1), FairExecutor(1)
        self._drain_until = math.inf
        self._engine, self._max_queue, self._clock = engine, max_queue, clock
        self._ends: deque[tuple[float, int]] = deque(maxlen=64)  # time and freed slots of each

    def drain(self, seconds: float) -> None:
        """Refuse new requests; running ones have `seconds` to end."""
        self.draining, self._drain_until = True, self._clock() + seconds

    @property
    def drain_seconds(self) -> float:
        return self._drain_until - self._clock()

    def check_connection(self, scope: Scope) -> None:
        """Raises ConnectionLimitError beyond the limit of connections, unless `route.when_full`."""
        limit = scope.get("state", {}).get(FULL)
        if limit is not None and not record_of(scope).route.when_full:
            self.rejected["connections"] += 1
            raise errors.ConnectionLimitError(
                f"{limit} clients are connected and busy; there is no room for more.",
                retry_after=UNKNOWN_RETRY_SECONDS,
            )

    def check_admission(self, scope: Scope) -> None:
        """Raises an EngineStoppedError or QueueFullError if the request can't be served now.

        Nothing is reserved.
        """
        route = record_of(scope).route
        if self.draining and not route.while_draining:
            self.rejected["draining"] += 1
            left = _retry_after(self.drain_seconds)
            raise errors.DrainingError("The server is shutting down.", retry_after=left)
        if scope["method"] != "POST" or not route.generates:
            return
        if (reason := self._engine.unhealthy_reason) is not None:
            self.rejected["engine"] += 1
            raise errors.EngineStoppedError(f"The engine has stopped: {reason}")
        if (reason := self._engine.hang_reason) is not None:
            self.rejected["engine"] += 1
            message = f"No requests are accepted: {reason}."
            raise errors.EngineHungError(message, retry_after=UNKNOWN_RETRY_SECONDS)
        if self.num_reserved >= self.capacity:
            raise self._queue_full(1)

    def reserve(self, scope: Scope, count: int) -> None:
        """Reserve `count` slots for a request.

        Raises QueueFullError, or InvalidRequestError if the server has fewer slots.
        """
        if count > self.capacity:
            answers = f"The request is for {count} answers (prompts times n), but this server holds"
            raise errors.InvalidRequestError(
                f"{answers} {self.capacity} at most, running and waiting ones together."
            )
        if self.num_reserved + count > self.capacity:
            raise self._queue_full(count)
        self.num_reserved += count
        record_of(scope).num_slots = count

    def release(self, scope: Scope) -> None:
        """Free a request's slots; a second call does nothing."""
        record = record_of(scope)
        if record.num_slots:
            self.num_reserved -= record.num_slots
            self._ends.append((self._clock(), record.num_slots))
            record.num_slots = 0

    def _queue_full(self, count: int) -> errors.QueueFullError:
        self.rejected["queue_full"] += 1
        retry_after = UNKNOWN_RETRY_SECONDS
        if len(self._ends) > 1:
            missing = self.num_reserved + count - self.capacity
            # The first end only starts the clock; the time since the last end counts too.
            ended = sum(size for _, size in self._ends) - self._ends[0][1]
            retry_after = _retry_after(missing * (self._clock() - self._ends[0][0]) / ended)
        message = (
            f"The server is busy: {self.num_reserved} answers are running or waiting, and no more "
            f"than {self._max_queue} may wait (--max-queue). Try again later."
        )
        return errors.QueueFullError(message, retry_after=retry_after)


class HeldBytes:
    """Limits the memory of bodies and unread answers: `limit` bytes, three quarters per client.

    A request holds its bytes until it ends.
    """

    def __init__(self, limit: int, rejected: Counter[str]) -> None:
        self.limit, self.total = limit, 0
        self._per_client: Counter[str] = Counter()
        self._rejected = rejected

    def reserve(self, scope: Scope, nbytes: int, *, always: bool = False) -> None:
        """Count `nbytes` more of a request; raises BytesLimitError if others leave too little.

        If `always`, the bytes are counted whatever other requests hold.
        """
        record = record_of(scope)
        before = max(0, record.num_bytes - PIECE)
        added = max(0, record.num_bytes + nbytes - PIECE) - before
        if not added:
            record.num_bytes += nbytes
            return
        client = known_client(scope)
        for held, limit in (
            (self.total, self.limit),
            (self._per_client[client], self.limit * 3 // 4),
        ):
            # A request that is alone is limited by the maximum body size only.
            if held > before and held + added > limit and not always:
                self._rejected["bytes"] += 1
                raise errors.BytesLimitError(
                    "The bodies and unread answers of other requests take all memory that there "
                    "is for them. Try again later.",
                    retry_after=UNKNOWN_RETRY_SECONDS,
                )
        record.num_bytes += nbytes
        self.total += added
        self._per_client[client] += added

    def release(self, scope: Scope) -> None:
        """Free a request's bytes; a second call does nothing."""
        record = record_of(scope)
        counted, record.num_bytes = max(0, record.num_bytes - PIECE), 0
        if not counted:
            return
        client = known_client(scope)
        self.total -= counted
        self._per_client[client] -= counted
        if not self._per_client[client]:
            del self._per_client[client]


class FairExecutor:
    """Runs at most `max_running` calls at the same time; clients take turns.

    They run on `executor`, or on the event loop's default one. `run_by_size` doesn't wait for a
    turn with texts of up to `small` characters.
    """

    def __init__(
        self, max_running: int, executor: Executor | None = None, small: int = SMALL
    ) -> None:
        self._free, self._executor, self._small = max_running, executor, small
        self._queue: Any = FairQueue()

    async def run_by_size(self, size: int, client: tuple[str, ...], work: Callable[[], T]) -> T:
        """Call `work` on a thread: in the client's turn, or immediately if `size` is small."""
        if size <= self._small:
            return await asyncio.to_thread(work)
        return await self.run(client, work)

    async def run(self, client: tuple[str, ...], work: Callable[[], T]) -> T:
        """Call `work` on a thread, in the client's turn.

        If the caller is cancelled meanwhile, the turn still lasts until the call has returned.
        """
        loop = asyncio.get_running_loop()
        if self._free:
            self._free -= 1
        else:
            begins = loop.create_future()
            # To the engine's queue each call looks like a prompt that costs one turn.
            cost = QUANTUM - FLAT_COST
            self._queue.add(SimpleNamespace(client=client, num_prompt=cost, begins=begins))
            try:
                await begins
            except asyncio.CancelledError:
                if begins.done() and not begins.cancelled():
                    self._next()
                raise
        try:
            job = loop.run_in_executor(self._executor, work)
        except BaseException:
            self._next()
            raise
        job.add_done_callback(self._end)
        return await asyncio.shield(job)

    def _end(self, job: asyncio.Future[Any]) -> None:
        if not job.cancelled():
            job.exception()  # Retrieved, so that asyncio logs nothing if the caller has left.
        self._next()

    def _next(self) -> None:
        while self._queue.size:
            begins = self._queue.pop().begins
            if not begins.cancelled():
                begins.set_result(None)
                return
        self._free += 1


def _retry_after(seconds: float) -> int:
    return min(max(math.ceil(seconds), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
