"""Counters of the engine, as one immutable snapshot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """The prefix cache's totals and gauges; all 0 without one.

    Args:
        queries: prompt tokens of admitted requests, which were looked up.
        hits: those that were found and not computed.
        nbytes: that it takes.
        num_entries: prefixes in it that a prompt can go on from.
        num_files: on the disk.
        file_nbytes: that these take.
        num_files_written: since the start.
        num_files_dropped: since the start, as the disk is slow or full, or they are too large.
    """

    queries: int = 0
    hits: int = 0
    nbytes: int = 0
    num_entries: int = 0
    num_files: int = 0
    file_nbytes: int = 0
    num_files_written: int = 0
    num_files_dropped: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the start, and the two gauges.

    Args:
        num_requests_running: rows in a prefill or decode batch.
        num_requests_waiting: requests not yet admitted.
        prompt_tokens: prompt tokens computed.
        generation_tokens: tokens given to requests.
        num_drafts: verify windows that had at least one draft, counted per row.
        num_draft_tokens: drafts verified.
        num_accepted_tokens: drafts that were accepted.
        num_accepted_tokens_per_pos: the same, by position in the window (from 0).
        depths: (batch size, drafts per step chosen for it last), for the sizes that have run.
        parked: the last step was planned without drafts.
        num_restarts: how often the engine's thread has died and was started again.
        prefix_cache: of the prefix cache.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    depths: tuple[tuple[int, int], ...] = ()
    parked: bool = False
    num_restarts: int = 0
    prefix_cache: PrefixCacheStats = PrefixCacheStats()

    def after(self, earlier: EngineStats) -> EngineStats:
        """These gauges, and the counters of both: an engine that was restarted counts on."""
        pairs = zip_longest(
            self.num_accepted_tokens_per_pos, earlier.num_accepted_tokens_per_pos, fillvalue=0
        )
        totals = {name: getattr(self, name) + getattr(earlier, name) for name in _COUNTERS}
        return replace(self, num_accepted_tokens_per_pos=tuple(map(sum, pairs)), **totals)


_COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_restarts",
)
