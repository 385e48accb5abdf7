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
from operator import mul
from typing import NamedTuple, Protocol

from mlx_mtp.config import HOST_DRAFTS, MAX_DRAFT_TOKENS, MAX_HOST_DRAFTS
from mlx_mtp.speculative.costs import MTP, BatchCosts, StepCosts, StepShape
from mlx_mtp.speculative.host_sources import HostDrafter

# How many times as fast a choice must be to replace the current one (_STAY), one without drafts
# (_PLAIN), and one that copies nothing (_PAYS).
_STAY, _PLAIN, _PAYS = 1.02, 1.02, 1.03
_AS_GOOD = 1.01  # a smaller number of drafts is chosen if the best is at most this times as fast
# The head's acceptance rates: the prior of the first position (_FIRST_RATE); the prior of a later
# one as a share of the rate before it (_DECLINE); the weight of these priors, in trials
# (_PRIOR_TRIALS); and the share of the counts that stays with each step (_FADE).
_FIRST_RATE, _DECLINE, _PRIOR_TRIALS, _FADE = 0.8, 0.95, 1.0, 0.99
# What a copied draft must bring, in tokens, and lengths of runs that are compared.
_PRICES, _LIMITS = (0.1, 0.3, 0.6), (1, 2, 3, 4, 5, 6, 8, 10, 13, MAX_HOST_DRAFTS)
_STEPS_PER_REVIEW = 8  # without copies
# A probe is _PROBE_STEPS without drafts, or with one draft of the head more in each row. Between
# two are _LONG_REST steps, or _REST where one draft more was not measured.
_REST, _LONG_REST, _PROBE_STEPS = 48, 1024, 5


@dataclass(eq=False, slots=True)
class RowDrafting:
    """What a policy knows of one row."""

    fixed: int | None = None  # number of the head's drafts per step, if its request sets it
    host: dict[str, HostDrafter] = field(default_factory=dict)  # by source
    source: str = ""  # of the run that `offer` returned last
    waiting: int = 0  # drafts of the head for its next window
    ahead: int = 0  # most tokens that its window in flight may emit

    def offer(self) -> list[float]:
        """Cumulative acceptance of the host's best run, or []; notes its source."""
        if self.fixed is not None or not self.host:
            return []
        offers = {name: each.cumulative_acceptance(self.ahead) for name, each in self.host.items()}
        self.source = max(offers, key=lambda name: sum(offers[name]))
        return offers[self.source]


