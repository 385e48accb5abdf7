"""How many drafts each row gets, and from which source: those that are worth their time.

Every row and source offers its next positions, each with the chance that it is accepted. They are
taken in the order of chance while the expected tokens per second rise. A row may get none, and rows
may differ. Choices rest on estimates, so a new one must promise more than the one in use, and now
and then a few steps go one draft deeper or less deep, for a fixed share of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import truediv
from typing import NamedTuple, Protocol

from mlx_mtp.config import HOST_DRAFTS, MAX_DRAFT_TOKENS
from mlx_mtp.speculative.acceptance_rates import HeadRates
from mlx_mtp.speculative.costs import MTP, BatchCosts, StepCosts, StepShape
from mlx_mtp.speculative.host_sources import HostDrafter

# By so much another choice must be faster than the one in use, no drafts, and as many for each row.
_STAY, _PLAIN, _EVEN = 1.02, 1.02, 1.03
_ALIKE = 1.2  # times as many misses as another row: up to here both get as many drafts
_ROW_MEMORY = 0.97  # of a row's drafts, by window
# Answers for each row whose mean length counts, and that before any has ended.
_ANSWERS, _FIRST_ANSWER = 5, 256.0
_STEPS_PER_REVIEW = 8  # a review takes 0.2 ms of the host's time at 16 rows, 1 ms if they differ
_LEAST_RUN = 3.0  # tokens that a run must promise to be reviewed at once beside the head's drafts
_PROBE_STEPS = 6  # two are transitions, whose times say nothing, one a first of its kind
_PROBE_SHARE = 0.006  # of the time, may be lost by probes
_LEAST_REST = 50  # steps between two probes
_LEAST_LOSS = 0.03  # of a probe's step: acceptance may be wrong, too


@dataclass(eq=False, slots=True)
class DraftRow:
    """What a policy knows of one row."""

    fixed: int | None = None  # the head's drafts per step that its request asks for
    host: dict[str, HostDrafter] = field(default_factory=dict)  # by source
    source: str = ""  # the one of `host` whose run was offered last
    ahead: int = 0  # tokens that its window in flight brings at most
    missed: float = 0.0  # windows with a wrong draft, the last ones count most,
    expected: float = 0.0  # and how many were expected

    def observe(self, missed: bool, expected: float) -> None:
        self.missed = _ROW_MEMORY * self.missed + missed
        self.expected = _ROW_MEMORY * self.expected + expected

    def offer(self) -> list[float]:
        """Cumulative acceptance of the host's best run, or []; notes its source."""
        best: list[float] = []
        for source, drafter in self.host.items() if self.fixed is None else ():
            chances = drafter.cumulative_acceptance(self.ahead)
            if sum(chances) > sum(best):
                self.source, best = source, chances
        return best

    @property
    def misses(self) -> float:
        """How many times as often its drafts are wrong as those of all rows."""
        return (self.missed + 1.0) / (self.expected + 1.0)


class VerifiedRow(Protocol):
    """What a policy reads of one row of a decode step (see `engine.step.StepRow`)."""

    @property
    def drafting(self) -> DraftRow: ...
    @property
    def source(self) -> str: ...
    @property
    def num_verified(self) -> int: ...  # drafts of its window
    @property
    def num_cached(self) -> int: ...  # tokens that the window brought; 0: the row had ended before


class Choice(NamedTuple):
    """What each row gets."""

    head: tuple[int, ...]  # drafts of the head for its next window
    host: tuple[int, ...]  # drafts of the host for the window before that, in place of the head's
    speed: float = 0.0  # expected tokens in the time of a step without drafts

    @property
    def verified(self) -> int:
        """Drafts that a step verifies while the choice stays."""
        return sum(host or head for head, host in zip(self.head, self.host))


class DraftChoice(NamedTuple):
    """Why so many were chosen, and what 0, 1, 2, .. of the head for each row would bring."""

    num_rows: int
    drafts: dict[str, int]  # chosen, by source, of all rows
    cost: float  # of such a step, relative to one without drafts
    num_tokens: float  # expected of it
    costs: tuple[float, ...]
    tokens: tuple[float, ...]


