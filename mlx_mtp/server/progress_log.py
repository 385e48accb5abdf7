"""Log lines while the engine works: its throughput, and the progress of long prefills."""

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


class ProgressLog:
    """Makes log lines of the engine's statistics at successive times."""

    def __init__(self, stats: EngineStats, now: float) -> None:
        self._last, self._at = stats, now
        self._reported: dict[str, float] = {}  # when each prefill began or was last reported

    def lines(self, stats: EngineStats, now: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the format and the fields of each line that is due."""
        prefills = stats.prefills
        self._reported = {name: self._reported.get(name, p.began) for name, p in prefills.items()}
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
            "drafts": f"{accepted / drafts:.0%} of drafts accepted" if drafts else "no drafts",
            "kv_usage": 100 * stats.kv_usage,
        }


async def report(engine: Engine) -> None:
    """Log the engine's progress until cancelled."""
    progress = ProgressLog(engine.stats(), time.perf_counter())
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        for text, fields in progress.lines(engine.stats(), time.perf_counter()):
            logger.info(text, fields)
