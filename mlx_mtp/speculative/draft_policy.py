"""How many drafts each row gets, and from which source: those that gain more than they cost.

Every row offers its next drafts, each with its cumulative acceptance. They are taken in the order
of acceptance while the expected tokens per second rise. A row may get none, and rows may differ.
Choices rest on estimates, so a new one must promise more than the current one, and now and then a
few steps probe one draft more or less, for a fixed share of the time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul, truediv
from typing import NamedTuple, Protocol

from mlx_mtp.config import HOST_DRAFTS, MAX_DRAFT_TOKENS
from mlx_mtp.speculative.costs import MTP, BatchCosts, StepCosts, StepShape
from mlx_mtp.speculative.host_sources import HostDrafter

# How many times as fast a choice must be to replace the current one (_STAY), one without drafts
# (_PLAIN), and one with equal numbers of drafts (_EVEN).
_STAY, _PLAIN, _EVEN = 1.02, 1.02, 1.03
_ALIKE = 1.2  # rows whose miss ratios differ by at most this factor get equal numbers of drafts
_ROW_MEMORY = 0.97  # share of a row's counts that stays with each window
# Latest answers per row whose mean length counts, and the assumed length before one has ended.
_ANSWERS, _FIRST_ANSWER = 5, 256.0
# The head's acceptance rates: the prior of the first position, and that of a later one, relative to
# the rate of the one before it; the weight of these priors, in trials; and the share of the counts
# that stays with each step.
_FIRST_RATE, _DECLINE, _PRIOR_TRIALS, _FADE = 0.8, 0.95, 1.0, 0.9975
_STEPS_PER_REVIEW = 8  # a review takes the host 0.2 ms for 16 rows, 1 ms if rows differ
_LEAST_RUN = 3.0  # while the head drafts, a run with so many expected tokens is reviewed at once
_PROBE_STEPS = 6  # two are transitions, whose times don't count, and one is the first of its kind
_PROBE_SHARE = 0.006  # share of the time that probes may lose
_LEAST_REST = 50  # steps between two probes
_LEAST_LOSS = 0.03  # what a step of a probe is taken to lose at least: estimates may be wrong


@dataclass(eq=False, slots=True)
class RowDrafting:
    """What a policy knows of one row."""

    fixed: int | None = None  # number of the head's drafts per step, if its request sets it
    host: dict[str, HostDrafter] = field(default_factory=dict)  # by source
    source: str = ""  # of the run that `offer` returned last
    ahead: int = 0  # most tokens that its window in flight may emit
    missed: float = 0.0  # windows with a wrong draft, the latest count most,
    expected: float = 0.0  # and how many were expected
    miss_ratio: float = 1.0  # how many times as often its drafts are wrong as those of all rows

    def observe(self, missed: bool, expected: float) -> None:
        self.missed = _ROW_MEMORY * self.missed + missed
        self.expected = _ROW_MEMORY * self.expected + expected
        self.miss_ratio = (self.missed + 1.0) / (self.expected + 1.0)

    def offer(self) -> list[float]:
        """Cumulative acceptance of the host's best run, or []; notes its source."""
        best: list[float] = []
        for source, drafter in self.host.items() if self.fixed is None else ():
            acceptance = drafter.cumulative_acceptance(self.ahead)
            if sum(acceptance) > sum(best):
                self.source, best = source, acceptance
        return best


class VerifiedRow(Protocol):
    """What a policy reads of one row of a decode step (see `engine.step.StepRow`)."""

    @property
    def drafting(self) -> RowDrafting: ...
    @property
    def source(self) -> str: ...
    @property
    def num_verified(self) -> int: ...  # drafts of its window
    @property
    def num_cached(self) -> int: ...  # tokens that the window brought; 0: the row had ended before


