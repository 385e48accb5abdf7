"""Decides how many drafts each row gets, and from which source, by their gain and their cost.

Each step makes two decisions. `best_windows`: whether each row verifies the head's drafts that wait
for it, or a run of the host. `AdaptiveDrafts._review`: how many drafts the head makes for the next
windows, the same number for all rows. Both compare expected tokens per second. Because these are
estimates, a new number must be faster than the current one by a margin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from mlx_mtp.config import HOST_DRAFTS, MAX_DRAFT_TOKENS, MAX_HOST_DRAFTS
from mlx_mtp.speculative.costs import MTP, BatchCosts, StepCosts, StepShape
from mlx_mtp.speculative.host_sources import HostDrafter

# Factors by which a choice must be faster than the current one (_STAY) and than no drafts (_PLAIN).
_STAY, _PLAIN = 1.02, 1.02
# The head's acceptance rates: the prior of the first position; that of a later one as a share of
# the rate before it; the weight of these priors, in trials; each step's factor of the counts.
_FIRST_RATE, _DECLINE, _PRIOR_TRIALS, _FADE = 0.8, 0.95, 1.0, 0.99
# `best_windows` tries these minimum gains of a copied draft, in tokens, and maximum run lengths.
_PRICES, _LIMITS = (0.1, 0.3, 0.6), (1, 2, 3, 4, 5, 6, 8, 10, 13, MAX_HOST_DRAFTS)
_STEPS_PER_REVIEW = 8  # if no row copies, no chunk is prefilled and the number of rows is unchanged
# A probe is _PROBE_STEPS steps with one more draft of the head per row, or without drafts. If there
# are none, it has the best number of them: only drafts show acceptance rates. Between two probes
# are _LONG_REST steps; _REST if the cost is unknown, before the first, and after an interruption.
# If no step without drafts was measured after _REST steps, up to _PLAIN_STEPS have none.
_REST, _LONG_REST, _PROBE_STEPS, _PLAIN_STEPS = 48, 1024, 5, 10


@dataclass(eq=False, slots=True)
class RowDrafting:
    """The state of one row that a policy uses."""

    fixed: int | None = None  # number of the head's drafts per step, if its request sets it
    host: dict[str, HostDrafter] = field(default_factory=dict)  # by source
    source: str = ""  # source of the run that `offer` returned last
    waiting: int = 0  # drafts of the head for the row's next window
    ahead: int = 0  # maximum number of tokens that the row's window in flight can emit
    expected: float = math.inf  # tokens that it probably emits, if its drafts are the head's

    def offer(self) -> list[float]:
        """Returns the cumulative acceptance of the host's best run, or []; sets `source`."""
        if self.fixed is not None or not self.host:
            return []
        ahead = round(min(self.ahead, self.expected))
        offers = {name: each.cumulative_acceptance(ahead) for name, each in self.host.items()}
        self.source = max(offers, key=lambda name: sum(offers[name]))
        return offers[self.source]


HeadWindow = tuple[int, int]
"""A window's number of drafts of the head, and the number of tokens it emitted, minus one."""


class Choice(NamedTuple):
    """Numbers of drafts, by row."""

    head: tuple[int, ...]  # drafts of the head for the next window
    host: tuple[int, ...]  # drafts of the host for this window; 0: the head's are verified


class ChoiceReason(NamedTuple):
    """The estimates behind a choice, and those for 0, 1, 2, .. drafts of the head per row."""

    num_rows: int
    drafts: dict[str, int]  # chosen drafts of all rows, by source
    cost: float  # cost of a step with these drafts, relative to one without drafts
    num_tokens: float  # expected tokens of such a step
    costs: tuple[float, ...]  # cost of a step by the number of the head's drafts per row
    tokens: tuple[float, ...]  # expected tokens, likewise


