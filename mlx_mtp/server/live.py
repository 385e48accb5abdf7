"""The server's state, for the page and `mlx-mtp top`: numbers, and no text of a request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mlx_mtp import __version__
from mlx_mtp.errors import (
    UNKNOWN_RETRY_SECONDS,
    ForbiddenError,
    NotFoundError,
    QueueFullError,
    RequestCancelledError,
)
from mlx_mtp.server.context import Context
from mlx_mtp.server.generation.writer import event
from mlx_mtp.server.progress_log import report
from mlx_mtp.text.characters import cut

SECONDS = 0.5  # between two messages
_SAMPLE_SECONDS, _MAX_SAMPLES = 2.0, 150  # of the history: five minutes
MOST_ROWS = 64  # answers in a message
MOST_WATCHERS = 64


class Live:
    """Makes one message for all watchers, and only while there are any."""

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
        await asyncio.gather(report(self._engine), self._remember())

    async def _remember(self) -> None:
        while True:
            self._history.append(self._totals())
            await asyncio.sleep(_SAMPLE_SECONDS)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Take one of the watchers' places for the block; raises QueueFullError if none is free."""
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

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield server-sent events; a watcher that reads slowly gets fewer."""
        yield event({**self._state(), "history": [*self._history]})
        # While it drains, the server waits for open responses such as this one.
        while not (self._limiter.draining and self._limiter.held == 0):
            if self._next is None:
                self._next = asyncio.create_task(self._make())
            yield await asyncio.shield(self._next)
        yield event(self._state())

    def cancel(self, request_id: str, key: str) -> None:
        """End an answer with all its choices, if the key is the one of its request.

        Raises NotFoundError or ForbiddenError.
        """
        generation = self._dispatcher.open.get(request_id)
        if generation is None:
            raise NotFoundError(f"No answer {cut(request_id)!r} is running; it may have ended.")
        if generation.key != key[:16]:
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
            "rows": self._rows(stats.prefills),
            "running": stats.num_requests_running,
            "waiting": stats.num_requests_waiting,
            "held": limiter.held,
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

    def _rows(self, prefills: Mapping[str, Any]) -> list[dict[str, Any]]:
        now, rows = time.perf_counter(), []
        for request_id, generation in [*self._dispatcher.open.items()][:MOST_ROWS]:
            row = generation.row(request_id, now)
            if request_id in prefills and row["state"] == "waiting":
                row |= {"state": "prefilling", "computed": prefills[request_id].done}
            rows.append(row)
        return rows
