"""How many drafts a step proposes: the interface of a depth policy, and the fixed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.speculative.rates import RowRates


@dataclass(eq=False, slots=True)
class DraftRow:
    """What a depth policy knows of one row.

    Args:
        fixed: the drafts per step that its request asked for; None leaves them to the policy.
        rates: how often its drafts were accepted.
    """

    fixed: int | None = None
    rates: RowRates = field(default_factory=lambda: RowRates(MAX_DRAFT_TOKENS))

    def num_drafts(self, depth: int) -> int:
        """How many of a window's drafts count for this row.

        A window is one rectangle, so a row's drafts up to the depth of the deepest row cost nothing
        more: a row uses them all unless its request wants fewer.
        """
        return depth if self.fixed is None else min(self.fixed, depth)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row's window.

    Args:
        row: the row.
        num_drafts: drafts that counted.
        num_accepted: how many of them were accepted.
        cut: the row ended in this window, so the draft after these was not tried.
    """

    row: DraftRow
    num_drafts: int
    num_accepted: int
    cut: bool


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step that has been read.

    Args:
        batch_size: rows of its window.
        depth: drafts of its window.
        outcomes: of the rows that had not ended before.
        seconds: its cost; None where it is not known (see `StepTimer`).
    """

    batch_size: int
    depth: int
    outcomes: Sequence[Outcome]
    seconds: float | None


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
    """A `DepthPolicy` of one depth, except where a request asks for another.

    Args:
        num_draft_tokens: k.
    """

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