class HeadRates:
    """Acceptance rates of the MTP head's drafts in all rows, by position in the window.

    A draft is tried only if all drafts before it were accepted, so the rates are conditional. Their
    running product is the cumulative acceptance: the probability that a window is accepted up to
    and including a draft.
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
                is_accepted = position < num_gained
                self._tried[position] = self._tried[position] * memory + 1.0
                self._accepted[position] = self._accepted[position] * memory + is_accepted
        self._tried = [_FADE * tried for tried in self._tried]
        self._accepted = [_FADE * accepted for accepted in self._accepted]

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

    def choose(self, rows: Sequence[RowDrafting], *, steady: bool) -> Choice:
        self.choices[len(rows)] = self._num_draft_tokens
        return even_choice(rows, self._num_draft_tokens)

    def observe(self, head: Sequence[HeadWindow], shape: StepShape, seconds: float | None) -> None:
        pass


def _expected(
    costs: BatchCosts, windows: Sequence[Sequence[float]], passes: int = 0
) -> tuple[float, float]:
    """Returns expected tokens and cost of a step, given its windows' cumulative acceptances."""
    counts = [*map(len, windows)]
    shape = StepShape(len(counts), sum(counts), passes, max(counts))
    return len(counts) + sum(map(sum, windows)), costs.cost(shape)


