"""How many drafts a step proposes: what a policy knows, its interface, and the fixed one.

A position counts only where the drafts before it were accepted, so the rates are conditional, and
their running product is the chance that a window is accepted up to there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mlx_mtp.config import MAX_DRAFT_TOKENS

_FIRST_RATE = 0.8  # prior of the first position
_FIRST_TRIALS = 4.0  # its weight in trials at the start, forgotten as real trials are
_LAST_TRIALS = 0.5  # its weight when all trials are forgotten
_DECLINE = 0.95  # prior of another position, relative to the rate of the one before it
_NEIGHBOUR_TRIALS = 2.0  # its weight
_POOL_TRIALS = 3.0  # weight of the rate of all rows in that of one row
_FORGOTTEN = 1e-3  # fewer trials are not decayed any more


class Rates:
    """Counts at each position of a window, which fade by `memory` a trial, or `forgetting`."""

    memory: float
    forgetting: float

    def __init__(self, num_positions: int) -> None:
        self._tried = [0.0] * num_positions
        self._passed = [0.0] * num_positions

    def observe(self, num_drafts: int, num_accepted: int, *, cut: bool) -> int:
        num_tried = min(num_accepted + (not cut), num_drafts)
        for i in range(num_tried):
            self._tried[i] = self._tried[i] * self.memory + 1.0
            self._passed[i] = self._passed[i] * self.memory + (i < num_accepted)
        return num_tried

    def forget(self, start: int) -> None:
        """Decay the positions from `start` on, which a step has not tried."""
        for i in range(start, len(self._tried)):
            if self._tried[i] < _FORGOTTEN:
                return  # And so are deeper ones: they are tried only where this one is.
            self._tried[i] *= self.forgetting
            self._passed[i] *= self.forgetting

    def _rate(self, position: int, prior: float, weight: float, hope: float) -> float:
        passed = self._passed[position] + weight * prior + hope
        return passed / (self._tried[position] + weight + hope)


class PooledRates(Rates):
    """Rates of all rows together, the prior of each row."""

    memory, forgetting = 0.98, 0.999

    def __init__(self, num_positions: int) -> None:
        super().__init__(num_positions)
        self._tried[0], self._passed[0] = _FIRST_TRIALS, _FIRST_TRIALS * _FIRST_RATE

    def expected(self, hope: float = 0.0) -> list[float]:
        """The rate of each position; with `hope` successes more, an upper estimate of it."""
        rates = [self._rate(0, _FIRST_RATE, _LAST_TRIALS, hope)]
        for position in range(1, len(self._tried)):
            rates.append(self._rate(position, _DECLINE * rates[-1], _NEIGHBOUR_TRIALS, hope))
        return rates


class RowRates(Rates):
    """Rates of one row."""

    memory, forgetting = 0.95, 0.995

    def expected_tokens(self, pool: Sequence[float], hope: float = 0.0) -> list[float]:
        """Tokens of a step with 0 to K drafts, 1 + p1 + p1 p2 + ..; `pool` is the prior."""
        tokens, reached = [1.0], 1.0
        for position, prior in enumerate(pool):
            reached *= self._rate(position, prior, _POOL_TRIALS, hope)
            tokens.append(tokens[-1] + reached)
        return tokens


@dataclass(eq=False, slots=True)
class DraftRow:
    """What a depth policy knows of one row."""

    fixed: int | None = None  # the drafts per step that its request asked for
    rates: RowRates = field(default_factory=lambda: RowRates(MAX_DRAFT_TOKENS))

    def num_drafts(self, depth: int) -> int:
        """How many drafts it gets where `depth` was chosen: its request may have fixed them."""
        return depth if self.fixed is None else self.fixed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one row's window brought."""

    row: DraftRow
    num_drafts: int
    num_accepted: int
    cut: bool  # the row ended in this window, so the draft after these was not tried


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step that has been read."""

    batch_size: int
    depth: int  # drafts of the rows whose requests leave that open
    outcomes: Sequence[Outcome]  # of the rows that had not ended before
    seconds: float | None  # its cost, where that is known (see `StepTimer`)


class DepthChoice(NamedTuple):
    """Why a depth was chosen: what 0, 1, 2, .. drafts a step cost, and bring."""

    num_rows: int
    depth: int
    costs: tuple[float, ...]  # of a step, relative to one without drafts
    tokens: tuple[float, ...]  # expected of a step of all rows


class DepthPolicy(Protocol):
    """Chooses the depth of each step, for the rows whose requests leave that open.

    `choices` has the last depth by batch size, probes left out.
    """

    choices: dict[int, int]
    reason: DepthChoice | None  # of the last choice, if there was one

    def depth(self, rows: Sequence[DraftRow], *, steady: bool) -> int:
        """Drafts to propose for the next window of these rows; steady: the step only decodes."""

    def observe(self, step: DecodeStep) -> None:
        """Learn from a step, one or two steps after it was planned."""


class FixedDepth:
    """A `DepthPolicy` of one depth k."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self.choices: dict[int, int] = {}
        self.reason: DepthChoice | None = None

    def depth(self, rows: Sequence[DraftRow], *, steady: bool) -> int:
        self.choices[len(rows)] = self._num_draft_tokens
        return self._num_draft_tokens

    def observe(self, step: DecodeStep) -> None:
        pass
