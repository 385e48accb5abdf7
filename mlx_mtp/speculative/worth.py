"""How many drafts each row gets, and from which source: those that are worth their time.

Every row and source offers its next positions, each with the chance that it is accepted. They are
taken in the order of chance while the expected tokens per second rise. Nothing is a choice, and
rows differ. Choices rest on estimates, so a new one must promise more than the one in use, and now
and then a few steps go one draft deeper or less deep, for a fixed share of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.speculative.copies import Copier
from mlx_mtp.speculative.prices import COPY, HEAD, Prices, Shape, StepCosts
from mlx_mtp.speculative.rates import HeadRates

_MARGIN = 1.02  # gain at which a choice replaces the one in use
_RAGGED_MARGIN = 1.03  # and at which rows get different numbers, or copy
_ANSWER, _ANSWER_GAIN = 256.0, 0.2  # tokens before any was seen, and what the next one adds
_STEPS_PER_REVIEW = 4  # a review takes some 100 microseconds of the host's time
_PROBE_STEPS = 6  # two are transitions, whose times say nothing, and one may be a first of its kind
_PROBE_SHARE = 0.006  # of the time, may be lost by probes
_LEAST_REST = 48  # steps between two probes
_LEAST_LOSS, _MOST_LOSS = 0.05, 0.3  # of a probe's steps: prices and acceptance may be wrong


@dataclass(eq=False, slots=True)
class DraftRow:
    """What a policy knows of one row."""

    fixed: int | None = None  # the head's drafts per step that its request asked for
    rates: HeadRates = field(default_factory=lambda: HeadRates(MAX_DRAFT_TOKENS, 0.95))
    copier: Copier | None = None  # None: it copies nothing
    num_tokens: int = 0  # of its answer, in steps that were observed


class Outcome(NamedTuple):
    """What one row's window brought."""

    row: DraftRow
    source: str
    num_drafts: int
    num_accepted: int
    num_kept: int  # tokens: one more than accepted, but where one of these was the row's last
    ended: bool  # this was the row's last window


class DecodeStep(NamedTuple):
    """A decode step that has been read."""

    shape: Shape
    outcomes: Sequence[Outcome]  # of the rows that had not ended before
    seconds: float | None  # its cost, where that is known (see `StepTimer`)


class Choice(NamedTuple):
    """What each row gets."""

    head: tuple[int, ...]  # drafts of the head for its next window
    copied: tuple[int, ...]  # tokens to copy into the window before that, in place of the head's
    speed: float = 0.0  # expected tokens in the time of a step without drafts

    @property
    def verified(self) -> int:
        """Drafts that a step verifies while the choice stays."""
        return sum(copied or head for head, copied in zip(self.head, self.copied))


class DraftChoice(NamedTuple):
    """Why so many were chosen, and what 0, 1, 2, .. of the head for each row would bring."""

    num_rows: int
    drafts: dict[str, int]  # chosen, by source, of all rows
    cost: float  # of such a step, relative to one without drafts
    num_tokens: float  # expected of it
    costs: tuple[float, ...]
    tokens: tuple[float, ...]


class DraftPolicy(Protocol):
    """Chooses drafts for the rows whose requests leave that open.

    `choices` has the last drafts per row by number of rows, probes left out.
    """

    choices: dict[int, float]
    reason: DraftChoice | None  # of the last choice, if there was one

    def choose(self, rows: Sequence[DraftRow], *, steady: bool) -> Choice:
        """For these rows; steady: they are those of the step before, and it only decodes."""

    def observe(self, step: DecodeStep) -> None:
        """Learn from a step, one or two steps after it was planned."""