class Choice(NamedTuple):
    """Numbers of drafts, by row."""

    head: tuple[int, ...]  # of the head, for the next window
    host: tuple[int, ...]  # of the host in place of the head's, for the window that is planned
    speed: float = 0.0  # expected tokens in the time that a step without drafts takes

    @property
    def verified(self) -> int:
        """Number of drafts that a step verifies while the choice stays."""
        return sum(host or head for head, host in zip(self.head, self.host))


class ChoiceReason(NamedTuple):
    """Reasons of a choice, and what 0, 1, 2, .. drafts of the head for each row would gain."""

    num_rows: int
    drafts: dict[str, int]  # chosen, of all rows, by source
    cost: float  # of such a step, relative to one without drafts
    num_tokens: float  # expected of such a step
    costs: tuple[float, ...]  # by the number of the head's drafts per row
    tokens: tuple[float, ...]  # likewise


class HeadRates:
    """Acceptance rates of the MTP head's drafts in all rows, by position in the window.

    A draft is tried only if those before it were accepted, so rates are conditional, and their
    running product is the cumulative acceptance: the probability that a window is accepted up to a
    draft.
    """

    def __init__(self, size: int) -> None:
        self._tried, self._accepted = [0.0] * size, [0.0] * size
        self._rates: list[float] = []
        self.fade(1)

    def observe(self, num_drafts: int, num_gained: int) -> float:
        """Count a row's window, which emitted `num_gained` tokens more than without drafts.

        A draft after an answer's end counts as a miss. Returns the number of misses that were to be
        expected.
        """
        num_tried = min(num_gained + 1, num_drafts)
        for position in range(num_tried):
            self._tried[position] = self._tried[position] * self._memory + 1.0
            is_accepted = position < num_gained
            self._accepted[position] = self._accepted[position] * self._memory + is_accepted
        return num_tried - sum(self._rates[:num_tried])

    def fade(self, num_rows: int) -> None:
        """Call when the rows of a step have been counted.

        With many rows more trials are remembered. All counts fade a little, as a position that is
        not tried any more may have changed.
        """
        self._memory = 1.0 - 0.02 / math.sqrt(num_rows)
        self._tried = [_FADE * tried for tried in self._tried]
        self._accepted = [_FADE * accepted for accepted in self._accepted]
        rates: list[float] = []
        for tried, accepted in zip(self._tried, self._accepted):
            prior = _DECLINE * rates[-1] if rates else _FIRST_RATE
            rates.append((accepted + _PRIOR_TRIALS * prior) / (tried + _PRIOR_TRIALS))
        self._rates = rates

    def cumulative_acceptance(self, miss_ratio: float) -> list[float]:
        """Of the first, second, .. draft of a row with this `miss_ratio` (see `RowDrafting`)."""
        return list(
            accumulate((max(1.0 - miss_ratio * (1.0 - rate), 0.0) for rate in self._rates), mul)
        )


