"""How many drafts a step proposes: the interface of a depth policy, and the fixed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.speculative.rates import RowRates


@dataclass(eq=False, slots=True)
class DraftRow:
    """What a depth policy knows of one row."""

    fixed: int | None = None  # the drafts per step that its request asked for
    rates: RowRates = field(default_factory=lambda: RowRates(MAX_DRAFT_TOKENS))

    def num_drafts(self, depth: int) -> int:
        """How many of a window's drafts count for this row.

        A window is one rectangle, so a row's drafts up to the depth of the deepest row cost nothing
        more: a row uses them all unless its request wants fewer.
        """
        return depth if self.fixed is None else min(self.fixed, depth)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one row's window brought."""

    row: DraftRow
    num_drafts: int  # that counted
    num_accepted: int
    cut: bool  # the row ended in this window, so the draft after these was not tried


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step that has been read."""

    batch_size: int
    depth: int  # drafts of its window
    outcomes: Sequence[Outcome]  # of the rows that had not ended before
    seconds: float | None  # its cost, where that is known (see `StepTimer`)


class DepthPolicy(Protocol):
    """Chooses the depth of each step."""

    def depth(self, rows: Sequence[DraftRow], *, steady: bool) -> int:
        """How many drafts to propose for the next window of these rows, 0 or more.

        Args:
            rows: one or more.
            steady: the step only decodes, so that its cost can be measured.
        """

    def observe(self, step: DecodeStep) -> None:
        """Learn from a step, one or two steps after it was planned."""

    def choices(self) -> dict[int, int]:
        """The depth chosen last for each batch size that has run, probes left out."""


class FixedDepth:
    """A `DepthPolicy` of one depth k, except where a request asks for another."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._choices: dict[int, int] = {}

    def depth(self, rows: Sequence[DraftRow], *, steady: bool) -> int:
        depth = max(self._num_draft_tokens if r.fixed is None else r.fixed for r in rows)
        self._choices[len(rows)] = depth
        return depth

    def observe(self, step: DecodeStep) -> None:
        pass

    def choices(self) -> dict[int, int]:
        return self._choices
