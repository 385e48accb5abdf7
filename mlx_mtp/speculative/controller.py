"""The depth that brings the most tokens per second, from measured cost and acceptance.

For B rows and depth k a step is expected to bring the sum over rows of 1 + p1 + p1 p2 + .. (k terms
of p) tokens, and takes cost[B][k]. The depth with the largest quotient is used. Only the ratios
between the costs of one batch size matter, so a depth is compared with the one that ran just before
it, and a change during a long stay at one depth is applied to all of them.

Probes are a few steps at another depth, made where that could be better by the upper end of its
estimate. They are paid for from a share of the time, by what they really lost.
"""

import logging
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlx_mtp.speculative.depth import DecodeStep, DepthChoice, DraftRow, PooledRates

logger = logging.getLogger(__name__)

# Expected gain at which a deeper depth replaces the one in use: estimates are noisy, and of two
# depths that seem equal the lower one can't lose much.
_MARGIN = 1.02
_HOPE = 1.0  # successes added in the upper estimate of a depth's acceptance
_STEPS_PER_REVIEW = 4  # a review takes some 40 microseconds of the host's time

_PROMISING_SHARE = 0.015  # of the time, for probes of depths that could well be better
_REFRESHING_SHARE = 0.004  # where none could: costs and acceptance may drift
_MOST_SAVED = 8.0  # plain steps of time that may be saved up for probes, or owed for them
_LEAST_LOSS = 0.05  # share of a probe's time to budget even where the depths seem equal
_COST_WINDOWS = 6  # of a probe that measures cost: two of its steps are transitions
_ACCEPTANCE_WINDOWS = 2  # of a probe that measures acceptance alone
_REST = 16  # steps at the depth in use between two probes, which are compared with it
_PLAIN_DOUBT = 0.15  # above it the plain step is measured first: all depths are compared with it
_MISHAP = 2.0  # factor by which a cost that was read only once may be wrong

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


@dataclass(slots=True)
class _Probe:
    batch_size: int
    depth: int
    left: int


