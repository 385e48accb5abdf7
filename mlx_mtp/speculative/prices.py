"""The price list: what a step costs by its rows, its tokens and the passes of the head.

Only the ratios between the costs of one number of rows matter, so a step is compared with those of
another kind that ran just before it, and a change during a long stay at one kind is applied to
all of them: a hot machine or a longer context changes no ratio.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

HEAD, COPY = "mtp", "copy"
KNOTS = (0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # drafts a row

_HEAD_SHARE = 0.35  # of the cost of a draft: the head's pass; the rest is the longer window
_SLOPE = 0.8  # cost of a draft in plain steps before anything is known: what one brings
_LEAST = 0.03  # and at least, whatever was measured: noise, where that is less
_HOST = 0.1  # cost in plain steps of a step that is read before the next one is launched

_READING = 8  # steps of a reading: their low median, for a step is often late and never early
_FEWEST = 3  # steps that a reading needs when the kind changes before it is full
_RECENT = 64  # readings further apart are not compared: too much may have changed
_MOST_TRUST = 8
_DONORS = 6  # numbers of rows that missing costs are inferred from, at most

Key = tuple[str, float]  # whether anything was copied, and drafts a row: one of `KNOTS`
Seconds = dict[int, dict[str, dict[float, float]]]  # by rows, and the parts of the key


class Shape(NamedTuple):
    """All that a step's cost depends on here."""

    rows: int
    drafts: int  # that it verifies, of all rows
    passes: int  # of the head
    copying: bool  # some were copied, for which the step before had to be read first


@dataclass(slots=True)
class _Cell:
    log: float  # of its seconds
    trust: int = 1  # the number of comparisons behind it


class _Reading(NamedTuple):
    key: Key
    log: float
    step: int


class Prices:
    """Of steps of one number of rows, relative to one without drafts.

    The curves say how much more a step costs, over `KNOTS`.
    """

    def __init__(self, rows: int, curves: Mapping[str, Sequence[float]]) -> None:
        self.rows = rows
        self._curves = curves
        self._known: dict[tuple[int, str], float] = {}

    def cost(self, drafts: int, passes: int, *, copying: bool = False) -> float:
        """The head's passes cost what they do where all rows have as many drafts."""
        head, verified = self._at(passes * self.rows, HEAD), self._at(drafts, HEAD)
        if copying:
            return 1.0 + self._at(drafts, COPY) + _HEAD_SHARE * head
        return 1.0 + verified + _HEAD_SHARE * (head - verified)

    def _at(self, drafts: int, source: str) -> float:
        value = self._known.get((drafts, source))
        if value is None:
            value = _between(self._curves[source], drafts / self.rows)
            self._known[drafts, source] = value
        return value