def best_windows(
    costs: BatchCosts,
    waiting: Sequence[Sequence[float]],
    host: Sequence[Sequence[float]],
) -> tuple[int, ...]:
    """Returns how many of the host's drafts each row verifies now; 0: it verifies the head's.

    `waiting` and `host` are the cumulative acceptances of each row's drafts from the head and from
    the host. For each pair of a price per draft, in tokens, and a limit of a run's length, a row's
    run is cut at the limit and where a draft gains no more than the price. The row copies the run
    if it gains more than the waiting drafts, both net of the price. The fastest pair is chosen.
    """
    own, lengths = [*map(sum, waiting)], [*map(len, waiting)]
    gains = [(row, [0.0, *accumulate(run)]) for row, run in enumerate(host) if run]
    tokens = len(own) + sum(own)
    shape = StepShape(len(own), sum(lengths), 0, max(lengths))
    best, best_speed = (0,) * len(host), tokens / costs.cost(shape)
    for price in _PRICES:
        cuts = [(row, gain, sum(each > price for each in host[row])) for row, gain in gains]
        longest = max(count for *_, count in cuts)
        for limit in _LIMITS:
            counts, windows, brought = [0] * len(host), lengths.copy(), tokens
            for row, gain, count in cuts:
                count = min(count, limit)
                more = gain[count] - own[row]
                if count and more > price * (count - lengths[row]):
                    counts[row] = windows[row] = count
                    brought += more
            shape = StepShape(len(own), sum(windows), 0, max(windows))
            if (speed := brought / costs.cost(shape)) > best_speed:
                best, best_speed = tuple(counts), speed
            if limit >= longest:
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
        self._expected = [(0.0, 1.0)]  # tokens and cost of a step, by the head's drafts per row
        self._since_review, self._since_probe = 0, _LONG_REST - _REST  # steps since the last one
        self._unmeasured = 0  # steps for which no step without drafts was measured

    def choose(self, rows: Sequence[RowDrafting], *, steady: bool) -> Choice:
        """Choose the drafts of `rows`; `steady` is True if no chunk is prefilled in this step."""
        head = self._head_rates.cumulative_acceptance()
        host = [row.offer() for row in rows]
        waiting = [head[: row.waiting] for row in rows]
        costs, windows = self._costs.of_batch(len(rows)), (0,) * len(rows)
        plain = self._must_measure_plain(len(rows))
        if any(host) and not plain:
            windows = best_windows(costs, waiting, host)
        copied = [run[:count] for run, count in zip(host, windows)]
        self._since_review += 1
        changed = not steady or len(rows) != self._num_rows
        if changed or any(windows) or self._since_review >= _STEPS_PER_REVIEW:
            self._review([row.fixed for row in rows], head, copied)
        depth = 0 if plain else self._depth_or_probe(len(rows), changed)
        choice = even_choice(rows, depth, windows)
        for row, count, own, copies in zip(rows, choice.head, waiting, windows):
            row.waiting, row.expected = count, math.inf if copies else 1 + sum(own)
        self._note(rows, choice, [run or head[:n] for run, n in zip(copied, choice.head)])
        return choice

    def observe(self, head: Sequence[HeadWindow], shape: StepShape, seconds: float | None) -> None:
        """Learn from a decode step, one or two steps after it was planned.

        `head` are the windows without drafts of the host. `seconds` is the step's duration, or None
        if it is not known (see `StepClock`).
        """
        self._head_rates.observe(head)
        self._costs.observe(shape, seconds)

    def _review(
        self,
        fixed: Sequence[int | None],
        head: Sequence[float],
        copied: Sequence[Sequence[float]],
    ) -> None:
        """Choose the head's drafts for the next windows; rows that copy are assumed to go on."""
        costs = self._costs.of_batch(len(fixed))
        self._expected = []
        for depth in range(len(head) + 1):
            depths = [depth if each is None else each for each in fixed]
            windows = [run or head[:each] for run, each in zip(copied, depths)]
            self._expected.append(_expected(costs, windows, max(depths)))
        scores = [tokens / cost for tokens, cost in self._expected]
        self._best_drafted = scores.index(max(scores[1:], default=scores[0]), bool(head))
        scores[self._depth] *= _STAY
        scores[0] *= _PLAIN
        self._depth = scores.index(max(scores))
        self._num_rows, self._since_review = len(fixed), 0

    def _must_measure_plain(self, num_rows: int) -> bool:
        """Returns True if this step has no drafts: what drafts cost is relative to its time."""
        self._unmeasured = 0 if self._costs.has_plain(num_rows) else self._unmeasured + 1
        if self._unmeasured >= _REST + _PLAIN_STEPS:
            self._unmeasured = _REST - _LONG_REST
        return self._unmeasured >= _REST

    def _depth_or_probe(self, num_rows: int, changed: bool) -> int:
        """Returns the chosen depth or, during a probe, another one, to measure its cost."""
        self._since_probe += 1
        more = min(self._depth + 1 if self._depth else self._best_drafted, self._most)
        is_unknown = not self._costs.has_measured(num_rows, more)
        rest = _REST if is_unknown else _LONG_REST
        if self._since_probe > rest + (0 if changed else _PROBE_STEPS):
            self._since_probe = rest - _REST if changed else 0
        if self._since_probe <= rest:
            return self._depth
        return more if is_unknown or not self._depth else 0

    def _note(
        self, rows: Sequence[RowDrafting], choice: Choice, windows: Sequence[Sequence[float]]
    ) -> None:
        """Set `choices` and `reason`; `windows`: acceptances of windows while the choice stays."""
        drafts = dict.fromkeys((MTP, *HOST_DRAFTS), 0)
        for row, count, num_proposed in zip(rows, choice.host, choice.head):
            drafts[row.source if count else MTP] += count or num_proposed
        self.choices[len(rows)] = sum(drafts.values()) / len(rows)
        tokens, cost = _expected(self._costs.of_batch(len(rows)), windows, max(choice.head))
        by_depth = tuple(zip(*self._expected))
        self.reason = ChoiceReason(len(rows), drafts, cost, tokens, by_depth[1], by_depth[0])


DraftPolicy = FixedDrafts | AdaptiveDrafts


def even_choice(rows: Sequence[RowDrafting], depth: int, host: tuple[int, ...] = ()) -> Choice:
    """Returns a choice of `depth` drafts of the head for rows whose request sets no number."""
    head = tuple(depth if row.fixed is None else row.fixed for row in rows)
    return Choice(head, host or (0,) * len(rows))