class VerifiedRow(Protocol):
    """What a policy reads of one row of a decode step (see `engine.step.StepRow`)."""

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

    def observe(self, windows: Sequence[tuple[int, int]]) -> None:
        """Count a step's windows: drafts of each, and how many tokens more it brought by these.

        A draft after an answer's end counts as a miss. With many rows more trials are remembered.
        All counts fade a little, as a position that is not tried any more may have changed.
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


def _expected(
    costs: BatchCosts, windows: Sequence[Sequence[float]], passes: int = 0
) -> tuple[float, float]:
    """Tokens and cost of a step with windows of these cumulative acceptances."""
    counts = [*map(len, windows)]
    shape = StepShape(len(counts), sum(counts), passes, max(counts))
    return len(counts) + sum(map(sum, windows)), costs.cost(shape)


def best_windows(
    costs: BatchCosts,
    waiting: Sequence[Sequence[float]],
    host: Sequence[Sequence[float]],
) -> tuple[int, ...]:
    """Numbers of the host's drafts to verify now, in place of those of the head that wait.

    `waiting` and `host` are the cumulative acceptance of each row's drafts. For each price of a
    draft, in tokens, and each limit of the host's windows, a row's run is cut where its drafts
    bring less than the price, and copied if it brings more than the drafts that wait, all prices
    paid. Of these windows the fastest are chosen.
    """

    own, lengths = [*map(sum, waiting)], [*map(len, waiting)]
    gains = [(row, [0.0, *accumulate(run)]) for row, run in enumerate(host) if run]
    tokens = len(own) + sum(own)
    shape = StepShape(len(own), sum(lengths), 0, max(lengths))
    best, best_speed = (0,) * len(host), _PAYS * tokens / costs.cost(shape)
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
        self._costs, self._most = costs, most  # drafts of the head per row; 0: no head
        self._head_rates = HeadRates(most)
        self.choices: dict[int, float] = {}  # last drafts per row, by number of rows
        self.reason: ChoiceReason | None = None  # of the last choice; None before the first
        self._depth = self._num_rows = 0  # of the current choice
        self._expected = [(0.0, 1.0)]  # tokens and cost, by depth
        self._since_review = self._since_probe = 0  # steps

    def choose(self, rows: Sequence[RowDrafting], *, steady: bool) -> Choice:
        """Choose for rows; `steady`: nothing is prefilled beside them."""
        head = self._head_rates.cumulative_acceptance()
        host = [row.offer() for row in rows]
        windows = (0,) * len(rows)
        if any(host):
            waiting = [head[: row.waiting] for row in rows]
            windows = best_windows(self._costs.of_batch(len(rows)), waiting, host)
        copied = [run[:count] for run, count in zip(host, windows)]
        self._since_review += 1
        changed = not steady or len(rows) != self._num_rows
        if changed or any(windows) or self._since_review >= _STEPS_PER_REVIEW:
            self._review([row.fixed for row in rows], head, copied)
        choice = even_choice(rows, self._depth_or_probe(len(rows), changed), windows)
        for row, count in zip(rows, choice.head):
            row.waiting = count
        self._note(rows, choice, [run or head[:n] for run, n in zip(copied, choice.head)])
        return choice

    def observe(self, rows: Sequence[VerifiedRow], shape: StepShape, seconds: float | None) -> None:
        """Learn from a decode step, one or two steps after it was planned.

        `seconds` are its cost, or None if that is not known (see `StepClock`).
        """
        of_head = [row for row in rows if row.source == MTP and row.num_cached]
        self._head_rates.observe([(row.num_verified, row.num_cached - 1) for row in of_head])
        self._costs.observe(shape, seconds)

    def _review(
        self,
        fixed: Sequence[int | None],
        head: Sequence[float],
        copied: Sequence[Sequence[float]],
    ) -> None:
        """Choose the head's drafts for the next windows; rows that copy are taken to go on."""
        costs = self._costs.of_batch(len(fixed))
        self._expected = []
        for depth in range(len(head) + 1):
            depths = [depth if each is None else each for each in fixed]
            windows = [run or head[:each] for run, each in zip(copied, depths)]
            self._expected.append(_expected(costs, windows, max(depths)))
        scores = [tokens / cost for tokens, cost in self._expected]
        scores[self._depth] *= _STAY
        scores[0] *= _PLAIN
        # Of numbers that are as good, the fewest: later drafts are known less well.
        self._depth = next(n for n, x in enumerate(scores) if x * _AS_GOOD >= max(scores))
        self._num_rows, self._since_review = len(fixed), 0

    def _depth_or_probe(self, num_rows: int, changed: bool) -> int:
        """The chosen depth, or now and then another: what is said of its cost may be wrong."""
        self._since_probe += 1
        more = min(self._depth + 1, self._most)
        is_unknown = not self._costs.has_measured(num_rows, more)
        rest = _REST if is_unknown else _LONG_REST
        if self._since_probe <= rest:
            return self._depth
        if changed or self._since_probe > rest + _PROBE_STEPS:
            self._since_probe = 0
            return self._depth
        return more if is_unknown or not self._depth else 0

    def _note(
        self, rows: Sequence[RowDrafting], choice: Choice, windows: Sequence[Sequence[float]]
    ) -> None:
        """Set `choices` and `reason`; `windows` are those of the steps while the choice stays."""
        drafts = dict.fromkeys((MTP, *HOST_DRAFTS), 0)
        for row, count, num_proposed in zip(rows, choice.host, choice.head):
            drafts[row.source if count else MTP] += count or num_proposed
        self.choices[len(rows)] = sum(drafts.values()) / len(rows)
        costs = self._costs.of_batch(len(rows))
        tokens, cost = _expected(costs, windows, max(choice.head))
        by_depth = tuple(zip(*self._expected))
        self.reason = ChoiceReason(len(rows), drafts, cost, tokens, by_depth[1], by_depth[0])


DraftPolicy = FixedDrafts | AdaptiveDrafts


def even_choice(rows: Sequence[RowDrafting], depth: int, host: tuple[int, ...] = ()) -> Choice:
    """`depth` drafts of the head for each row whose request does not set a number."""
    head = tuple(depth if row.fixed is None else row.fixed for row in rows)
    return Choice(head, host or (0,) * len(rows))
