"""Decides how many drafts each row gets, from which source, and when a step is read.

A step makes up to three decisions, for the most expected tokens per second. `best_windows`: whether
each row verifies the head's drafts that wait for it, or a run of the host. `_review`: how many
drafts the head makes for the next windows, the same number for all rows. `_reads_first`: whether
the step is read before the next one is planned, so that the host can offer more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from mlx_mtp.config import HOST_DRAFTS, MAX_DRAFT_TOKENS, MAX_HOST_DRAFTS
from mlx_mtp.speculative.costs import MTP, USE, BatchCosts, StepCosts, StepShape
from mlx_mtp.speculative.host_sources import HostDrafter

# Factors by which a choice must be faster than the current one (_STAY) and than no drafts (_PLAIN).
_STAY, _PLAIN = 1.02, 1.02
# The head's acceptance rates: the prior of the first position; that of a later one as a share of
# the rate before it; the weight of these priors, in trials; each step's factor of the counts.
_FIRST_RATE, _DECLINE, _PRIOR_TRIALS, _FADE = 0.8, 0.95, 1.0, 0.99
_GOES_ON = 0.85  # probability that rows that copy do so in the next step, too
# `best_windows`: drafts per row that determine the price of one, and maximum run lengths it tries.
_TYPICAL, _LIMITS = 4, (0, 1, 2, 3, 4, 5, 6, 8, 10, 13, MAX_HOST_DRAFTS)
_STEPS_PER_REVIEW = 8  # if no row copies, no chunk is prefilled and the number of rows is unchanged
# A probe has other drafts of the head for _PROBE_STEPS steps: one more per row, or none if that is
# known; where nothing is drafted, the best number, for _PROBE_STEPS windows if it can't pay. The
# next one comes in _LONG_REST steps; in _REST if a cost is unknown, at first, or if rows changed.
# Without a plain step in _REST, _PLAIN_STEPS follow.
_REST, _LONG_REST, _PROBE_STEPS, _PLAIN_STEPS = 48, 1024, 5, 12
# N steps after a copy, looks for runs are N / _WAIT_SHARE steps apart, at most _LONGEST_WAIT.
_WAIT_SHARE, _LONGEST_WAIT = 6, 8
# Steps per estimate of the gain of reading first, and the weight of an estimate in their mean.
_STEPS_PER_GAIN, _FOLLOW = 3, 0.2


@dataclass(eq=False, slots=True)
class RowDrafting:
    """The state of one row that a policy uses."""

    fixed: int | None = None  # number of the head's drafts per step, if its request sets it
    host: dict[str, HostDrafter] = field(default_factory=dict)  # by source
    unread: list[int] = field(default_factory=list)  # tokens that these have not read yet
    source: str = ""  # source of the run that is verified if the row copies
    waiting: int = 0  # drafts of the head for the row's next window
    ahead: int = 0  # maximum number of tokens that the row's window in flight can emit
    expected: float = 1.0  # tokens that the last window emits: probably, or at most if it copies

    def read(self) -> None:
        """Let the drafters read the tokens that came since the last time."""
        for drafter in self.host.values():
            drafter.extend(self.unread)
        self.unread = []

    def offer(self, ahead: float) -> tuple[str, list[float]]:
        """Returns the best run's source, and its acceptance after `ahead` tokens; [] if none."""
        if self.unread:
            self.read()
        runs = ((key, each.cumulative_acceptance(round(ahead))) for key, each in self.host.items())
        return max(runs, key=lambda each: sum(each[1]), default=("", []))


DraftRows = Sequence[RowDrafting]
Acceptance = Sequence[Sequence[float]]  # cumulative, of each row's drafts
HeadWindow = tuple[int, int]  # a window's drafts of the head, and the tokens it emitted, minus one


class Choice(NamedTuple):
    """Numbers of drafts, by row, and when the step is read."""

    head: tuple[int, ...]  # drafts of the head for the next window
    host: tuple[int, ...]  # drafts of the host for this window; 0: the head's are verified
    sync: bool = False  # True: before the next step is planned


class ChoiceReason(NamedTuple):
    """The estimates behind a choice, and those for 0, 1, 2, .. drafts of the head per row."""

    num_rows: int  # includes requests that wait for a row
    drafts: dict[str, int]  # chosen drafts of all rows, by source
    cost: float  # cost of a step with these drafts, relative to one without drafts
    num_tokens: float  # expected tokens of such a step
    costs: tuple[float, ...]  # cost of a step by the number of the head's drafts per row
    tokens: tuple[float, ...]  # expected tokens, likewise


