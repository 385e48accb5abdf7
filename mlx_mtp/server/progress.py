"""Log lines while the engine works: how much it does, and how far long prefills are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine
    from mlx_mtp.engine.stats import EngineStats

logger = logging.getLogger(__name__)

STATUS_SECONDS = 10.0
PREFILL_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_STATUS = (
    "%(running)d running, %(waiting)d waiting; prompts %(prompt_tokens_per_second).1f tokens/s, "
    "answers %(tokens_per_second).1f tokens/s, %(drafts)s, KV %(kv_usage).1f%%"
)
_PREFILL = (
    "%(id)s: prefill of %(total)d tokens, %(done)d (%(percent).0f%%) done after %(seconds).0f s"
)

Line = tuple[str, dict[str, Any]]


class Progress:
    """The log's lines, from the engine's statistics at one time after another."""

    def __init__(self, stats: EngineStats, now: float) -> None:
        self._last, self._at = stats, now
        self._told: dict[str, float] = {}  # when each prefill was reported last, or has begun

    def lines(self, stats: EngineStats, now: float) -> Iterator[Line]:
        self._told = {name: self._told.get(name, p.began) for name, p in stats.prefills.items()}
        for name, (total, _, done, began) in stats.prefills.items():
            if now - self._told[name] >= PREFILL_SECONDS:
                self._told[name] = now
                fields = {"id": name, "total": total, "done": done}
                yield _PREFILL, fields | {"percent": 100 * done / total, "seconds": now - began}
        if now - self._at >= STATUS_SECONDS:
            yield from self._status(stats, now - self._at)
            self._last, self._at = stats, now

    def _status(self, stats: EngineStats, seconds: float) -> Iterator[Line]:
        def new(name: str) -> int:
            return int(getattr(stats, name) - getattr(self._last, name))

        prompts, answers = new("prompt_tokens"), new("generation_tokens")
        drafts, accepted = new("num_draft_tokens"), new("num_accepted_tokens")
        fields = {
            "running": stats.num_requests_running,
            "waiting": stats.num_requests_waiting,
            "prompt_tokens_per_second": prompts / seconds,
            "tokens_per_second": answers / seconds,
            "drafts": f"{accepted / drafts:.0%} of drafts accepted" if drafts else "no drafts",
            "kv_usage": 100 * stats.kv_usage,
        }
        if fields["running"] or fields["waiting"] or prompts or answers:
            yield _STATUS, fields


async def report(engine: Engine) -> None:
    """Log what the engine does, until cancelled."""
    progress = Progress(engine.stats(), time.perf_counter())
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        for text, fields in progress.lines(engine.stats(), time.perf_counter()):
            logger.info(text, fields)
