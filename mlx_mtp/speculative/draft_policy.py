"""How many drafts each row gets, and from which source: those that gain more than they cost.

A step decides twice. `best_windows`: which drafts each row verifies now, those of the head that
wait for it or a run of the host. `AdaptiveDrafts._review`: how many drafts the head makes for the
next windows, the same number for all rows. Both compare expected tokens per second. Choices rest on
estimates, so a new one must promise more than the current one.
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
# (_PLAIN), and one that copies nothing (_PAYS).
_STAY, _PLAIN, _PAYS = 1.02, 1.02, 1.03
_AS_GOOD = 1.01  # a smaller number of drafts is chosen if the best is at most this times as fast
_COPY_GAIN = 0.05  # weight of a window in the share of runs that go on in the next window
# The head's acceptance rates: the prior of the first position (_FIRST_RATE); the prior of a later
# one as a share of the rate before it (_DECLINE); the weight of these priors, in trials
# (_PRIOR_TRIALS); and the share of the counts that stays with each step (_FADE).
_FIRST_RATE, _DECLINE, _PRIOR_TRIALS, _FADE = 0.8, 0.95, 1.0, 0.99
_LEAST_USEFUL = 0.05  # cumulative acceptance of a draft that is offered
_LIMITS = (1, 2, 4, 8)  # lengths that a run may be cut to, so that no window is longer
_STEPS_PER_REVIEW = 8  # without copies
# A probe is _PROBE_STEPS without drafts, or with one draft of the head more in each row. Between
# two are _LONG_REST steps, or _REST where one draft more was not measured, or drafts took other
# times than expected (see `StepCosts`).
_REST, _LONG_REST, _PROBE_STEPS = 48, 1024, 5


@dataclass(eq=False, slots=True)
class RowDrafting:
    """What a policy knows of one row."""

    fixed: int | None = None  # number of the head's drafts per step, if its request sets it
    host: dict[str, HostDrafter] = field(default_factory=dict)  # by source
    source: str = ""  # of the run that `offer` returned last
    waiting: int = 0  # drafts of the head for its next window
    on_host: bool = False  # its last window has the host's drafts
    ahead: int = 0  # most tokens that its window in flight may emit

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

    @property
    def shape(self) -> StepShape:
        """Of the steps while the choice stays."""
        windows = [host or head for head, host in zip(self.head, self.host)]
        return StepShape(len(windows), sum(windows), max(self.head), max(windows))


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
        self._memory = 1.0

    def observe(self, num_drafts: int, num_gained: int) -> None:
        """Count a row's window, which emitted `num_gained` tokens more than without drafts.

        A draft after an answer's end counts as a miss.
        """
        for position in range(min(num_gained + 1, num_drafts)):
            self._tried[position] = self._tried[position] * self._memory + 1.0
            is_accepted = position < num_gained
            self._accepted[position] = self._accepted[position] * self._memory + is_accepted

    def fade(self, num_rows: int) -> None:
        """Call when the rows of a step have been counted.

        With many rows more trials are remembered. All counts fade a little, as a position that is
        not tried any more may have changed.
        """
        self._memory = 1.0 - 0.02 / math.sqrt(num_rows)
        self._tried = [_FADE * tried for tried in self._tried]
        self._accepted = [_FADE * accepted for accepted in self._accepted]

    def cumulative_acceptance(self) -> list[float]:
        """Of the first, second, .. draft of a window."""
        rate, rates = _FIRST_RATE / _DECLINE, list[float]()
        for tried, accepted in zip(self._tried, self._accepted):
            rate = (accepted + _PRIOR_TRIALS * _DECLINE * rate) / (tried + _PRIOR_TRIALS)
            rates.append(rate)
        return list(accumulate(rates, mul))


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


def best_windows(
    costs: BatchCosts,
    waiting: Sequence[Sequence[float]],
    host: Sequence[Sequence[float]],
) -> tuple[int, ...]:
    """Numbers of the host's drafts to verify now, in place of those of the head that wait.

    `waiting` and `host` are the cumulative acceptance of each row's drafts. Greedy: for each limit
    of the host's windows, a row copies if that gains more after the cost of verifying; then the
    host's drafts are taken in order of acceptance, as in `best_proposals`.
    """
    rows = len(host)
    per_draft = (costs.verify[rows] - 1.0) / rows
    least = [sum(each) - per_draft * len(each) for each in waiting]
    longest_run = max(map(len, host))
    best_speed, best = 0.0, (0,) * rows
    for limit in (0, *(n for n in _LIMITS if n < longest_run), longest_run):
        runs = [run[:limit] for run in host]
        on_host = [bool(run) and _gain(run, per_draft) > gain for run, gain in zip(runs, least)]
        kept = [() if copies else each for each, copies in zip(waiting, on_host)]
        offers = [
            (-each, n, row)
            for row, (run, copies) in enumerate(zip(runs, on_host))
            for n, each in enumerate(run if copies else (), 1)
        ]
        speed, counts = _fastest(costs, kept, offers)
        if speed > best_speed * (1.0 if any(best) else _PAYS):
            best_speed, best = speed, counts
    return best


def _fastest(
    costs: BatchCosts,
    waiting: Sequence[Sequence[float]],
    offers: list[tuple[float, int, int]],
) -> tuple[float, tuple[int, ...]]:
    """Most expected tokens per time with the first of these offers, and drafts by row then.

    An offer is its acceptance, negative; its place in the window; and its row.
    """
    offers.sort()
    lengths = [*map(len, waiting)]
    rows, drafts, longest = len(lengths), sum(lengths), max(lengths)
    tokens = rows + sum(map(sum, waiting))
    best = tokens / costs.cost(StepShape(rows, drafts, 0, longest))
    taken, verify, padding = 0, costs.verify, costs.padding
    for number, (minus, place, _) in enumerate(offers, 1):
        tokens -= minus
        drafts += 1
        if place > longest:
            longest = place
        # As `BatchCosts.cost`, which takes twice as long.
        speed = tokens / (verify[drafts] + padding * (rows * longest - drafts))
        if speed > best:
            best, taken = speed, number
    counts = [0] * rows
    for _, place, row in offers[:taken]:
        counts[row] = place
    return best, tuple(counts)


class AdaptiveDrafts:
    """A policy that follows measured costs (`costs`, which it updates) and acceptance."""

    def __init__(self, costs: StepCosts, most: int = MAX_DRAFT_TOKENS) -> None:
        self._costs, self._most = costs, most  # drafts of the head per row; 0: no head
        self._head_rates = HeadRates(most)
        self.choices: dict[int, float] = {}  # last drafts per row, by number of rows
        self.reason: ChoiceReason | None = None  # of the last choice; None before the first
        self._goes_on = 0.5  # share of the rows that copy and do so in their next window too
        self._depth = self._num_rows = 0  # of the current choice
        self._speeds, self._costs_of, self._tokens_of = [1.0], [1.0], [0.0]  # by depth
        self._since_review = self._since_probe = 0  # steps
        self._num_surprises = 0  # before the last probe

    def choose(self, rows: Sequence[RowDrafting], *, steady: bool) -> Choice:
        """Choose for rows; `steady`: nothing is prefilled beside them."""
        head = self._head_rates.cumulative_acceptance()
        head = head[: sum(each > _LEAST_USEFUL for each in head)]
        host = [row.offer() for row in rows]
        windows = (0,) * len(rows)
        if any(host):
            waiting = [head[: row.waiting] for row in rows]
            windows = best_windows(self._costs.of_batch(len(rows)), waiting, host)
        self._since_review += 1
        changed = not steady or len(rows) != self._num_rows
        if changed or any(windows) or self._since_review >= _STEPS_PER_REVIEW:
            copied = [run[:count] for run, count in zip(host, windows)]
            self._review([row.fixed for row in rows], head, copied)
        choice = even_choice(rows, self._depth_or_probe(len(rows), changed), windows)
        for row, count, num_copied in zip(rows, choice.head, windows):
            if row.on_host:
                self._goes_on += _COPY_GAIN * ((num_copied > 0) - self._goes_on)
            row.waiting, row.on_host = count, num_copied > 0
        self._note(rows, choice)
        return choice

    def observe(self, rows: Sequence[VerifiedRow], shape: StepShape, seconds: float | None) -> None:
        """Learn from a decode step, one or two steps after it was planned.

        `seconds` are its cost, or None if that is not known (see `StepClock`).
        """
        for row in rows:
            if row.source == MTP and row.num_cached:
                self._head_rates.observe(row.num_verified, row.num_cached - 1)
        self._head_rates.fade(shape.rows)
        self._costs.observe(shape, seconds)

    def _review(
        self,
        fixed: Sequence[int | None],
        head: Sequence[float],
        copied: Sequence[Sequence[float]],
    ) -> None:
        """Choose the head's drafts for the next windows, of which some rows may copy again."""
        rows, goes_on = len(fixed), self._goes_on
        costs = self._costs.of_batch(rows)
        num_copied, longest = sum(map(len, copied)), max(map(len, copied))
        base = rows + goes_on * sum(map(sum, copied))
        drafting = 1.0 - goes_on * sum(map(bool, copied)) / rows  # share of the rows
        self._costs_of, self._tokens_of = [], []
        for depth in range(len(head) + 1):
            depths = [depth if each is None else each for each in fixed]
            drafts = round(goes_on * num_copied + drafting * sum(depths))
            # Copying rows may not copy on, and then no window is as long.
            passes = max(depths)
            reach = passes + round(goes_on * max(longest - passes, 0))
            self._costs_of.append(costs.cost(StepShape(rows, drafts, passes, reach)))
            self._tokens_of.append(base + drafting * sum(sum(head[:each]) for each in depths))
        self._speeds = list(map(truediv, self._tokens_of, self._costs_of))
        scores = self._speeds[:]
        if self._depth < len(scores):
            scores[self._depth] *= _STAY
        scores[0] *= _PLAIN
        # Of numbers that are as good, the fewest: later drafts are known less well.
        self._depth = next(n for n, x in enumerate(scores) if x * _AS_GOOD >= max(scores))
        self._num_rows, self._since_review = rows, 0

    def _depth_or_probe(self, num_rows: int, changed: bool) -> int:
        """The chosen depth, or now and then another: what is said of its cost may be wrong."""
        self._since_probe += 1
        more = min(self._depth + 1, self._most)
        is_unknown = not self._costs.has_measured(num_rows, more)
        is_surprised = self._depth > 0 and self._costs.num_surprises > self._num_surprises
        rest = _REST if is_unknown or is_surprised else _LONG_REST
        if self._since_probe <= rest:
            return self._depth
        if changed or self._since_probe > rest + _PROBE_STEPS:
            self._since_probe, self._num_surprises = 0, self._costs.num_surprises
            return self._depth
        return more if is_unknown or not self._depth else 0

    def _note(self, rows: Sequence[RowDrafting], choice: Choice) -> None:
        """Set `choices` and `reason`."""
        drafts = dict.fromkeys((MTP, *HOST_DRAFTS), 0)
        for row, count, num_proposed in zip(rows, choice.host, choice.head):
            drafts[row.source if count else MTP] += count or num_proposed
        self.choices[len(rows)] = choice.shape.drafts / len(rows)
        cost = self._costs.of_batch(len(rows)).cost(choice.shape)
        brought = self._speeds[self._depth] * cost
        figures = tuple(self._costs_of), tuple(self._tokens_of)
        self.reason = ChoiceReason(len(rows), drafts, cost, brought, *figures)


DraftPolicy = FixedDrafts | AdaptiveDrafts


def even_choice(rows: Sequence[RowDrafting], depth: int, host: tuple[int, ...] = ()) -> Choice:
    """`depth` drafts of the head for each row whose request does not set a number."""
    head = tuple(depth if row.fixed is None else row.fixed for row in rows)
    return Choice(head, host or (0,) * len(rows))


def _gain(acceptance: Sequence[float], cost: float) -> float:
    return sum(each - cost for each in acceptance if each > cost)
