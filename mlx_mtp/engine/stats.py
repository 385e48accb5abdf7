"""What an engine reports: its fixed properties, counters and gauges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from mlx_mtp.config import DraftTokens
from mlx_mtp.engine.request import PrefillProgress
from mlx_mtp.prefix.policy import PrefixCacheStats
from mlx_mtp.speculative.draft_policy import ChoiceReason
from mlx_mtp.vision.images import ImageSizes


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties that never change while an engine lives."""

    vocab_size: int  # all token ids are below this
    max_model_len: int  # maximum tokens of prompt and answer together
    model_type: str  # as in config.json
    eos_token_ids: tuple[int, ...] = ()  # end a sequence unless it ignores them
    num_draft_tokens: DraftTokens = 0  # drafts per step, unless the request sets them; 0: none
    mtp_enabled: bool = False  # True if an MTP head drafts
    max_num_seqs: int = 1  # maximum number of rows
    prefix_cache_size: int = 0  # limit in bytes; 0: no prefix cache
    memory: Mapping[str, int] = field(default_factory=dict)  # planned bytes by part; empty: no plan
    draft_sources: tuple[str, ...] = ()  # names in --drafts
    images: ImageSizes | None = None  # None: the model takes no images
    never_sampled: tuple[int, ...] = ()  # ids that stand for images
    embedding_size: int = 0  # dimensions of an embedding; 0: the model generates text


@dataclass(slots=True)
class EngineStats:
    """Totals since the start, and gauges."""

    num_requests_running: int = 0  # rows in a prefill or decode batch
    num_requests_waiting: int = 0  # not admitted yet
    kv_usage: float = 0.0  # used share of the memory for rows; 0 without a limit
    prefills: Mapping[str, PrefillProgress] = field(default_factory=dict)  # by request id
    prompt_tokens: int = 0  # prompt tokens computed
    generation_tokens: int = 0  # tokens emitted
    num_draft_windows: int = 0  # verify windows with at least one draft, one per row
    num_draft_tokens: int = 0  # drafts verified; see `StepRow.num_drafts`
    num_accepted_tokens: int = 0  # drafts accepted
    num_optimistic_tokens: int = 0  # drafts accepted though not sampled
    # Drafts accepted and drafts verified, by source and by position in the window from 0.
    num_accepted_tokens_per_pos: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    num_draft_tokens_per_pos: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    depths: tuple[tuple[int, float], ...] = ()  # (rows, drafts per row last chosen for them)
    choice: ChoiceReason | None = None  # why this number of drafts; None if it is fixed
    parked: bool = False  # the last step was planned without drafts
    active_memory: int = 0  # bytes that mlx's arrays take now
    num_restarts: int = 0  # restarts after uncaught errors
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)

    @property
    def prefill_tokens(self) -> int:
        return sum(prefill.total for prefill in self.prefills.values())

    @property
    def prefill_tokens_done(self) -> int:
        return sum(prefill.done for prefill in self.prefills.values())

    def count_window(self, source: str, num_drafts: int, num_accepted: int) -> None:
        """Count one row's verified window."""
        assert 0 <= num_accepted <= num_drafts
        if not num_drafts:
            return
        self.num_draft_windows += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        hits = [position < num_accepted for position in range(num_drafts)]
        self.num_accepted_tokens_per_pos = _added(self.num_accepted_tokens_per_pos, source, hits)
        tried = [1] * num_drafts
        self.num_draft_tokens_per_pos = _added(self.num_draft_tokens_per_pos, source, tried)


def _added(
    totals: Mapping[str, tuple[int, ...]], source: str, more: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    # A new tuple and dict: earlier totals may have been published.
    sums = map(sum, zip_longest(totals.get(source, ()), more, fillvalue=0))
    return {**totals, source: tuple(sums)}
