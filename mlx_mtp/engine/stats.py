"""What an engine reports of itself: its fixed properties, and counters as an immutable snapshot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from mlx_mtp.config import DraftTokens


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties that never change while an engine lives.

    Args:
        vocab_size: token ids are below this.
        eos_token_ids: ids that end a sequence unless it ignores them.
        max_model_len: most tokens of prompt and answer together.
        num_draft_tokens: drafts per step where a request doesn't say; 0 when MTP is off.
        model_type: as in config.json.
        mtp_enabled: there is a source of drafts.
        max_num_seqs: rows that are computed at once.
        prefix_cache_size: limit of the prefix cache in bytes; 0: there is none.
        kv_cache_quantization: bits of the KV in it; None: not quantized.
        prefix_cache_dir: its directory on the disk; None: memory only.
        prefix_cache_dir_size: limit of the files in bytes.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_draft_tokens: DraftTokens
    model_type: str
    mtp_enabled: bool
    max_num_seqs: int
    prefix_cache_size: int = 0
    kv_cache_quantization: int | None = None
    prefix_cache_dir: Path | None = None
    prefix_cache_dir_size: int = 0


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Totals and gauges of the prefix cache; all 0 without one.

    Args:
        queries: prompt tokens of admitted requests, which were looked up.
        hits: how many of them were found.
        nbytes: in memory.
        num_entries: prefixes that a prompt can continue.
        num_files: on the disk.
        file_nbytes: size of these.
        num_files_written: since the start.
        num_files_dropped: since the start: the disk is slow or full, or they are too large.
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
    """Totals since the start, and gauges.

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
        num_restarts: how often the engine's thread died and was started again.
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
        """These gauges with the counters of both: a restarted engine continues to count."""
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
