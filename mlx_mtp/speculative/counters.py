"""Counters of speculation."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SpeculationCounters:
    """Totals since the start (vLLM's names)."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one row's window: its drafts, and how many of them were accepted."""
        if num_draft_tokens == 0:
            return
        assert 0 <= num_accepted_tokens <= num_draft_tokens
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        per_pos = self.num_accepted_tokens_per_pos
        per_pos.extend([0] * (num_draft_tokens - len(per_pos)))
        for position in range(num_accepted_tokens):
            per_pos[position] += 1
