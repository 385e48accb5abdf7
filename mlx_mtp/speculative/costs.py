"""The price list: what a step costs by its rows, its drafts and the passes of the head.

All costs are relative to a step of as many rows without drafts. A kind of step is compared with the
kind that ran just before it, so a hot machine or a longer context changes nothing. Comparisons are
noisy: a price is a mean over those of the kinds nearby, by their variance.
"""

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from mlx_mtp.config import MAX_COPY_TOKENS, MAX_DRAFT_TOKENS

HEAD, COPY = "mtp", "copy"
KNOTS = (0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # drafts a row

# Before anything is known, of a draft: as much as one brings, a third of it for the head's pass.
_SLOPE = {HEAD: 0.8, COPY: 0.52}
_LEAST = 0.03  # of a draft, whatever was measured: noise, where that is less

_READING = 8  # steps of a reading: their low median, for a step is often late and never early
_FEWEST = 3  # steps that a reading needs when the kind changes before it is full
_RECENT = 64  # readings further apart are not compared: too much may have changed
_COMPARISONS = 8  # of a kind that count
_LEAST_NOISE = 0.02  # of a comparison: its deviation from what is right
_DOUBT = 0.1  # of a price behind one comparison, to a probe
_LOADED = 4  # comparisons that a cost of an earlier run stands for
_PRIOR_WEIGHT = 0.02  # of `_SLOPE` beside what was measured at a distance of 1
_DONORS = 6  # numbers of rows that missing costs are inferred from, at most

Kind = tuple[str, float]  # with as many passes as drafts a row (one of `KNOTS`), or without any
Table = dict[int, dict[str, dict[float, float]]]  # costs by rows, and the parts of a kind
_PLAIN: Kind = (HEAD, 0)


class Shape(NamedTuple):
    """All that a step's cost depends on here."""

    rows: int
    drafts: int  # that it verifies, of all rows
    passes: int  # of the head


class _Cell:
    """The latest comparisons of a kind. Their median is its cost: some are of a busy moment."""

    def __init__(self, cost: float, times: int = 1) -> None:
        self.latest = deque([cost] * times, maxlen=_COMPARISONS)
        self.cost = cost

    def add(self, cost: float) -> None:
        self.latest.append(cost)
        self.cost = statistics.median(self.latest)


class _Reading(NamedTuple):
    kind: Kind
    seconds: float
    step: int


class Prices:
    """Of steps of one number of rows: `verify` that of windows with 0, 1, 2, .. drafts, `passes`
    that of 0, 1, 2, .. passes of the head.
    """

    def __init__(self, verify: Sequence[float], passes: Sequence[float]) -> None:
        self._verify, self._passes = verify, passes

    def cost(self, drafts: int, passes: int) -> float:
        return self._verify[drafts] + self._passes[passes]

    def costs(self, most: int, passes: int) -> list[float]:
        """Of 0, 1, 2, .. and at most so many drafts."""
        return [cost + self._passes[passes] for cost in self._verify[: most + 1]]


class StepCosts:
    """The costs that were measured."""

    def __init__(self) -> None:
        self._cells: dict[int, dict[Kind, _Cell]] = {}
        self._last: dict[int, _Reading] = {}
        self._seen: set[Shape] = set()
        self._at: tuple[int, Kind] = 0, _PLAIN
        self._samples: list[float] = []
        self._num_steps = 0
        self._prices: dict[int, Prices] = {}
        self._noise = _LEAST_NOISE

    def observe(self, shape: Shape, seconds: float | None) -> None:
        self._num_steps += 1
        if seconds is None:
            return
        if shape not in self._seen:
            # The first step of a shape compiles kernels and fills pools of buffers.
            self._seen.add(shape)
            return
        rows, drafts, passes = shape
        knot = min(KNOTS, key=lambda each: abs(each - drafts / rows))
        # As near as may be: even windows of the head's, or none of its passes.
        source = HEAD if 2 * passes >= knot else COPY
        at = rows, (source, knot)
        if self._at != at:
            self.end_reading()
            self._at = at
        if drafts != knot * rows or passes != (knot if source == HEAD else 0):
            cost = self.prices(rows).cost(drafts, passes)
            seconds *= self._cost(*at) / cost
        self._samples.append(seconds)
        if len(self._samples) == _READING:
            self._read()

    def end_reading(self) -> None:
        """Steps of another kind follow: use the samples, if they are enough."""
        if len(self._samples) >= _FEWEST:
            self._read()
        self._samples.clear()

    def prices(self, rows: int) -> Prices:
        if rows not in self._prices:
            head, windows = ([self._cost(rows, (s, x)) for x in KNOTS] for s in (HEAD, COPY))
            more = [max(a - b, 0.0) for a, b in zip(head, windows)]
            passes = [_between(more, n) for n in range(MAX_DRAFT_TOKENS + 1)]
            verify = [_between(windows, n / rows) for n in range(rows * MAX_COPY_TOKENS + 1)]
            self._prices[rows] = Prices(verify, passes)
        return self._prices[rows]

    def knows(self, rows: int, depth: int) -> bool:
        """Steps with so many drafts of the head for each row were measured with about as many."""
        near = (cells for size, cells in self._cells.items() if 0.6 < size / rows < 1.6)
        return any((HEAD, depth) in cells for cells in near)

    def doubt(self, rows: int, *drafts: int) -> float:
        """How wrong the ratio of these kinds' costs may be, by the comparisons behind them."""
        cells = self._cells.get(rows, {})
        counts = [len(cells[HEAD, n].latest) if (HEAD, n) in cells else 0 for n in drafts if n]
        return _DOUBT / math.sqrt(0.5 + min(counts, default=0))

    def table(self) -> Table:
        table: Table = {}
        for rows, cells in sorted(self._cells.items()):
            for (source, knot), cell in sorted(cells.items()):
                table.setdefault(rows, {}).setdefault(source, {})[knot] = cell.cost
        return table

    def load(self, table: Table) -> None:
        """Take over costs in any unit, of numbers of rows whose cost without drafts is known."""
        for rows, sources in table.items():
            if plain := sources.get(HEAD, {}).get(0):
                kinds = ((s, x, cost) for s, curve in sources.items() for x, cost in curve.items())
                own = self._cells.setdefault(rows, {})
                own |= {(s, x): _Cell(cost / plain, _LOADED) for s, x, cost in kinds if x in KNOTS}
        self._prices.clear()

    def _read(self) -> None:
        rows, kind = self._at
        seconds, last = statistics.median_low(self._samples), self._last.get(rows)
        self._samples.clear()
        self._last[rows] = _Reading(kind, seconds, self._num_steps)
        cells = self._cells.setdefault(rows, {})
        if kind == _PLAIN:
            cells[kind] = _Cell(1.0)
        if last is None or last.kind == kind or self._num_steps - last.step > _RECENT:
            return
        cost = self._cost(rows, last.kind) * seconds / last.seconds
        if kind == _PLAIN:  # The measure of all others: the one before is what is known better now.
            kind, cost = last.kind, last.seconds / seconds
        if kind in cells:
            cells[kind].add(cost)
        else:
            cells[kind] = _Cell(cost)
        self._measure_noise()
        self._prices.clear()

    def _cost(self, rows: int, kind: Kind) -> float:
        """What the measured kinds nearby, itself among them, say of the price of a draft.

        Each counts by its variance: the noise of its comparisons, and how far away it is.
        """
        source, x = kind
        wrong = weight = _PRIOR_WEIGHT
        for size in sorted(self._cells, key=lambda size: abs(math.log(size / rows)))[:_DONORS]:
            for (other, knot), cell in self._cells[size].items():
                if knot:
                    away = abs(math.log(size / rows)) + abs(math.log((1 + knot) / (1 + x)))
                    more = max(cell.cost - 1.0, _LEAST)
                    noise = (2.0 * self._noise) ** 2 / len(cell.latest)
                    near = 1.0 / (noise + (away + (other != source)) ** 4)
                    wrong, weight = wrong + near * more / (_SLOPE[other] * knot), weight + near
        return 1.0 + _SLOPE[source] * x * wrong / weight

    def _measure_noise(self) -> None:
        """By the comparisons' distances from the median of their kind; loaded costs are equal."""
        cells = [(c.cost, {*c.latest}) for own in self._cells.values() for c in own.values()]
        apart = [abs(x / cost - 1.0) for cost, found in cells if len(found) > 2 for x in found]
        if apart:
            self._noise = max(1.5 * statistics.median(apart), _LEAST_NOISE)


def _between(curve: Sequence[float], x: float) -> float:
    """A curve over `KNOTS` at x, linear between them."""
    above = min(max(bisect_right(KNOTS, x), 1), len(KNOTS) - 1)
    low, high = KNOTS[above - 1], KNOTS[above]
    return curve[above - 1] + (x - low) / (high - low) * (curve[above] - curve[above - 1])