class FixedDepth:
    """A `DraftPolicy` of k drafts of the head for each row."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self.choices: dict[int, float] = {}
        self.reason: DraftChoice | None = None

    def choose(self, rows: Sequence[DraftRow], *, steady: bool) -> Choice:
        self.choices[len(rows)] = self._num_draft_tokens
        return even_choice(rows, self._num_draft_tokens)

    def observe(self, step: DecodeStep) -> None:
        pass


def best_choice(
    prices: Prices,
    head: Sequence[Sequence[float]],
    copies: Sequence[Sequence[float]],
) -> Choice:
    """The fastest choice; `head` and `copies` have the chances of each row's next drafts.

    For each number of passes of the head the most likely drafts, and as many of them as pay. A row
    copies where that gains more after the price of verifying its tokens.
    """
    rows = len(head)
    token = prices.cost(2 * rows, 0, copying=True) - prices.cost(rows, 0, copying=True)
    gains = [_gain(own, token) for own in copies]
    best = Choice((0,) * rows, (0,) * rows)
    for passes in range(max(map(len, head)) + 1):
        offers = []
        for row, own in enumerate(head):
            copying = gains[row] > _gain(own[:passes], token)
            chances = copies[row] if copying else own[:passes]
            offers += [(chance, -n, row, copying) for n, chance in enumerate(chances, 1)]
        offers.sort(reverse=True)
        tokens, number, used, taken = float(rows), 0, False, -1
        speed = tokens / prices.cost(0, passes)
        for place, (chance, _, _, copying) in enumerate(offers):
            if speed > best.speed:
                best, taken = best._replace(speed=speed), place
            tokens, number, used = tokens + chance, number + 1, used or copying
            speed = tokens / prices.cost(number, passes, copying=used)
        if speed > best.speed:
            best, taken = best._replace(speed=speed), len(offers)
        if taken >= 0:
            counts = [[0] * rows, [0] * rows]
            for _, minus, row, copying in offers[:taken]:
                counts[copying][row] = -minus
            best = Choice(tuple(counts[False]), tuple(counts[True]), best.speed)
    return best


class DraftsByWorth:
    """A `DraftPolicy` that follows cost (`costs`, updated here) and acceptance."""

    def __init__(self, costs: StepCosts, most: int = MAX_DRAFT_TOKENS) -> None:
        self._costs = costs
        self._most = most  # drafts of the head for a row; 0: there is none
        self._pool = HeadRates(most, 0.98)
        self._answer = _ANSWER  # geometric mean of the tokens of the latest answers
        self.choices: dict[int, float] = {}
        self.reason: DraftChoice | None = None
        self._choice = Choice((), ())
        self._until_review = 0
        self._probe, self._probing, self._up = Choice((), ()), 0, True
        self._rested = _LEAST_REST  # the first probe waits for nothing but the price of plain steps

    def choose(self, rows: Sequence[DraftRow], *, steady: bool) -> Choice:
        steady = steady and len(rows) == len(self._choice.head)
        # A run that is begun goes on behind what the step in flight brings.
        late = 0 if any(self._choice.copied) else 1 + max(self._choice.head, default=0)
        runs = [
            row.copier.chances()[late:] if row.copier and row.fixed is None else [] for row in rows
        ]
        self._rested += 1
        self._until_review -= 1
        due = self._until_review <= 0 and not self._probing
        if not steady or any(self._choice.copied) or any(runs) or due:
            self._review(rows, runs, steady=steady)
        if not steady or any(self._choice.copied):
            self._probing = 0
        if self._probing == 0:
            return self._choice
        self._probing -= 1
        return self._probe

    def observe(self, step: DecodeStep) -> None:
        for row, source, *window, num_kept, ended in step.outcomes:
            if source != COPY:
                # Behind its last token no draft was tried.
                for rates in (row.rates, self._pool):
                    rates.observe(*window, cut=num_kept == window[1])
            row.rates.fade()
            row.num_tokens += num_kept
            if ended:
                self._answer *= (row.num_tokens / self._answer) ** _ANSWER_GAIN
        self._pool.fade()
        self._costs.observe(step.shape, step.seconds)

    def _review(
        self, rows: Sequence[DraftRow], runs: Sequence[Sequence[float]], *, steady: bool
    ) -> None:
        self._until_review = _STEPS_PER_REVIEW
        prices, pool = self._costs.prices(len(rows)), self._pool.of_all()
        head = [self._useful(row.rates.chances(pool)) for row in rows]
        runs = [self._useful(run) for run in runs]
        even = [even_choice(rows, depth) for depth in range(self._most + 1)]
        even = [each._replace(speed=_speed(prices, each, head)) for each in even]
        best = max(even, key=lambda choice: choice.speed)
        before, copied = self._choice, any(self._choice.copied)
        if steady and not copied:
            before = before._replace(speed=_speed(prices, before, head))
            # Nothing is drafted as soon as that is no worse.
            if any(best.head) and best.speed < _MARGIN * before.speed:
                best = before
        # Rows with a number of their own are not asked here.
        offered = [own if row.fixed is None else [] for row, own in zip(rows, head)]
        found = best_choice(prices, offered, runs)
        if found.speed > _RAGGED_MARGIN * best.speed:
            best = found._replace(head=_with_own(rows, found.head))
        self._choice = best
        self._explain(prices, even)
        if steady and self._rested >= _LEAST_REST and not any(best.copied):
            self._begin_probe(even)

    def _useful(self, chances: Sequence[float]) -> list[float]:
        """The same less what is behind an answer's end.

        With t tokens a step an answer of n takes n / t steps, and one more that was launched before
        its end was read: t / (1 + t / n) of each step count, so the next one about 1 - 2 t / n.
        """
        share = max(1.0 - 2.0 / self._answer, 0.0)
        return [chance * share**place for place, chance in enumerate(chances, 1)]

    def _begin_probe(self, even: Sequence[Choice]) -> None:
        """A draft more and a draft less in turns, after a rest that pays for it."""
        best = self._choice
        depth = round(sum(best.head) / len(best.head)) + (1 if self._up else -1)
        depth = depth if self._costs.knows_plain(len(best.head)) else 0
        if not 0 <= depth <= self._most or even[depth].head == best.head:
            self._up = not self._up
            return
        loss = min(max(1.0 - even[depth].speed / best.speed, _LEAST_LOSS), _MOST_LOSS)
        if self._rested * _PROBE_SHARE >= _PROBE_STEPS * loss:
            self._probe, self._probing, self._rested = even[depth], _PROBE_STEPS, 0
            self._up = not self._up

    def _explain(self, prices: Prices, even: Sequence[Choice]) -> None:
        choice, rows = self._choice, prices.rows
        copied, kept = sum(choice.copied), choice.verified - sum(choice.copied)
        self.choices[rows] = choice.verified / rows
        cost = prices.cost(choice.verified, max(choice.head), copying=copied > 0)
        costs = tuple(prices.cost(sum(each.head), max(each.head)) for each in even)
        tokens = tuple(each.speed * cost for each, cost in zip(even, costs))
        drafts = {HEAD: kept, COPY: copied}
        self.reason = DraftChoice(rows, drafts, cost, choice.speed * cost, costs, tokens)


def even_choice(rows: Sequence[DraftRow], depth: int) -> Choice:
    """So many drafts of the head for each row whose request leaves that open."""
    return Choice(_with_own(rows, (depth,) * len(rows)), (0,) * len(rows))


def _with_own(rows: Sequence[DraftRow], head: Sequence[int]) -> tuple[int, ...]:
    """The same with the drafts that the rows' requests have fixed."""
    return tuple(own if row.fixed is None else row.fixed for row, own in zip(rows, head))


def _speed(prices: Prices, choice: Choice, chances: Sequence[Sequence[float]]) -> float:
    pairs = zip(choice.head, chances, strict=True)
    tokens = sum(1.0 + sum(own[:count]) for count, own in pairs)
    return tokens / prices.cost(sum(choice.head), max(choice.head))


def _gain(chances: Sequence[float], price: float) -> float:
    return sum(chance - price for chance in chances if chance > price)
