"""How many drafts each row gets, and from which source: those that are worth their time.

Every row and source offers its next positions, each with the chance that it is accepted. They are
taken in the order of chance while the expected tokens per second rise. Nothing is a choice, and
rows differ. Choices rest on estimates, so a new one must promise more than the one in use; a probe
is a few steps at another depth that could be better by the upper end of its estimate, paid for
from a share of the time by what it really lost.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.speculative.copies import Copier
from mlx_mtp.speculative.prices import COPY, HEAD, Prices, Shape, StepCosts
from mlx_mtp.speculative.rates import HeadRates

_MARGIN = 1.02  # gain at which a choice replaces the one in use
_RAGGED_MARGIN = 1.03  # and at which rows get different numbers of the head's drafts
_COPY_MARGIN = 1.05  # and at which copying begins, for which the pipeline is emptied
_STEPS_PER_REVIEW = 4  # a review takes some 100 microseconds of the host's time
_HOPE = 1.0  # successes added in the upper estimate of a depth's acceptance
_PROMISING_SHARE = 0.015  # of the time, for probes of depths that could well be better
_REFRESHING_SHARE = 0.004  # where none could: costs and acceptance may drift
_MOST_SAVED = 8.0  # plain steps of time that may be saved up for probes, or owed for them
_PROBE_STEPS = 6  # two of them are transitions, whose times say nothing
_REST = 16  # steps between two probes


@dataclass(eq=False, slots=True)
class DraftRow:
    """What a policy knows of one row."""

    fixed: int | None = None  # the head's drafts per step that its request asked for
    rates: HeadRates = field(default_factory=lambda: HeadRates(MAX_DRAFT_TOKENS, 0.95))
    copier: Copier | None = None  # None: it copies nothing


class Outcome(NamedTuple):
    """What one row's window brought."""

    row: DraftRow
    source: str
    num_drafts: int
    num_accepted: int
    cut: bool  # the row ended in this window, so the draft after these was not tried


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

    def with_own(self, rows: Sequence[DraftRow]) -> "Choice":
        """The same with the drafts that the rows' requests have fixed."""
        own = (head if row.fixed is None else row.fixed for head, row in zip(self.head, rows))
        return self._replace(head=tuple(own))


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


class Given(NamedTuple):
    """What the rows with drafts of their own add to every choice."""

    drafts: int
    passes: int
    tokens: float


NOTHING = Given(0, 0, 0.0)


