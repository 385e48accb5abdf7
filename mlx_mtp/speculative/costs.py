"""What a step costs, by batch size and depth: measured in use, and inferred where it was not.

Only the ratios between the depths of one batch size matter. A machine that becomes slow or hot, and
a context that grows, change all depths together. So a depth is compared with the one that ran just
before it, and a change during a long stay at one depth is applied to all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_READING = 8  # steps of a reading: their low median, for a step is often late and never early
_LEAST = 3  # steps that a reading needs when the depth changes before it is full
_RECENT = 64  # readings further apart are not compared: too much may have changed
_LARGEST_SURPRISE = math.log(2.0)
_MOST_TRUST = 8.0
_STORED_TRUST = 1.0  # of a cell from an earlier run
_FORGETTING = 0.998  # factor of a reading on the trust in the other depths of its batch size
_LONE = 1.5  # below this trust a cell rests on one comparison, or on an old one
_DOUBT = 0.25  # possible relative error where nothing was measured
_SLOPE = 0.25  # cost of a draft in plain steps, before anything is known
_DONORS = 6  # batch sizes that missing costs are inferred from, at most
_NEAR = 1.5  # a batch size up to this factor away lends its trust to one without measurements,
_NEIGHBOUR_SHARE = 0.5  # in this share

Seconds = dict[int, dict[int, float]]  # by batch size and depth


@dataclass(slots=True)
class _Cell:
    """One batch size at one depth."""

    log: float  # of its seconds
    trust: float = 1.0  # the number of comparisons behind it


class _Reading(NamedTuple):
    depth: int
    log: float
    step: int


class StepCosts:
    """The table of costs, for depths 0 to `max_depth`."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._rows: dict[int, dict[int, _Cell]] = {}
        self._last: dict[int, _Reading] = {}
        self._seen: set[tuple[int, int]] = set()
        self._at: tuple[int, int] | None = None
        self._samples: list[float] = []
        self._num_steps = 0
        self._inferred: dict[int, list[float]] = {}

    def observe(self, batch_size: int, depth: int, seconds: float | None) -> None:
        """Count a step that verified and proposed `depth` drafts a row; its cost may be unknown."""
        self._num_steps += 1
        if seconds is None:
            return
        at = (batch_size, depth)
        if at != self._at:
            self.settle()
            self._at = at
        if at not in self._seen:
            # The first step of a shape compiles kernels and fills pools of buffers.
            self._seen.add(at)
            return
        self._samples.append(seconds)
        if len(self._samples) == _READING:
            self._read()

    def settle(self) -> None:
        """Make a reading of the steps since the last one, if they are enough."""
        if len(self._samples) >= _LEAST:
            self._read()
        self._samples.clear()

    def relative(self, batch_size: int) -> list[float]:
        """The cost of a step at each depth from 0 to K, relative to a plain step."""
        if batch_size not in self._inferred:
            self._inferred[batch_size] = self._infer(batch_size)
        return self._inferred[batch_size]

    def doubt(self, batch_size: int, depth: int) -> float:
        """By what share the cost may be lower than `relative` says."""
        trust = 0.0
        for size, row in self._rows.items():
            if depth in row and 1 / _NEAR <= size / batch_size <= _NEAR:
                share = 1.0 if size == batch_size else _NEIGHBOUR_SHARE
                trust = max(trust, share * row[depth].trust)
        return _DOUBT / (1.0 + trust)

    def unconfirmed(self, batch_size: int) -> list[int]:
        """Depths that were measured, but not twice: a single reading may be wrong."""
        row = self._rows.get(batch_size, {})
        return [depth for depth, cell in row.items() if cell.trust < _LONE]

    def table(self) -> Seconds:
        return {
            size: {depth: math.exp(cell.log) for depth, cell in sorted(row.items())}
            for size, row in sorted(self._rows.items())
        }

    def load(self, table: Mapping[int, Mapping[int, float]]) -> None:
        """Start with a `table` of an earlier run; too large depths are left out."""
        for size, row in table.items():
            depths = [depth for depth in row if depth <= self.max_depth]
            if depths:
                self._rows[size] = {k: _Cell(math.log(row[k]), _STORED_TRUST) for k in depths}
        self._inferred.clear()

    def _read(self) -> None:
        assert self._at is not None
        size, depth = self._at
        log = math.log(statistics.median_low(self._samples))
        self._samples.clear()
        row, last = self._rows.setdefault(size, {}), self._last.get(size)
        if last is None or self._num_steps - last.step > _RECENT:
            _shift(row, depth, log)
        elif last.depth == depth:
            log = (log + last.log) / 2
            _shift(row, depth, log)
        else:
            if depth not in row:
                ratios = self.relative(size)
                expected = row[last.depth].log + math.log(ratios[depth] / ratios[last.depth])
                row[depth] = _Cell(expected, trust=0.0)
            _compare(row[depth], row[last.depth], log - last.log)
        for other, cell in row.items():
            cell.trust *= 1.0 if other == depth else _FORGETTING
        self._last[size] = _Reading(depth, log, self._num_steps)
        self._inferred.clear()

    def _infer(self, batch_size: int) -> list[float]:
        """The shape of the nearest sizes, farthest first, each laid over the one before."""
        sizes = sorted(self._rows, key=lambda size: abs(math.log(size / batch_size)))[:_DONORS]
        shape = [math.log(1.0 + _SLOPE * depth) for depth in range(self.max_depth + 1)]
        for size in reversed(sizes):
            shape = _lay_over(shape, self._rows[size])
        return [math.exp(log - shape[0]) for log in shape]


def _shift(row: dict[int, _Cell], depth: int, log: float) -> None:
    """Change all depths of a size by what this one has changed by."""
    cell = row.setdefault(depth, _Cell(log))
    change = log - cell.log
    for each in row.values():
        each.log += change


def _compare(cell: _Cell, other: _Cell, ratio: float) -> None:
    """Update the less certain of two cells by their measured (log) ratio."""
    surprise = other.log + ratio - cell.log
    surprise = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
    moved, sign = (cell, 1.0) if cell.trust <= other.trust else (other, -1.0)
    moved.log += sign * surprise / (1.0 + moved.trust)
    moved.trust = min(moved.trust + 1.0, _MOST_TRUST)


def _lay_over(shape: list[float], row: Mapping[int, _Cell]) -> list[float]:
    """The measured depths as they are; between them the shape, shifted as its neighbours are."""
    known = sorted(row)
    off = {depth: row[depth].log - shape[depth] for depth in known}
    laid = []
    for depth, log in enumerate(shape):
        below = max((k for k in known if k <= depth), default=known[0])
        above = min((k for k in known if k >= depth), default=known[-1])
        share = (depth - below) / (above - below) if above > below else 0.0
        laid.append(log + off[below] + share * (off[above] - off[below]))
    return laid
