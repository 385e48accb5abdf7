"""The server's state for the page, `mlx-mtp top` and the log: numbers, never a request's text."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlx_mtp import __version__
from mlx_mtp.bounded_json import shortened
from mlx_mtp.errors import (
    UNKNOWN_RETRY_SECONDS,
    ForbiddenError,
    NotFoundError,
    QueueFullError,
    RequestCancelledError,
)
from mlx_mtp.server.context import Context
from mlx_mtp.server.generation.writer import event

if TYPE_CHECKING:
    from mlx_mtp.engine.stats import EngineStats

logger = logging.getLogger(__name__)

SECONDS = 0.5  # between two messages
_SAMPLE_SECONDS, _MAX_SAMPLES = 2, 150  # of the history: five minutes
MOST_ROWS = 64  # rows, one per choice, in a message
MOST_WATCHERS = 64
STATUS_SECONDS = 10.0
PREFILL_SECONDS = 5.0
_STATUS = (
    "%(running)d running, %(waiting)d waiting, "
    "%(prompt_tokens_per_second).0f+%(tokens_per_second).1f tokens/s, %(drafts)s, "
    "KV %(kv_usage).0f%%"
)
_PREFILL = "prefill of %(total)d tokens: %(percent).0f%% after %(seconds).0f s"


class ProgressLog:
    """Makes log lines from the engine's statistics, read at successive times."""

    def __init__(self, stats: EngineStats, now: float) -> None:
        self._last, self._at = stats, now
        self._reported: dict[str, float] = {}  # when each prefill began or was last reported

    def lines(self, stats: EngineStats, now: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the format and the fields of each line that is due at `now` (`perf_counter`)."""
        prefills = stats.prefills
        self._reported = {
            name: self._reported.get(name, p.admitted_at) for name, p in prefills.items()
        }
        for name, (total, _, done, began) in prefills.items():
            if now - self._reported[name] >= PREFILL_SECONDS:
                self._reported[name] = now
                fields = {"id": name, "total": total, "done": done}
                yield _PREFILL, fields | {"percent": 100 * done / total, "seconds": now - began}
        if now - self._at >= STATUS_SECONDS:
            if fields := self._status(stats, now - self._at):
                yield _STATUS, fields
            self._last, self._at = stats, now

    def _status(self, stats: EngineStats, seconds: float) -> dict[str, Any]:
        def new(name: str) -> int:
            return int(getattr(stats, name) - getattr(self._last, name))

        prompts, answers = new("prompt_tokens"), new("generation_tokens")
        drafts, accepted = new("num_draft_tokens"), new("num_accepted_tokens")
        if not (stats.num_requests_running or stats.num_requests_waiting or prompts or answers):
            return {}
        return {
            "running": stats.num_requests_running,
            "waiting": stats.num_requests_waiting,
            "prompt_tokens_per_second": prompts / seconds,
            "tokens_per_second": answers / seconds,
            "drafts": f"{accepted / drafts:.0%} accepted" if drafts else "no drafts",
            "kv_usage": 100 * stats.kv_usage,
        }


class Live:
    """Makes the messages of /live: one for all watchers, and only while there are watchers."""

    def __init__(self, context: Context) -> None:
        self._context, self._engine, self._limiter = context, context.engine, context.limiter
        self._metrics, self._dispatcher = context.metrics, context.dispatcher
        self._names = context.model_names
        self._history: deque[dict[str, float]] = deque(maxlen=_MAX_SAMPLES)
        self._began = time.time()
        self._num_watchers = 0
        self._next: asyncio.Task[bytes] | None = None

    async def background(self) -> None:
        """Write the progress to the log, and keep the last minutes' totals for new watchers."""
        progress = ProgressLog(self._engine.stats(), time.perf_counter())
        for second in itertools.count():
            if second % _SAMPLE_SECONDS == 0:
                self._history.append(self._totals())
            await asyncio.sleep(1.0)
            for text, fields in progress.lines(self._engine.stats(), time.perf_counter()):
                logger.info(text, fields)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count a watcher during the block; raises QueueFullError if there are `MOST_WATCHERS`."""
        if self._num_watchers >= MOST_WATCHERS:
            raise QueueFullError(
                f"/live has {MOST_WATCHERS} watchers, the most that it takes: close a page's Live "
                "view or a `mlx-mtp top`.",
                retry_after=UNKNOWN_RETRY_SECONDS,
            )
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1

    async def event_stream(self) -> AsyncIterator[bytes]:
        """Yields server-sent events; a watcher that reads slowly misses some."""
        yield event({**self._state(), "history": [*self._history]})
        # A draining server waits for open responses, so this one must end with the last answer.
        while not (self._limiter.draining and self._limiter.num_reserved == 0):
            if self._next is None:
                self._next = asyncio.create_task(self._make())
            yield await asyncio.shield(self._next)
        yield event(self._state())

    def cancel(self, answer_id: str, key: str) -> None:
        """End an answer with all its choices.

        `answer_id` can also be the id of one of the answer's rows in /live. Raises NotFoundError,
        or ForbiddenError if `key` is not the digest of the API key that the answer's request had.
        """
        open_requests = self._dispatcher.open.items()
        matches = (g for name, g in open_requests if answer_id in (name, name.rpartition("-")[0]))
        if (generation := next(matches, None)) is None:
            raise NotFoundError(
                f"No answer {shortened(answer_id)!r} is running; it may have ended."
            )
        owner = generation.requests[0].options.client[0].partition("@")[0]  # a digest's start
        if owner != key[:16]:
            raise ForbiddenError("This answer was asked for with another API key.")
        generation.fail(RequestCancelledError("The answer was cancelled by the server's operator."))

    async def _make(self) -> bytes:
        await asyncio.sleep(SECONDS)
        self._next = None
        return event(self._state())

    def _totals(self) -> dict[str, float]:
        stats = self._engine.stats()
        number, seconds = self._metrics.observed("time_to_first_token_seconds")
        return {
            "time": time.time(),
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "drafts": stats.num_draft_tokens,
            "accepted": stats.num_accepted_tokens,
            "first_tokens": number,
            "first_token_seconds": seconds,
        }

    def _state(self) -> dict[str, Any]:
        engine, limiter = self._engine, self._limiter
        stats, info = engine.stats(), engine.info
        fault = self._context.fault
        now, rows = time.perf_counter(), []
        for request_id, generation in [*self._dispatcher.open.items()][:MOST_ROWS]:
            row = generation.live_fields(request_id, now)
            if request_id in stats.prefills and row["state"] == "waiting":
                row |= {"state": "prefilling", "computed": stats.prefills[request_id].done}
            rows.append(row)
        return {
            "server": {
                "models": self._names,
                "version": __version__,
                "state": "stopping" if limiter.draining else "failed" if fault else "ready",
                "reason": fault,
                "uptime": time.time() - self._began,
                "context": info.max_model_len,
                "most_rows": info.max_num_seqs,
                "drafts": info.num_draft_tokens if info.draft_sources else None,
                "restarts": stats.num_restarts,
            },
            "totals": self._totals(),
            "rows": rows,
            "running": stats.num_requests_running,
            "waiting": stats.num_requests_waiting,
            "held": limiter.num_reserved,
            "capacity": limiter.capacity,
            "rejected": {name: count for name, count in limiter.rejected.items() if count},
            "failures": self._metrics.error_counts(),
            "drafts": {
                "sources": {
                    source: {"tried": tried, "accepted": stats.num_accepted_tokens_per_pos[source]}
                    for source, tried in stats.num_draft_tokens_per_pos.items()
                },
                "choice": stats.choice and stats.choice._asdict(),
            },
            "memory": {
                "plan": info.memory,
                "active": stats.active_memory,
                "rows": stats.kv_usage,
            },
            "prefixes": {**asdict(stats.prefix_cache), "limit": info.prefix_cache_size},
        }