class FixedDrafts:
    """A policy of k drafts of the head for each row whose request leaves that open."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self.choices: dict[int, float] = {}
        self.reason: DraftChoice | None = None

    def choose(self, rows: Sequence[DraftRow], *, steady: bool) -> Choice:
        self.choices[len(rows)] = self._num_draft_tokens
        return even_choice(rows, self._num_draft_tokens)

    def observe(self, rows: Sequence[VerifiedRow], shape: StepShape, seconds: float | None) -> None:
        pass


def best_choice(
    costs: BatchCosts,
    head: Sequence[Sequence[float]],
    copies: Sequence[Sequence[float]],
) -> Choice:
    """The fastest choice; `head` and `copies` have the chances of each row's next drafts.

    For each number of passes of the head the most likely drafts, and as many of them as pay. A row
    copies where that gains more after the price of verifying its tokens.
    """
    rows = len(head)
    best = Choice((0,) * rows, (0,) * rows, float(rows))
    token = (costs.cost(rows, 0) - costs.cost(0, 0)) / rows
    gains = [_gain(chances, token) for chances in copies]
    for passes in range(max(map(len, head)) + 1):
        offers = []
        for row, own in enumerate(head):
            copied = gains[row] > _gain(own[:passes], token)
            chances = copies[row] if copied else own[:passes]
            offers += [(chance, -n, row, copied) for n, chance in enumerate(chances, 1)]
        offers.sort(reverse=True)
        tokens = accumulate((chance for chance, *_ in offers), initial=float(rows))
        speeds = list(map(truediv, tokens, costs.window_costs(len(offers), passes)))
        speed = max(speeds)
        if speed > best.speed:
            counts = [0] * rows, [0] * rows
            for _, minus, row, copied in offers[: speeds.index(speed)]:
                counts[copied][row] = -minus
            best = Choice(tuple(counts[False]), tuple(counts[True]), speed)
    return best


class AdaptiveDrafts:
    """A policy that follows cost (`costs`, updated here) and acceptance."""

    def __init__(self, costs: StepCosts, most: int = MAX_DRAFT_TOKENS) -> None:
        self._costs, self._most = costs, most  # drafts of the head for a row; 0: there is none
        self._pool = HeadRates(most)
        self._answers, self._tokens = 1.0, _FIRST_ANSWER  # the latest, and their tokens
        self.choices: dict[int, float] = {}  # the last drafts per row by number of rows
        self.reason: DraftChoice | None = None  # of the last choice, if there was one
        self._choice = Choice((), ())
        self._depth: int | None = 0  # of all rows in the choice; None: they differ
        self._since_review = 0
        self._probe, self._probing, self._num_probes = Choice((), ()), 0, 0
        self._rested = _LEAST_REST  # steps since a probe; the first one waits for nothing

    def choose(self, rows: Sequence[DraftRow], *, steady: bool) -> Choice:
        """For these rows; steady: they are those of the step before, and it only decodes."""
        steady = steady and len(rows) == len(self._choice.head)
        copying = any(self._choice.host)
        runs = [row.offer() for row in rows]
        drafting = any(n for row, n in zip(rows, self._choice.head) if row.fixed is None)
        least = _LEAST_RUN if drafting and not copying else 0.0
        self._rested += 1
        self._since_review += 1
        if copying or not steady:
            self._probing = 0
        due = self._since_review >= _STEPS_PER_REVIEW and not self._probing
        if copying or not steady or due or any(run and sum(run) >= least for run in runs):
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
                row.drafting.observe(tokens <= drafts, self._pool.observe(drafts, tokens - 1))
        self._pool.fade(shape.rows)
        self._costs.observe(shape, seconds)

    def _review(
        self, rows: Sequence[DraftRow], runs: Sequence[Sequence[float]], *, steady: bool
    ) -> None:
        batch_costs = self._costs.of_batch(len(rows))
        misses = [row.misses for row in rows]
        head = [self._useful(self._pool.cumulative_acceptance(each)) for each in misses]
        even = [even_choice(rows, depth) for depth in range(self._most + 1)]
        costs = [batch_costs.cost(choice.verified, max(choice.head)) for choice in even]
        tokens = [len(rows) + sum(sum(own[:n]) for own, n in zip(head, e.head)) for e in even]
        scores = list(map(truediv, tokens, costs))
        before = self._depth
        if before is not None:
            scores[before] *= _STAY
        scores[0] *= _PLAIN
        self._depth = best = scores.index(max(scores))
        choice = even[best]._replace(speed=tokens[best] / costs[best])
        if max(misses) > _ALIKE * min(misses) or any(runs):
            # Rows with a number of their own are not asked here.
            offered = [own if row.fixed is None else [] for row, own in zip(rows, head)]
            found = best_choice(batch_costs, offered, list(map(self._useful, runs)))
            if found.speed * (_STAY if before is None else 1.0) > _EVEN * choice.speed:
                choice = found._replace(head=_with_own(rows, found.head))
                self._depth = None
        self._choice = choice
        drafts = dict.fromkeys((MTP, *HOST_DRAFTS), 0)
        for row, count, num_proposed in zip(rows, choice.host, choice.head):
            drafts[row.source if count else MTP] += count or num_proposed
        self.choices[len(rows)] = choice.verified / len(rows)
        cost = batch_costs.cost(choice.verified, max(choice.head))
        own = choice.speed * cost
        self.reason = DraftChoice(len(rows), drafts, cost, own, tuple(costs), tuple(tokens))
        if steady and not any(choice.host) and self._rested >= _LEAST_REST:
            self._begin_probe(even, self.reason)

    def _useful(self, chances: Sequence[float]) -> list[float]:
        """Chances, less what the step takes that is launched before an answer's end is read.

        Each token pays for it by its share of an answer.
        """
        share = max(1.0 - self._answers / self._tokens, 0.0)
        return [chance * share**place for place, chance in enumerate(chances, 1)]

    def _begin_probe(self, even: Sequence[Choice], now: DraftChoice) -> None:
        """A draft more or less for some steps, if rest has paid for it.

        In turns to see whether one draft more is accepted, what it costs, and what one less costs.
        Prices are taken to be as low as they may be; the last two turns are left out where even
        that would not change the choice.
        """
        turn, self._num_probes = self._num_probes % 3, self._num_probes + 1
        depth = round(sum(self._choice.head) / now.num_rows)
        known = self._costs.is_measured(now.num_rows, 0)
        other = depth + (-1 if turn == 2 else 1) if known else 0
        if not 0 <= other <= self._most or even[other].head == self._choice.head:
            return
        gain = now.tokens[other] / now.num_tokens - 1.0
        price = now.costs[other] / now.cost - 1.0
        price -= self._costs.uncertainty(now.num_rows, depth, other)
        if known and turn and gain < price:
            return
        affordable = int(self._rested * _PROBE_SHARE / max(price - gain, _LEAST_LOSS))
        if affordable < (1 if known and turn == 0 else _PROBE_STEPS):
            self._num_probes -= 1  # Its turn comes again.
            return
        self._probe, self._probing = even[other], min(affordable, _PROBE_STEPS)
        self._rested = 0


DraftPolicy = FixedDrafts | AdaptiveDrafts


def even_choice(rows: Sequence[DraftRow], depth: int) -> Choice:
    """So many drafts of the head for each row whose request leaves that open."""
    return Choice(_with_own(rows, (depth,) * len(rows)), (0,) * len(rows))


def _with_own(rows: Sequence[DraftRow], head: Sequence[int]) -> tuple[int, ...]:
    """The same with the drafts that the rows' requests have fixed."""
    return tuple(own if row.fixed is None else row.fixed for row, own in zip(rows, head))


def _gain(chances: Sequence[float], price: float) -> float:
    return sum(chance - price for chance in chances if chance > price)