class DepthController:
    """A `DepthPolicy` that follows cost (`costs`, updated here) and acceptance."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._pool = PooledRates(costs.max_depth)
        self.choices: dict[int, int] = {}
        self.reason: DepthChoice | None = None
        self._speeds: dict[int, float] = {}
        self._last_size = 0
        self._until_review = 0
        self._probe: _Probe | None = None
        self._unread_probes: Counter[tuple[int, int]] = Counter()  # windows, by size and depth
        self._saved = 0.0
        self._share = _PROMISING_SHARE
        self._rest = 0
        self._confirm_next = False

    def depth(self, rows: Sequence[DraftRow], *, steady: bool) -> int:
        size = len(rows)
        if all(row.fixed is not None for row in rows):
            return self.choices.get(size, 0)
        steady = steady and size == self._last_size
        self._last_size = size
        probed = self._next_probe_window(size, steady=steady)
        if probed is not None:
            return probed
        self._until_review -= 1
        if not (steady and size in self.choices and self._until_review > 0):
            self._review(rows, steady=steady)
            probed = self._next_probe_window(size, steady=steady)
        return self.choices[size] if probed is None else probed

    def observe(self, step: DecodeStep) -> None:
        for outcome in step.outcomes:
            rates, seen = outcome.row.rates, (outcome.num_drafts, outcome.num_accepted)
            rates.forget(rates.observe(*seen, cut=outcome.cut))
            self._pool.observe(*seen, cut=outcome.cut)
        self._pool.forget(0)
        self._costs.observe(step.batch_size, step.depth, step.seconds)
        self._account(step)

    def _review(self, rows: Sequence[DraftRow], *, steady: bool) -> None:
        size = len(rows)
        costs = self._costs.relative(size)
        self._until_review = _STEPS_PER_REVIEW
        tokens = _expected_tokens(rows, self._pool.expected())
        speeds = {k: tokens[k] / costs[k] for k in range(len(costs))}
        best = max(speeds, key=speeds.__getitem__)
        choice = self.choices.get(size, -1)
        margin = _MARGIN if best > choice else 1
        if choice not in speeds or speeds[best] > margin * speeds[choice]:
            logger.debug("%d rows: depth %s -> %d", size, choice, best)
            choice = self.choices[size] = best
        self._speeds[size] = speeds[choice]
        self.reason = DepthChoice(size, choice, tuple(costs), tuple(tokens))
        if steady and self._rest <= 0 and len(speeds) > 1:
            self._consider_probe(rows, choice, costs, speeds)

    def _consider_probe(
        self,
        rows: Sequence[DraftRow],
        choice: int,
        costs: Sequence[float],
        speeds: dict[int, float],
    ) -> None:
        size = len(rows)
        most = _expected_tokens(rows, self._pool.expected(_HOPE), _HOPE)
        doubts = {k: self._costs.doubt(size, k) for k in speeds if k != choice}
        hopes = {k: most[k] / (costs[k] * (1 - doubt)) for k, doubt in doubts.items()}
        once = [k for k in self._costs.unconfirmed(size) if k in hopes]
        depth = max(hopes, key=hopes.__getitem__)
        promising = hopes[depth] > speeds[choice]
        if doubts.get(0, 0.0) > _PLAIN_DOUBT:
            depth, promising = 0, True
        elif not promising and choice == 0:
            # The first draft shows whether deeper ones are worth a probe.
            depth = min(hopes)
        elif not promising and self._confirm_next:
            worst = max(once, key=hopes.__getitem__, default=depth)
            if _MISHAP * hopes[worst] > speeds[choice]:
                depth = worst
        self._share = _PROMISING_SHARE if promising else _REFRESHING_SHARE
        # What could make this depth better than it seems: a lower cost, or a higher acceptance.
        from_acceptance = most[depth] / (speeds[depth] * costs[depth])
        from_cost = 1 / (1 - doubts[depth])
        measures_cost = depth < choice or depth in once or from_cost > from_acceptance
        windows = _COST_WINDOWS if measures_cost else _ACCEPTANCE_WINDOWS
        loss = max(1 - speeds[depth] / speeds[choice], _LEAST_LOSS)
        if self._saved >= min(windows * costs[depth] * loss, _MOST_SAVED):
            self._probe = _Probe(size, depth, windows)
            self._confirm_next = not self._confirm_next

    def _next_probe_window(self, size: int, *, steady: bool) -> int | None:
        """The depth of the running probe; None without one, or if it can't go on."""
        probe = self._probe
        if probe is None:
            return None
        if not steady or probe.batch_size != size:
            self._probe = None
            return None
        probe.left -= 1
        if probe.left == 0:
            self._probe, self._rest = None, _REST
        self._unread_probes[size, probe.depth] += 1
        return probe.depth

    def _account(self, step: DecodeStep) -> None:
        """Save a share of a step's time for probes, and charge them for it if it was a probe's."""
        cost = self._costs.relative(step.batch_size)[step.depth]
        self._rest -= 1
        self._saved += self._share * cost
        at, speed = (step.batch_size, step.depth), self._speeds.get(step.batch_size)
        if self._unread_probes[at] > 0 and speed is not None:
            self._unread_probes[at] -= 1
            tokens = sum(1 + outcome.num_accepted for outcome in step.outcomes)
            self._saved -= cost - tokens / speed
        self._saved = min(max(self._saved, -_MOST_SAVED), _MOST_SAVED)


def _expected_tokens(
    rows: Sequence[DraftRow], pool: Sequence[float], hope: float = 0.0
) -> list[float]:
    total = [0.0] * (len(pool) + 1)
    for row in rows:
        tokens = row.rates.expected_tokens(pool, hope)
        for depth in range(len(total)):
            total[depth] += tokens[row.num_drafts(depth)]
    return total


def _shift(row: dict[int, _Cell], depth: int, log: float) -> None:
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
