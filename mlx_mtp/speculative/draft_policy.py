"""How many drafts each row gets, and from which source: those that gain more than they cost.

A step decides twice. `best_windows`: which drafts each row verifies now, those of the head that
wait for it or a run of the host. `best_proposals`: how many drafts the head makes for the next
windows. Drafts are taken in the order of their cumulative acceptance, up to the number with the
most expected tokens per second. A row may get none, and rows may differ. Choices rest on estimates,
so a new one must promise more than the current one, and now and then a few steps probe one draft
more, or none, for a fixed share of the time.
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
# (_PLAIN), one with equal numbers of drafts (_EVEN), and one that copies nothing (_PAYS).
_STAY, _PLAIN, _EVEN, _PAYS = 1.02, 1.02, 1.03, 1.03
_AS_GOOD = 1.01  # a smaller number of drafts is chosen if the best is at most this times as fast
_COPY_GAIN = 0.05  # weight of a window in the share of runs that go on in the next window
_ALIKE = 1.2  # rows whose miss ratios differ by at most this factor get equal numbers of drafts
_ROW_MEMORY = 0.98  # share of a row's counts that stays with each window
_ALL_ROWS = 6.0  # weight of the rates of all rows in those of one, in misses
# The mean length of answers is that of the last _ANSWERS per row; before one has ended it is
# _FIRST_ANSWER.
_ANSWERS, _FIRST_ANSWER = 5, 256.0
# The head's acceptance rates: the prior of the first position (_FIRST_RATE); the prior of a later
# one as a share of the rate before it (_DECLINE); the weight of these priors, in trials
# (_PRIOR_TRIALS); and the share of the counts that stays with each step (_FADE).
_FIRST_RATE, _DECLINE, _PRIOR_TRIALS, _FADE = 0.8, 0.95, 1.0, 0.9975
_LEAST_USEFUL = 0.05  # cumulative acceptance of a draft that is offered
_LIMITS = (1, 2, 4, 8)  # lengths that a run may be cut to, so that no window is longer
_STEPS_PER_REVIEW = 8  # without copies; a review takes the host 0.3 ms for 16 rows
_PROBE_STEPS = 6  # the first has a part of the step before it
_PROBE_SHARE = 0.006  # share of the time that probes may lose
_LEAST_REST = 50  # steps between two probes
_LEAST_LOSS = 0.03  # what a step of a probe is taken to lose at least: estimates may be wrong


@dataclass(eq=False, slots=True)
class RowDrafting:
    """What a policy knows of one row."""

    fixed: int | None = None  # number of the head's drafts per step, if its request sets it
    host: dict[str, HostDrafter] = field(default_factory=dict)  # by source
    source: str = ""  # of the run that `offer` returned last
    waiting: int = 0  # drafts of the head for its next window
    on_host: bool = False  # its last window has the host's drafts
    ahead: int = 0  # most tokens that its window in flight may emit
    missed: float = 0.0  # windows with a wrong draft, the latest count most,
    expected: float = 0.0  # and how many were expected
    miss_ratio: float = 1.0  # how many times as often its drafts are wrong as those of all rows

    def observe(self, missed: bool, expected: float) -> None:
        self.missed = _ROW_MEMORY * self.missed + missed
        self.expected = _ROW_MEMORY * self.expected + expected
        self.miss_ratio = (self.missed + _ALL_ROWS) / (self.expected + _ALL_ROWS)

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


class Copying(NamedTuple):
    """What a row's run will bring to the next window, if the row copies then."""

    chance: float = 0.0  # that it does
    drafts: int = 0
    tokens: float = 0.0  # expected, beside the one that each window brings


def best_proposals(
    costs: BatchCosts,
    head: Sequence[Sequence[float]],
    passes: Sequence[int],
    copying: Sequence[Copying] = (),
) -> Choice:
    """Numbers of the head's drafts for the next windows; `head` is their cumulative acceptance.

    Greedy: for each of these numbers of `passes`, take the drafts in order of acceptance, up to the
    number with the most expected tokens per time. A draft counts with the chance that its row does
    not copy instead.
    """
    rows = len(head)
    start = _copied(rows, copying)
    stays = [1.0 - each.chance for each in copying] or [1.0] * rows
    best = Choice((0,) * rows, (0,) * rows)
    for num_passes in passes:
        offers = [
            (-share * each, n, row)
            for row, (of_head, share) in enumerate(zip(head, stays))
            for n, each in enumerate(of_head[:num_passes], 1)
        ]
        speed, counts = _fastest(costs, rows, num_passes, start, offers)
        if speed > best.speed:
            best = Choice(counts, (0,) * rows, speed)
    return best


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
        others = [each for each, copies in zip(waiting, on_host) if not copies]
        start = _Taken(
            rows + sum(map(sum, others)), sum(map(len, others)), max(map(len, others), default=0)
        )
        offers = [
            (-each, n, row)
            for row, (run, copies) in enumerate(zip(runs, on_host))
            for n, each in enumerate(run if copies else (), 1)
        ]
        speed, counts = _fastest(costs, rows, 0, start, offers)
        if speed > best_speed * (1.0 if any(best) else _PAYS):
            best_speed, best = speed, counts
    return best