class HeadRates:
    """Acceptance rates of the MTP head's drafts in all rows, by position in the window.

    A draft is tried only if all before it were accepted, so rates are conditional. Their product is
    the cumulative acceptance: the probability that a window is accepted up to and with a draft.
    """

    def __init__(self, size: int) -> None:
        self._tried, self._accepted = [0.0] * size, [0.0] * size

    def observe(self, windows: Sequence[HeadWindow]) -> None:
        """Count a step's windows.

        The draft after an answer's end counts as rejected. With more windows, trials fade more
        slowly. Each step fades all counts, as the rate of an untried position can change, too.
        """
        memory = 1.0 - 0.02 / math.sqrt(max(len(windows), 1))
        for num_drafts, num_gained in windows:
            for position in range(min(num_gained + 1, num_drafts)):
                for counts, count in (self._tried, 1.0), (self._accepted, position < num_gained):
                    counts[position] = counts[position] * memory + count
        for counts in self._tried, self._accepted:
            counts[:] = [_FADE * count for count in counts]

    def cumulative_acceptance(self) -> list[float]:
        """Returns the cumulative acceptance of the first, second, .. draft of a window."""
        rate, rates = _FIRST_RATE / _DECLINE, list[float]()
        for tried, accepted in zip(self._tried, self._accepted):
            rate = (accepted + _PRIOR_TRIALS * _DECLINE * rate) / (tried + _PRIOR_TRIALS)
            rates.append(rate)
        return list(accumulate(rates, mul))