class FixedDrafts:
    """A policy: k drafts of the head for each row whose request does not set a number."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self.choices: dict[int, float] = {}
        self.reason: ChoiceReason | None = None

    def choose(self, rows: Sequence[RowDrafting], *, steady: bool) -> Choice:
        self.choices[len(rows)] = self._num_draft_tokens
        return even_choice(rows, self._num_draft_tokens)

    def observe(self, rows: Sequence[VerifiedRow], shape: StepShape, seconds: float | None) -> None:
        pass


def best_choice(
    costs: BatchCosts,
    head: Sequence[Sequence[float]],
    host: Sequence[Sequence[float]],
) -> Choice:
    """The fastest choice; `head` and `host` are the cumulative acceptance of each row's drafts.

    Greedy: for each number of passes of the head the drafts of the highest acceptance, as many as
    raise the expected tokens per time. A row takes the host's drafts if these gain more after the
    cost of verifying them.
    """
    rows = len(head)
    best = Choice((0,) * rows, (0,) * rows, float(rows))
    per_draft = (costs.cost(rows, 0) - costs.cost(0, 0)) / rows
    host_gains = [_gain(acceptance, per_draft) for acceptance in host]
    for passes in range(max(map(len, head)) + 1):
        offers = []
        for row, of_head in enumerate(head):
            on_host = host_gains[row] > _gain(of_head[:passes], per_draft)
            acceptance = host[row] if on_host else of_head[:passes]
            offers += [(each, -n, row, on_host) for n, each in enumerate(acceptance, 1)]
        offers.sort(reverse=True)
        tokens = accumulate((acceptance for acceptance, *_ in offers), initial=float(rows))
        speeds = list(map(truediv, tokens, costs.window_costs(len(offers), passes)))
        speed = max(speeds)
        if speed > best.speed:
            counts = [0] * rows, [0] * rows
            for _, minus, row, on_host in offers[: speeds.index(speed)]:
                counts[on_host][row] = -minus
            best = Choice(tuple(counts[False]), tuple(counts[True]), speed)
    return best


class AdaptiveDrafts:
    """A policy that follows measured costs (`costs`, which it updates) and acceptance."""

    def __init__(self, costs: StepCosts, most: int = MAX_DRAFT_TOKENS) -> None:
        self._costs, self._most = costs, most  # drafts of the head per row; 0: no head
        self._head_rates = HeadRates(most)
        # Faded counts of answers, and of their tokens.
        self._answers, self._tokens = 1.0, _FIRST_ANSWER
        self.choices: dict[int, float] = {}  # last drafts per row, by number of rows
        self.reason: ChoiceReason | None = None  # of the last choice; None before the first
        self._choice = Choice((), ())
        self._depth: int | None = 0  # of all rows in the choice; None: they differ
        self._since_review = 0
        self._probe, self._probing, self._num_probes = Choice((), ()), 0, 0
        self._rested = _LEAST_REST  # steps since a probe; the first one waits for nothing

    def choose(self, rows: Sequence[RowDrafting], *, steady: bool) -> Choice:
        """Choose for rows; `steady`: nothing is prefilled beside them."""
        steady = steady and len(rows) == len(self._choice.head)
        on_host = any(self._choice.host)
        runs = [row.offer() for row in rows]
        drafting = any(n for row, n in zip(rows, self._choice.head) if row.fixed is None)
        least = _LEAST_RUN if drafting and not on_host else 0.0
        self._rested += 1
        self._since_review += 1
        if on_host or not steady:
            self._probing = 0
        due = self._since_review >= _STEPS_PER_REVIEW and not self._probing
        if on_host or not steady or due or any(run and sum(run) >= least for run in runs):
            self._since_review = 0
            self._review(rows, runs, steady=steady)
        if not self._probing:
            return self._choice
        self._probing -= 1
        return self._probe

    def observe(self, rows: Sequence[VerifiedRow], shape: StepShape, seconds: float | None) -> None:
        """Learn from a decode step, one or two steps after it was planned.

        `seconds` are its cost, or None if that is not known (see `StepClock`).
        """
        for row in rows:
            drafts, tokens = row.num_verified, row.num_cached
            self._tokens += tokens
            if not tokens:
                memory = 1.0 - 1.0 / (_ANSWERS * len(rows))
                self._tokens *= memory
                self._answers = self._answers * memory + 1.0
            elif row.source == MTP:
                row.drafting.observe(tokens <= drafts, self._head_rates.observe(drafts, tokens - 1))
        self._head_rates.fade(shape.rows)
        self._costs.observe(shape, seconds)

    def _review(
        self, rows: Sequence[RowDrafting], runs: Sequence[Sequence[float]], *, steady: bool
    ) -> None:
        batch_costs = self._costs.of_batch(len(rows))
        miss_ratios = [row.miss_ratio for row in rows]
        head = [self._useful(self._head_rates.cumulative_acceptance(each)) for each in miss_ratios]
        even = [even_choice(rows, depth) for depth in range(self._most + 1)]
        costs = [batch_costs.cost(choice.verified, max(choice.head)) for choice in even]
        tokens = [
            len(rows) + sum(sum(acceptance[:n]) for acceptance, n in zip(head, each.head))
            for each in even
        ]
        scores = list(map(truediv, tokens, costs))
        before = self._depth
        if before is not None:
            scores[before] *= _STAY
        scores[0] *= _PLAIN
        self._depth = best = scores.index(max(scores))
        choice = even[best]._replace(speed=tokens[best] / costs[best])
        if max(miss_ratios) > _ALIKE * min(miss_ratios) or any(runs):
            # The numbers that requests set are not to be chosen.
            offered = [each if row.fixed is None else [] for row, each in zip(rows, head)]
            uneven = best_choice(batch_costs, offered, list(map(self._useful, runs)))
            if uneven.speed * (_STAY if before is None else 1.0) > _EVEN * choice.speed:
                choice = uneven._replace(head=_with_fixed(rows, uneven.head))
                self._depth = None
        self._choice = choice
        drafts = dict.fromkeys((MTP, *HOST_DRAFTS), 0)
        for row, count, num_proposed in zip(rows, choice.host, choice.head):
            drafts[row.source if count else MTP] += count or num_proposed
        self.choices[len(rows)] = choice.verified / len(rows)
        cost = batch_costs.cost(choice.verified, max(choice.head))
        num_tokens = choice.speed * cost
        self.reason = ChoiceReason(len(rows), drafts, cost, num_tokens, tuple(costs), tuple(tokens))
        if steady and not any(choice.host) and self._rested >= _LEAST_REST:
            self._begin_probe(even, self.reason)

    def _useful(self, acceptance: Sequence[float]) -> list[float]:
        """Cumulative acceptance, less what an answer's end costs.

        When an answer ends, one more step has been launched, for nothing. That loss is shared out
        among the answer's tokens, so each counts for a little less than 1.
        """
        share = max(1.0 - self._answers / self._tokens, 0.0)
        return [each * share**place for place, each in enumerate(acceptance, 1)]

    def _begin_probe(self, even: Sequence[Choice], now: ChoiceReason) -> None:
        """Take a draft more or less for some steps, if the steps since the last probe pay for it.

        Probes see in turns whether one draft more is accepted, what it costs, and what one less
        costs. Costs are taken as low as their uncertainty allows; the last two kinds of probes are
        left out if even that would not change the choice.
        """
        turn, self._num_probes = self._num_probes % 3, self._num_probes + 1
        depth = round(sum(self._choice.head) / now.num_rows)
        is_measured = self._costs.is_measured(now.num_rows, 0)
        other = depth + (-1 if turn == 2 else 1) if is_measured else 0
        if not 0 <= other <= self._most or even[other].head == self._choice.head:
            return
        gain = now.tokens[other] / now.num_tokens - 1.0
        cost = now.costs[other] / now.cost - 1.0
        cost -= self._costs.uncertainty(now.num_rows, depth, other)
        if is_measured and turn and gain < cost:
            return
        affordable = int(self._rested * _PROBE_SHARE / max(cost - gain, _LEAST_LOSS))
        if affordable < (1 if is_measured and turn == 0 else _PROBE_STEPS):
            self._num_probes -= 1  # Its turn comes again.
            return
        self._probe, self._probing = even[other], min(affordable, _PROBE_STEPS)
        self._rested = 0


DraftPolicy = FixedDrafts | AdaptiveDrafts


def even_choice(rows: Sequence[RowDrafting], depth: int) -> Choice:
    """`depth` drafts of the head for each row whose request does not set a number."""
    return Choice(_with_fixed(rows, (depth,) * len(rows)), (0,) * len(rows))


def _with_fixed(rows: Sequence[RowDrafting], head: Sequence[int]) -> tuple[int, ...]:
    """The counts, replaced by those that rows' requests set."""
    return tuple(count if row.fixed is None else row.fixed for row, count in zip(rows, head))


def _gain(acceptance: Sequence[float], cost: float) -> float:
    return sum(each - cost for each in acceptance if each > cost)