class _Taken(NamedTuple):
    """What a step has before drafts are added to it."""

    tokens: float
    drafts: int
    longest: int


def _copied(rows: int, copying: Sequence[Copying]) -> _Taken:
    return _Taken(
        rows + sum(each.chance * each.tokens for each in copying),
        round(sum(each.chance * each.drafts for each in copying)),
        max((each.drafts for each in copying), default=0),
    )


def _fastest(
    costs: BatchCosts,
    rows: int,
    num_passes: int,
    start: _Taken,
    offers: list[tuple[float, int, int]],
) -> tuple[float, tuple[int, ...]]:
    """Most expected tokens per time with the first of these offers, and drafts by row then.

    An offer is its acceptance, negative; its place in the window; and its row.
    """
    offers.sort()
    tokens, drafts, longest = start
    fixed, padding = costs.passes[num_passes], costs.padding
    best = tokens / (costs.verify[drafts] + fixed + padding * (rows * longest - drafts))
    taken = 0
    for number, (minus, place, _) in enumerate(offers[: len(costs.verify) - 1 - drafts], 1):
        tokens -= minus
        drafts += 1
        if place > longest:
            longest = place
        speed = tokens / (costs.verify[drafts] + fixed + padding * (rows * longest - drafts))
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
        # Faded counts of answers, and of their tokens.
        self._answers, self._tokens = 1.0, _FIRST_ANSWER
        self.choices: dict[int, float] = {}  # last drafts per row, by number of rows
        self.reason: ChoiceReason | None = None  # of the last choice; None before the first
        self._goes_on = 0.5  # share of the rows that copy and do so in their next window too
        self._choice = Choice((), ())
        self._costs_of, self._tokens_of = list[float](), list[float]()  # by the head's drafts
        self._depth: int | None = 0  # of all rows in the choice; None: they differ
        self._since_review = 0
        self._probe, self._probing, self._num_probes = Choice((), ()), 0, 0
        self._rested = _LEAST_REST  # steps since a probe; the first one waits for nothing

    def choose(self, rows: Sequence[RowDrafting], *, steady: bool) -> Choice:
        """Choose for rows; `steady`: nothing is prefilled beside them."""
        steady = steady and len(rows) == len(self._choice.head)
        head = [self._useful(self._head_rates.cumulative_acceptance(r.miss_ratio)) for r in rows]
        host = [self._useful(row.offer()) for row in rows]
        self._rested += 1
        self._since_review += 1
        if not steady:
            self._probing = 0
        due = self._since_review >= _STEPS_PER_REVIEW and not self._probing
        windows = (0,) * len(rows)
        if any(host) and not (self._probing and not any(self._probe.head)):
            waiting = [each[: row.waiting] for row, each in zip(rows, head)]
            windows = best_windows(self._costs.of_batch(len(rows)), waiting, host)
        if not steady or due or (any(windows) and not self._probing):
            self._since_review = 0
            copying = [
                Copying(self._goes_on, count, sum(run[:count])) if count else Copying()
                for run, count in zip(host, windows)
            ]
            self._review(rows, head, copying, steady=steady)
        choice = (self._probe if self._probing else self._choice)._replace(host=windows)
        self._note(rows, self._choice._replace(host=windows))
        self._probing = max(self._probing - 1, 0)
        for row, count, num_copied in zip(rows, choice.head, choice.host):
            if row.on_host and not self._probing:
                self._goes_on += _COPY_GAIN * ((num_copied > 0) - self._goes_on)
            row.waiting, row.on_host = count, num_copied > 0
        return choice

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
        self,
        rows: Sequence[RowDrafting],
        head: Sequence[Sequence[float]],
        copying: Sequence[Copying],
        *,
        steady: bool,
    ) -> None:
        """Choose the head's drafts for the next windows, of which some rows may copy."""
        costs = self._costs.of_batch(len(rows))
        stays = [1.0 - each.chance for each in copying]
        base, num_copied, longest = _copied(len(rows), copying)
        even = [even_choice(rows, depth) for depth in range(self._most + 1)]
        self._costs_of, self._tokens_of = list[float](), list[float]()
        for choice in even:
            drafts = num_copied + round(sum(map(mul, stays, choice.head)))
            depth = max(choice.head)
            # Copying rows may not copy on, and then no window is as long.
            reach = depth + round(self._goes_on * max(longest - depth, 0))
            shape = StepShape(len(rows), drafts, depth, reach)
            self._costs_of.append(costs.cost(shape))
            gains = (x * sum(each[:n]) for x, each, n in zip(stays, head, choice.head))
            self._tokens_of.append(base + sum(gains))
        speeds = list(map(truediv, self._tokens_of, self._costs_of))
        scores = speeds[:]
        before = self._depth
        if before is not None:
            scores[before] *= _STAY
        scores[0] *= _PLAIN
        # Of numbers that are as good, the fewest: later drafts are known less well.
        self._depth = best = next(n for n, x in enumerate(scores) if x * _AS_GOOD >= max(scores))
        self._choice = even[best]._replace(speed=speeds[best])
        miss_ratios = [row.miss_ratio for row in rows]
        if max(miss_ratios) > _ALIKE * min(miss_ratios):
            # The numbers that requests set are not to be chosen.
            offered = [each if row.fixed is None else [] for row, each in zip(rows, head)]
            near = sorted({0, *range(max(best - 1, 0), min(best + 2, self._most) + 1)})
            uneven = best_proposals(costs, offered, near, copying)
            if uneven.speed * (_STAY if before is None else 1.0) > _EVEN * speeds[best]:
                self._choice = uneven._replace(head=_with_fixed(rows, uneven.head))
                self._depth = None
        if steady and self._rested >= _LEAST_REST:
            self._begin_probe(even, speeds)

    def _note(self, rows: Sequence[RowDrafting], choice: Choice) -> None:
        """Set `choices` and `reason`."""
        drafts = dict.fromkeys((MTP, *HOST_DRAFTS), 0)
        for row, count, num_proposed in zip(rows, choice.host, choice.head):
            drafts[row.source if count else MTP] += count or num_proposed
        self.choices[len(rows)] = choice.shape.drafts / len(rows)
        cost = self._costs.of_batch(len(rows)).cost(choice.shape)
        figures = tuple(self._costs_of), tuple(self._tokens_of)
        self.reason = ChoiceReason(len(rows), drafts, cost, choice.speed * cost, *figures)

    def _useful(self, acceptance: Sequence[float]) -> list[float]:
        """Cumulative acceptance, less what an answer's end costs.

        When an answer ends, one more step has been launched, for nothing. That loss is shared out
        among the answer's tokens, so each counts for a little less than 1.
        """
        share = max(1.0 - self._answers / self._tokens, 0.0)
        useful = [each * share**place for place, each in enumerate(acceptance, 1)]
        return useful[: sum(each > _LEAST_USEFUL for each in useful)]

    def _begin_probe(self, even: Sequence[Choice], speeds: Sequence[float]) -> None:
        """Choose otherwise for some steps, if the steps since the last probe pay for it.

        Probes see in turns what a step without drafts takes, and what one draft more takes and
        brings. The very first one is not paid for.
        """
        rows, now = len(self._choice.head), self._choice.speed
        other = round(sum(self._choice.head) / rows) + 1 if self._num_probes % 2 else 0
        if other > self._most or even[other].head == self._choice.head:
            self._num_probes += 1
            return
        speed = speeds[other] if other else float(rows)
        steps = int(self._rested * _PROBE_SHARE / max(1.0 - speed / now, _LEAST_LOSS))
        if self._num_probes == 0 and not self._costs.is_measured(rows):
            steps = _PROBE_STEPS
        if steps >= _PROBE_STEPS:
            self._probe, self._probing, self._rested = even[other], _PROBE_STEPS, 0
            self._num_probes += 1


DraftPolicy = FixedDrafts | AdaptiveDrafts


def even_choice(rows: Sequence[RowDrafting], depth: int) -> Choice:
    """`depth` drafts of the head for each row whose request does not set a number."""
    return Choice(_with_fixed(rows, (depth,) * len(rows)), (0,) * len(rows))


def _with_fixed(rows: Sequence[RowDrafting], head: Sequence[int]) -> tuple[int, ...]:
    """The counts, replaced by those that rows' requests set."""
    return tuple(count if row.fixed is None else row.fixed for row, count in zip(rows, head))


def _gain(acceptance: Sequence[float], cost: float) -> float:
    return sum(each - cost for each in acceptance if each > cost)