class StepCosts:
    """The costs that were measured."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[Key, _Cell]] = {}
        self._last: dict[int, _Reading] = {}
        self._seen: set[Shape] = set()
        self._at: tuple[int, Key] | None = None
        self._samples: list[float] = []
        self._num_steps = 0
        self._prices: dict[int, Prices] = {}

    def observe(self, shape: Shape, seconds: float | None) -> None:
        self._num_steps += 1
        if seconds is None:
            return
        if shape not in self._seen:
            # The first step of a shape compiles kernels and fills pools of buffers.
            self._seen.add(shape)
            return
        source, x = COPY if shape.copying else HEAD, shape.drafts / shape.rows
        knot = min(KNOTS, key=lambda each: abs(each - x))
        if self._at != (shape.rows, (source, knot)):
            self.settle()
            self._at = shape.rows, (source, knot)
        # As it were at the knot, with as many passes as drafts, or none beside what is copied.
        prices = self.prices(shape.rows)
        there = 1.0 + _between(prices._curves[source], knot)
        cost = prices.cost(shape.drafts, shape.passes, copying=shape.copying)
        self._samples.append(seconds * there / cost)
        if len(self._samples) == _READING:
            self._read()

    def settle(self) -> None:
        if len(self._samples) >= _FEWEST:
            self._read()
        self._samples.clear()

    def prices(self, rows: int) -> Prices:
        if rows not in self._prices:
            self._prices[rows] = Prices(rows, self._infer(rows))
        return self._prices[rows]

    def knows_plain(self, rows: int) -> bool:
        """Steps without drafts were measured with so many rows, not only inferred from others."""
        cell = self._rows.get(rows, {}).get((HEAD, 0))
        return cell is not None and cell.trust > 0

    def table(self) -> Seconds:
        table: Seconds = {}
        for size, cells in sorted(self._rows.items()):
            measured = {key: cell for key, cell in cells.items() if cell.trust > 0}
            for (source, knot), cell in sorted(measured.items()):
                table.setdefault(size, {}).setdefault(source, {})[knot] = math.exp(cell.log)
        return table

    def load(self, table: Seconds) -> None:
        for size, sources in table.items():
            cells = self._rows.setdefault(size, {})
            for source, curve in sources.items():
                cells |= {(source, x): _Cell(math.log(s)) for x, s in curve.items() if x in KNOTS}
        self._prices.clear()

    def _read(self) -> None:
        assert self._at is not None
        size, key = self._at
        log = math.log(statistics.median_low(self._samples))
        self._samples.clear()
        cells, last = self._rows.setdefault(size, {}), self._last.get(size)
        if last is not None and last.key != key and self._num_steps - last.step <= _RECENT:
            now = cells[last.key].log + log - last.log
            cell = cells.setdefault(key, _Cell(now, trust=0))
            cell.log += (now - cell.log) / (1 + cell.trust)
            cell.trust = min(cell.trust + 1, _MOST_TRUST)
        else:
            if last is not None and last.key == key:
                log = (log + last.log) / 2
            if not cells:  # A plain step's cost is the measure of all others.
                price = 1.0 + _between(self.prices(size)._curves[key[0]], key[1])
                cells[HEAD, 0] = _Cell(log - math.log(price), trust=0)
            cell = cells.setdefault(key, _Cell(log))
            cell.trust, change = max(cell.trust, 1), log - cell.log
            for each in cells.values():
                each.log += change
        self._last[size] = _Reading(key, log, self._num_steps)
        self._prices.clear()

    def _infer(self, rows: int) -> dict[str, list[float]]:
        """From the nearest numbers of rows, farthest first, each laid over the one before."""
        sizes = sorted(self._rows, key=lambda size: abs(math.log(size / rows)))[:_DONORS]
        curves = {HEAD: [_SLOPE * x for x in KNOTS]}
        for source in (HEAD, COPY):
            for size in reversed(sizes):
                curves[source] = _lay_over(curves[source], self._measured(size, source))
            head = curves[HEAD]
            curves.setdefault(COPY, [_HOST + (1.0 - _HEAD_SHARE) * cost for cost in head])
        return curves

    def _measured(self, size: int, source: str) -> dict[float, float]:
        cells = self._rows[size]
        if (HEAD, 0) not in cells:
            return {}
        logs = {x: cell.log - cells[HEAD, 0].log for (s, x), cell in cells.items() if s == source}
        return {x: max(math.exp(log) - 1.0, _LEAST) for x, log in logs.items()}


def _between(curve: Sequence[float], x: float) -> float:
    """A curve over `KNOTS` at x, linear between them."""
    above = min(max(bisect_right(KNOTS, x), 1), len(KNOTS) - 1)
    low, high = KNOTS[above - 1], KNOTS[above]
    return curve[above - 1] + (x - low) / (high - low) * (curve[above] - curve[above - 1])


def _lay_over(curve: list[float], measured: Mapping[float, float]) -> list[float]:
    """What was measured as it is; between that the curve, as many times as high as beside it."""
    at = {x: cost / known for x, cost in measured.items() if (known := curve[KNOTS.index(x)]) > 0}
    if not at:
        return curve
    laid = []
    for x, cost in zip(KNOTS, curve):
        below = max((each for each in at if each <= x), default=min(at))
        above = min((each for each in at if each >= x), default=max(at))
        share = (x - below) / (above - below) if above > below else 0.0
        laid.append(cost * (at[below] + share * (at[above] - at[below])))
    return laid