def best_choice(
    prices: Prices,
    head: Sequence[Sequence[float]],
    copies: Sequence[Sequence[float]],
    given: Given = NOTHING,
) -> Choice:
    """The fastest choice; `head` and `copies` have the chances of each row's next drafts.

    For each number of passes of the head the most likely drafts, and as many of them as pay. A row
    copies where that gains more after the price of verifying its tokens.
    """
    rows = len(head)
    token = prices.cost(2 * rows, 0, copying=True) - prices.cost(rows, 0, copying=True)
    gains = [_gain(own, token) for own in copies]
    best = Choice((0,) * rows, (0,) * rows)
    for passes in range(given.passes, max(*map(len, head), given.passes) + 1):
        offers = []
        for row, own in enumerate(head):
            copying = gains[row] > _gain(own[:passes], token)
            chances = copies[row] if copying else own[:passes]
            offers += [(chance, -n, row, copying) for n, chance in enumerate(chances, 1)]
        offers.sort(reverse=True)
        tokens, number, used, taken = rows + given.tokens, given.drafts, False, -1
        speed = tokens / prices.cost(number, passes)
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
        self.choices: dict[int, float] = {}
        self.reason: DraftChoice | None = None
        self._choice = Choice((), ())
        self._until_review = 0
        self._probe: Iterator[int] = iter(())
        self._probes: Counter[Shape] = Counter()  # steps of probes that have not been observed
        self._saved, self._share, self._rest = 1.0, _PROMISING_SHARE, _REST

    def choose(self, rows: Sequence[DraftRow], *, steady: bool) -> Choice:
        steady = steady and len(rows) == len(self._choice.head)
        if not steady:
            self._probe = iter(())
        runs = [row.copier.chances() if row.copier else [] for row in rows]
        if (depth := next(self._probe, None)) is not None:
            probe = even_choice(rows, depth)
            self._probes[Shape(len(rows), sum(probe.head), max(probe.head), False)] += 1
            return probe
        self._until_review -= 1
        if not steady or self._until_review <= 0 or any(self._choice.copied) or any(runs):
            self._review(rows, runs, steady=steady)
        return self._choice

    def observe(self, step: DecodeStep) -> None:
        for row, source, *window, cut in step.outcomes:
            if source != COPY:
                row.rates.observe(*window, cut=cut)
                self._pool.observe(*window, cut=cut)
            row.rates.fade()
        self._pool.fade()
        self._costs.observe(step.shape, step.seconds)
        rows, drafts, passes, copying = step.shape
        cost = self._costs.prices(rows).cost(drafts, passes, copying=copying)
        self._rest -= 1
        self._saved += self._share * cost
        if self._probes[step.shape] > 0:
            self._probes[step.shape] -= 1
            tokens = sum(1 + outcome.num_accepted for outcome in step.outcomes)
            self._saved -= cost - tokens / max(self._choice.speed, 1.0)
        self._saved = min(max(self._saved, -_MOST_SAVED), _MOST_SAVED)

    def _review(
        self, rows: Sequence[DraftRow], runs: Sequence[Sequence[float]], *, steady: bool
    ) -> None:
        self._until_review = _STEPS_PER_REVIEW
        prices, pool = self._costs.prices(len(rows)), self._pool.of_all()
        head = [row.rates.chances(pool) for row in rows]
        even = [even_choice(rows, depth) for depth in range(self._most + 1)]
        speeds = [_speed(prices, choice, head) for choice in even]
        best = max((c._replace(speed=s) for c, s in zip(even, speeds)), key=lambda c: c.speed)

        own = [(row.fixed, chances) for row, chances in zip(rows, head) if row.fixed is not None]
        fixed = [count for count, _ in own]
        gained = sum(sum(chances[:count]) for count, chances in own)
        given = Given(sum(fixed), max(fixed, default=0), gained)
        offered = [chances if row.fixed is None else [] for row, chances in zip(rows, head)]
        ragged = best_choice(prices, offered, [[]] * len(rows), given)
        if ragged.speed > _RAGGED_MARGIN * best.speed:
            best = ragged
        before, self._choice = self._choice, best
        if steady and not any(before.copied):
            speed = _speed(prices, before, head)
            if best.speed < _MARGIN * speed:
                self._choice = before._replace(speed=speed)
        if any(runs):
            copied = best_choice(prices, offered, runs, given)
            margin = 1.0 if any(before.copied) else _COPY_MARGIN
            if any(copied.copied) and copied.speed > margin * self._choice.speed:
                self._choice = copied
        if fixed:
            self._choice = self._choice.with_own(rows)
        self._explain(prices, even, speeds)
        if steady and self._rest <= 0 and len(fixed) < len(rows) and not any(self._choice.copied):
            self._consider_probe(prices, even, speeds, rows)

    def _consider_probe(
        self,
        prices: Prices,
        even: Sequence[Choice],
        speeds: Sequence[float],
        rows: Sequence[DraftRow],
    ) -> None:
        pool, speed = self._pool.of_all(_HOPE), self._choice.speed
        head = [row.rates.chances(pool, _HOPE) for row in rows]
        hopes = {
            depth: _speed(prices, choice, head) / (1.0 - self._costs.doubt(len(rows), depth))
            for depth, choice in enumerate(even)
            if choice.head != self._choice.head
        }
        depth = max(hopes, key=hopes.__getitem__, default=0)
        promising = hopes.get(depth, 0.0) > speed
        if not promising and hopes and not any(self._choice.head):
            depth = min(hopes)  # The first draft shows whether deeper ones are worth a probe.
        self._share = _PROMISING_SHARE if promising else _REFRESHING_SHARE
        cost = prices.cost(sum(even[depth].head), max(even[depth].head))
        if hopes and self._saved >= min(_PROBE_STEPS * (cost - len(rows) / speed), 1.0):
            self._probe, self._rest = iter([depth] * _PROBE_STEPS), _REST + _PROBE_STEPS

    def _explain(self, prices: Prices, even: Sequence[Choice], speeds: Sequence[float]) -> None:
        choice, rows = self._choice, prices.rows
        copied, kept = sum(choice.copied), choice.verified - sum(choice.copied)
        self.choices[rows] = choice.verified / rows
        cost = prices.cost(choice.verified, max(choice.head), copying=copied > 0)
        costs = tuple(prices.cost(sum(each.head), max(each.head)) for each in even)
        tokens = tuple(speed * each for speed, each in zip(speeds, costs))
        drafts = {HEAD: kept, COPY: copied}
        self.reason = DraftChoice(rows, drafts, cost, choice.speed * cost, costs, tokens)


def even_choice(rows: Sequence[DraftRow], depth: int) -> Choice:
    """So many drafts of the head for each row whose request leaves that open."""
    head = tuple(depth if row.fixed is None else row.fixed for row in rows)
    return Choice(head, (0,) * len(rows))


def _speed(prices: Prices, choice: Choice, chances: Sequence[Sequence[float]]) -> float:
    pairs = zip(choice.head, chances, strict=True)
    tokens = sum(1.0 + sum(own[:count]) for count, own in pairs)
    return tokens / prices.cost(sum(choice.head), max(choice.head))


def _gain(chances: Sequence[float], price: float) -> float:
    return sum(chance - price for chance in chances if chance > price)