class FixedDrafts:
    """A policy: `num_draft_tokens` drafts of the head, unless a row's request sets a number."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self.choices: dict[int, float] = {}
        self.reason: ChoiceReason | None = None

    def choose(self, rows: DraftRows, *, steady: bool, waiting: int = 0) -> Choice:
        depth = self.choices[len(rows)] = self._num_draft_tokens
        return Choice(tuple(depth if r.fixed is None else r.fixed for r in rows), (0,) * len(rows))

    def observe(self, head: Sequence[HeadWindow], shape: StepShape, seconds: float | None) -> None:
        pass


def _expected(costs: BatchCosts, windows: Acceptance, passes: int) -> tuple[float, float]:
    """Returns expected tokens and cost of a step, given its windows."""
    counts = [*map(len, windows)]
    shape = StepShape(len(counts), sum(counts), passes, max(counts))
    return costs.others + len(counts) + sum(map(sum, windows)), costs.cost(shape)


class BestWindows(NamedTuple):
    """How many of the host's drafts each row verifies (0: the head's), expected tokens and cost."""

    host: tuple[int, ...]
    tokens: float
    cost: float


def best_windows(costs: BatchCosts, waiting: Acceptance, host: Acceptance) -> BestWindows:
    """Returns the fastest windows, given drafts `waiting` of the head and runs of the host.

    A draft's price is the number of tokens that plain steps emit in the time it takes. Each run is
    cut where a draft gains less than that, and at a limit for all rows. A row copies if that gains
    more than its waiting drafts, net of the price. All limits are tried.
    """
    own, size = [*map(sum, waiting)], len(waiting)
    price = float(costs.verify[_TYPICAL * size] - costs.verify[0]) / _TYPICAL
    price *= 1 + costs.others / size
    most = [sum(each > price for each in run) for run in host]
    gains = [[0.0, *accumulate(run)] for run in host]
    best = BestWindows((), 0.0, 1.0)
    for limit in _LIMITS:
        copies, windows, tokens = [0] * size, [*map(len, waiting)], costs.others + size + sum(own)
        for row, count in enumerate(most):
            count = min(count, limit)
            gain = gains[row][count] - own[row]
            if count and gain > price * (count - windows[row]):
                copies[row] = windows[row] = count
                tokens += gain
        cost = costs.cost(StepShape(size, sum(windows), 0, max(windows)))
        if tokens / cost > best.tokens / best.cost:
            best = BestWindows(tuple(copies), tokens, cost)
        if limit >= max(most):
            break
    return best


class AdaptiveDrafts:
    """A policy that follows measured costs (`costs`, which it updates) and acceptance."""

    def __init__(self, costs: StepCosts, most: int = MAX_DRAFT_TOKENS) -> None:
        self._costs, self._most = costs, most  # maximum drafts of the head per row; 0: no head
        self._head_rates = HeadRates(most)
        self.choices: dict[int, float] = {}  # last mean drafts per row, by number of rows
        self.reason: ChoiceReason | None = None  # of the last choice; None before the first
        # Of the last review: the head's drafts per row, the best number above 0, and the rows.
        self._depth = self._best_drafted = self._num_rows = 0
        self._expected: list[tuple[float, ...]] = [(0.0, 1.0)]  # tokens and cost by these drafts
        self._since_review = self._since_copy = self._since_plain = 0  # steps since the last one
        self._since_probe = self._until_probe = self._probed = 0  # steps since, until, in a probe
        self._rest = _REST  # steps from the last probe to the next one if costs are known
        self._wait = self._quiet = 0  # steps until the next look for runs; while the choice stays
        self._last, self._probes_head = Choice((), ()), False  # last choice; if its drafts probe
        self._gain, self._since_gain = 0.0, 0  # see `_reads_first`

    def choose(self, rows: DraftRows, *, steady: bool, waiting: int = 0) -> Choice:
        """Choose the drafts of `rows`; `steady` is True if no chunk is prefilled in this step."""
        joined = not steady or len(rows) > self._num_rows
        changed = joined or len(rows) < self._num_rows
        self._since_review += 1
        self._since_copy = 0 if joined else self._since_copy + 1
        self._wait, self._quiet = (0, 0) if changed else (self._wait - 1, self._quiet - 1)
        host: list[list[float]] = [[] for _ in rows]
        if self._wait <= 0:
            for number, row in enumerate(rows):
                row.source, host[number] = row.offer(min(row.ahead, row.expected))
            self._wait = 0 if any(host) else min(self._since_copy // _WAIT_SHARE, _LONGEST_WAIT)
        if self._quiet > 0 and not any(host):
            self._since_probe, self._since_plain = self._since_probe + 1, self._since_plain + 1
            return self._last
        head = self._head_rates.cumulative_acceptance()
        drafted = [head[: row.waiting] for row in rows]
        # Drafts delay requests that are `waiting` for a row: they must pay in the batch with these.
        costs = self._costs.of_batch(len(rows), sync=self._last.sync, others=waiting)
        plain, windows = self._must_measure_plain(len(rows)), (0,) * len(rows)
        if any(host) and not (plain or self._probes_head):
            windows = best_windows(costs, drafted, host).host
            self._since_copy = 0 if any(windows) else self._since_copy
        copied = [run[:count] for run, count in zip(host, windows)]
        if changed or any(windows) or self._since_review >= _STEPS_PER_REVIEW:
            self._review(costs, rows, head, copied)
        depth = 0 if plain else self._depth_or_probe(rows, changed)
        self._probes_head = depth > self._depth
        counts = tuple(depth if row.fixed is None else row.fixed for row in rows)
        may_stay = not any(host) and [row.waiting for row in rows] == [*counts]
        for row, count, own, copies in zip(rows, counts, drafted, windows):
            row.waiting, row.expected = count, 1 + (copies or sum(own, 0.0))
        sync = any(host) and not plain and self._reads_first(rows, head)
        self._last = Choice(counts, windows, sync)
        self._note(costs, rows, [run or head[:n] for run, n in zip(copied, counts)])
        left = _STEPS_PER_REVIEW - self._since_review, _REST - self._since_plain
        self._quiet = min(*left, self._until_probe) if may_stay else 0
        return self._last

    def observe(self, head: Sequence[HeadWindow], shape: StepShape, seconds: float | None) -> None:
        """Learn from a step: its windows of the head's drafts, and its duration if it is known."""
        self._head_rates.observe(head)
        self._costs.observe(shape, seconds)

    def _review(
        self, costs: BatchCosts, rows: DraftRows, head: list[float], copied: Acceptance
    ) -> None:
        """Choose the head's drafts for the next windows; rows that copy may go on, or all stop."""
        self._expected, alone = [], list[float]()
        for depth in range(len(head) + 1):
            depths = [depth if row.fixed is None else row.fixed for row in rows]
            own = [head[:each] for each in depths]
            windows = [run or each for run, each in zip(copied, own)]
            go_on, stop = (_expected(costs, each, max(depths)) for each in (windows, own))
            best = max(go_on, stop, key=lambda each: each[0] / each[1])
            both = tuple(_GOES_ON * a + (1.0 - _GOES_ON) * b for a, b in zip(best, stop))
            self._expected.append(both)
            alone.append(stop[0] / stop[1])
        self._best_drafted = alone.index(max(alone[1:], default=alone[0]), bool(head))
        scores = [tokens / cost for tokens, cost in self._expected]
        scores[self._depth] *= _STAY
        scores[0] *= _PLAIN
        self._depth = scores.index(max(scores))
        self._num_rows, self._since_review = len(rows), 0

    def _reads_first(self, rows: DraftRows, head: list[float]) -> bool:
        """Returns True if steps are faster if each one is read before the next one is planned.

        Compares one such step with two steps that look ahead: while the first one is planned,
        windows of the head's drafts are in flight, and then the windows of the first one.
        """
        self._since_gain = (self._since_gain + 1) % _STEPS_PER_GAIN
        if self._since_gain:
            return self._gain > 0.0
        waiting = [head[: row.waiting] for row in rows]
        own = [sum(each, 1.0) for each in waiting]  # expected tokens of the head's windows
        ahead, sync = (self._costs.of_batch(len(rows), sync=each) for each in (False, True))
        passes = ahead.passes[max(map(len, waiting))]
        alone = best_windows(sync, waiting, [row.offer(0)[1] for row in rows])
        first = best_windows(ahead, waiting, [row.offer(n)[1] for row, n in zip(rows, own)])
        emitted = [1 + copies if copies else n for copies, n in zip(first.host, own)]
        second = best_windows(ahead, waiting, [row.offer(n)[1] for row, n in zip(rows, emitted)])
        pair = (first.tokens + second.tokens) / (first.cost + second.cost + 2 * passes)
        self._gain += _FOLLOW * (alone.tokens / (alone.cost + passes) / pair - 1.0 - self._gain)
        return self._gain > 0.0

    def _must_measure_plain(self, num_rows: int) -> bool:
        """Returns True if this step has no drafts: what drafts cost is relative to its time."""
        self._since_plain = 0 if self._costs.has_plain(num_rows) else self._since_plain + 1
        if self._since_plain >= _REST + _PLAIN_STEPS:
            self._since_plain = _REST - _LONG_REST
        return self._since_plain >= _REST

    def _depth_or_probe(self, rows: DraftRows, changed: bool) -> int:
        """Returns the chosen depth or, during a probe, another one, to measure its cost."""
        more = min(self._depth + 1 if self._depth else self._best_drafted, self._most)
        (tokens, cost), (with_more, cost_of_more) = (self._expected[n] for n in (self._depth, more))
        # A calibrated cost can be too high: it must be measured in use if 2/3 of it would pay.
        may_pay = with_more / tokens - 1 > (cost_of_more / cost - 1) * 2 / 3
        kinds = (USE,) if may_pay and all(row.fixed is None for row in rows) else (MTP, USE)
        is_unknown = not self._costs.has_measured(len(rows), more, kinds)
        measures = is_unknown or self._depth > 0  # a cost: the rows must stay the same
        steps = _PROBE_STEPS if measures or may_pay else math.ceil(_PROBE_STEPS / len(rows))
        self._since_probe += 1
        self._until_probe = (_REST if is_unknown else self._rest) - self._since_probe
        if self._probed or self._until_probe < 0:
            self._probed, self._until_probe = self._probed + 1, 0
            if self._probed > (0 if changed and measures else steps):
                self._rest = _REST if changed and measures else _LONG_REST
                self._since_probe = self._probed = 0
        other = more if is_unknown or not self._depth else 0
        return other if self._probed else self._depth

    def _note(self, costs: BatchCosts, rows: DraftRows, windows: Acceptance) -> None:
        """Set `choices` and `reason`, given the windows while the last choice stays."""
        drafts = dict.fromkeys((MTP, *HOST_DRAFTS), 0)
        for row, count, num_proposed in zip(rows, self._last.host, self._last.head):
            drafts[row.source if count else MTP] += count or num_proposed
        self.choices[len(rows)] = sum(drafts.values()) / len(rows)
        tokens, cost = _expected(costs, windows, max(self._last.head))
        size, by_depth = len(rows) + costs.others, [*zip(*self._expected)]
        self.reason = ChoiceReason(size, drafts, cost, tokens, *by_depth[::-1])


DraftPolicy = FixedDrafts | AdaptiveDrafts
