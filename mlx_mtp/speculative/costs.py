"""What decode steps cost by their shape: a linear model of a step's seconds, learned online.

A product takes what its number of tokens takes, wherever they come from, so the costs of windows
follow from steps of any number of rows. Steps are measured in use, and while no request runs
(`mlx_mtp/calibration`). `table` and `load_table` carry what the latter found from one run to the
next.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_mtp.config import MAX_DRAFT_TOKENS, MAX_HOST_DRAFTS

# Kinds of measured steps: drafts of the MTP head, or of the host (so without passes of the head),
# or of the host for one row alone; and those with drafts of the head in use.
MTP, HOST, RAGGED, USE = "mtp", "host", "ragged", "use"

LEAST_COST = 1e-15  # in a table

# Numbers of tokens between which a step's cost is linear: products take steps at some of them.
_KNOTS = np.array(
    [*range(1, 7), 8, 9, 10, 12, 13, 16, 20, 24, 32, 48, 64, 96, 128, 256, 1024], float
)
# The prior of what a token more takes, relative to a step of one token: about as much as a draft
# brings, until something was measured. Its mean, the standard deviation of all slopes together and
# that of each, and the distance (of logarithms of tokens) at which slopes differ.
_SLOPE, _ALL_SLOPES, _EACH_SLOPE, _ALIKE = 0.4, 0.35, 0.25, 0.7
# Mean and standard deviation of all else.
_PRIOR = (
    (1.0, 0.1),  # what one token takes
    (0.0, 0.1),  # what any drafts take more,
    (0.0, 0.02),  # and for each row
    (0.15, 0.1),  # what a pass of the head takes,
    (0.01, 0.03),  # and for each row
    (0.04, 0.05),  # what a place does by which a window is shorter than the longest
    (0.0, 0.05),  # what a row more takes, beside its token
    (0.0, 0.3),  # what a step in use takes more,
    (0.0, 0.01),  # and for each row
)
# By how much the logarithm of the speed changes from one measurement to the next, and when requests
# come to a machine that was calibrated: standard deviations.
_SPEED_CHANGES, _SPEED_IN_USE = 0.015, 0.1
_CHANGES = 0.001  # share of the prior's variance that each measurement in use adds
_NOISE = 0.04  # of a measurement, relative
_FARTHEST = 0.5, 2.0  # shares by which a measurement counts as less or more than expected
_BLOCK, _FEWEST_STEPS = 8, 3  # steps of a measurement in use, and the fewest
_KEPT = 3  # measurements of a cell, of which the median is kept for the next run
_LATE = 1.3  # times the usual seconds: a step of a block counts as no more
_MOST_SCALE = 4.0  # times the prior's seconds, by coefficients alone
_LEAST_PLAIN = 0.1  # seconds that a step is taken to have at least, relative to one token's
# Of windows, over a step without drafts: what they take more at least, with a draft in each row;
# and the standard deviations by which they are taken to cost more than estimated.
_LEAST_MORE, _LEAST_SLOPE, _CAUTION = -0.5, 0.01, 0.5

Vector = NDArray[np.float64]


class StepShape(NamedTuple):
    """All that the cost of a decode step depends on here."""

    rows: int
    drafts: int  # verified, of all rows
    passes: int  # of the MTP head
    longest: int  # drafts of the row with the most

    @property
    def padding(self) -> int:
        """Places by which the rows' windows are shorter than the longest."""
        return self.rows * self.longest - self.drafts


class CostKey(NamedTuple):
    """What a cost is kept for."""

    kind: str
    rows: int
    size: float  # of steps: drafts per row; of a chunk (see `engine.chunk_costs`): its tokens

    @property
    def shape(self) -> StepShape:
        """Of steps that have this cost."""
        size = int(self.size)
        drafts = size if self.kind == RAGGED else self.rows * size
        return StepShape(self.rows, drafts, size if self.kind in (MTP, USE) else 0, size)


Table = Mapping[CostKey, float]
"""Costs to keep: of steps in seconds, of chunks in seconds per token."""


class BatchCosts(NamedTuple):
    """Costs of steps of one number of rows, relative to its step without drafts.

    `verify` are those of windows with 0, 1, 2, .. drafts of all rows, `passes` those of 0, 1, 2, ..
    passes of the head, and `padding` that of each place (see `StepShape.padding`).
    """

    verify: Sequence[float]
    passes: Sequence[float]
    padding: float

    def cost(self, shape: StepShape) -> float:
        drafting = self.verify[shape.drafts] + self.passes[shape.passes]
        return drafting + self.padding * shape.padding


class StepCosts:
    """A linear model of the seconds of decode steps, beside the machine's speed.

    The seconds of a step are `exp(speed) * features @ coefficients`. All are estimated by an
    extended Kalman filter. The speed may change with each measurement: other work on the machine
    slows all steps alike.
    """

    def __init__(self) -> None:
        self._prior, self._covariance = _prior()  # of speed and coefficients
        self._mean = self._prior.copy()
        self._changes = _CHANGES * np.diag(np.diag(self._covariance))
        self._cells: dict[CostKey, deque[float]] = {}  # their latest seconds
        self._in_use = False  # a step in use was measured
        self._steps: list[tuple[StepShape, float]] = []  # of the block that is not complete
        # The first launch of a shape compiles kernels and fills buffer pools.
        self._seen = set[tuple[int, ...]]()
        # Of the last step: rows, and the number of drafts of each; None: they differ.
        self._kind: tuple[int, int | None] = 0, None
        self._batch_costs: dict[int, BatchCosts] = {}

    def learn(self, cell: CostKey, seconds: float) -> None:
        """Learn from steps that were measured while no request ran, or in an earlier run."""
        self._keep(cell, seconds)
        self._learn(_features_of(cell.shape, in_use=cell.kind == USE), seconds)

    def observe(self, shape: StepShape, seconds: float | None) -> None:
        """Learn from a step in use; None: its time is not known."""
        rows, drafts, passes, longest = shape
        is_even = drafts == rows * passes == rows * longest
        kind = rows, longest if is_even else None
        if self._kind != kind or not seconds or len(self._steps) == _BLOCK:
            self._end_block()
        self._kind = kind
        if not seconds:
            return
        if (launch := (rows, passes, longest)) not in self._seen:
            self._seen.add(launch)
            return
        self._steps.append((shape, seconds))

    def of_batch(self, rows: int) -> BatchCosts:
        if rows not in self._batch_costs:
            self._batch_costs[rows] = self._costs_of(rows)
        return self._batch_costs[rows]

    def has_measured(self, rows: int, depth: int) -> bool:
        """Whether about as many rows, with at least as many drafts each, were measured twice."""
        alike = (
            len(seconds)
            for cell, seconds in self._cells.items()
            if cell.size >= depth and 0.4 < cell.rows / rows < 2.5
        )
        return sum(alike) >= 2

    def table(self) -> Table:
        return {cell: median_low(seconds) for cell, seconds in sorted(self._cells.items())}

    def load_table(self, table: Table) -> None:
        """Take over what an earlier run has measured of decode steps."""
        for cell, seconds in sorted(table.items(), key=lambda each: each[0][1:]):
            if cell.kind in (MTP, HOST, RAGGED, USE):
                self.learn(cell, seconds)

    def _keep(self, cell: CostKey, seconds: float) -> None:
        self._cells.setdefault(cell, deque(maxlen=_KEPT)).append(seconds)

    def _end_block(self) -> None:
        """Learn from steps of one kind, as the host can't see where a single one ends."""
        steps, self._steps = self._steps, []
        if len(steps) < _FEWEST_STEPS:
            return
        shapes, times = zip(*steps)
        usual = _LATE * median_low(times)  # Some steps are late.
        seconds = statistics.mean(min(each, usual) for each in times)
        features = np.mean([_features_of(shape, in_use=True) for shape in shapes], axis=0)
        if not self._in_use:
            self._in_use = True
            self._covariance[0, 0] += _SPEED_IN_USE**2
        self._covariance += self._changes
        self._learn(features, seconds)
        rows, depth = self._kind
        if depth is not None:
            self._keep(CostKey(USE, rows, depth), seconds)

    def _learn(self, features: Vector, seconds: float) -> None:
        speed, coefficients = self._mean[0], self._mean[1:]
        expected = max(float(coefficients @ features), _LEAST_PLAIN)
        if np.isnan(speed):  # It is the first measurement.
            self._mean[0] = speed = np.log(seconds / expected)
        self._covariance[0, 0] += _SPEED_CHANGES**2
        low, high = _FARTHEST
        off = min(max(float(seconds / np.exp(speed) / expected - 1.0), -low), high)
        # What a change of the speed, and of each coefficient, changes of this.
        gradient = np.concatenate([[1.0], features / expected])
        spread = self._covariance @ gradient
        gain = spread / (gradient @ spread + _NOISE**2)
        self._mean += gain * off
        self._covariance -= np.outer(gain, spread)
        scale = float(self._mean[1:] @ features) / float(self._prior[1:] @ features)
        if scale > _MOST_SCALE:
            self._rescale(scale)
        self._batch_costs.clear()

    def _rescale(self, scale: float) -> None:
        """Divide all coefficients, and multiply the speed: the same costs.

        Only ratios of costs are known well. So coefficients could grow for ever while the speed
        falls, and what is added to their covariance would be nothing beside them.
        """
        self._mean[0] += math.log(scale)
        self._mean[1:] /= scale
        self._covariance[1:] /= scale
        self._covariance[:, 1:] /= scale

    def _costs_of(self, rows: int) -> BatchCosts:
        mean, covariance = self._mean[1:], self._covariance[1:, 1:]
        none = _features(rows, 0, 0, 0, in_use=True)
        plain = max(float(mean @ none), _LEAST_PLAIN)

        def more(drafts: int = 0, passes: int = 0, padding: int = 0) -> float:
            """What this costs beyond a step without drafts."""
            share = mean @ (_features(rows, drafts, passes, padding, in_use=True) - none) / plain
            return float(share)

        def doubt(drafts: int) -> float:
            """The standard deviation of what even windows cost, with the head's passes."""
            even = _features(rows, drafts, min(drafts // rows, MAX_DRAFT_TOKENS), 0, in_use=True)
            off = (even - mean @ even / plain * none) / plain
            return math.sqrt(max(float(off @ covariance @ off), 0.0))

        most = rows * MAX_HOST_DRAFTS
        # Between these numbers of drafts costs are linear.
        ends = [1, *(int(n) - rows for n in _KNOTS if rows + 1 < n < rows + most), most]
        known = np.maximum.accumulate(
            [_LEAST_MORE, *(more(n) + _CAUTION * doubt(n) for n in ends)]
        )[1:]
        drafts = np.arange(1, most + 1)
        verify = 1.0 + np.interp(drafts, ends, known) + _LEAST_SLOPE / rows * drafts
        passes = [max(more(passes=n), 0.0) for n in range(MAX_DRAFT_TOKENS + 1)]
        place = max(more(padding=1), 0.0) + _LEAST_SLOPE / rows
        return BatchCosts([1.0, *verify.tolist()], passes, place)


def _features_of(shape: StepShape, *, in_use: bool) -> Vector:
    return _features(shape.rows, shape.drafts, shape.passes, shape.padding, in_use=in_use)


def _features(rows: int, drafts: int, passes: int, padding: int, *, in_use: bool) -> Vector:
    """What each coefficient is multiplied by: those of `_PRIOR`, then slopes between `_KNOTS`."""
    any_drafts, used = drafts > 0, float(in_use)
    others = (
        1.0,
        any_drafts,
        any_drafts * rows,
        passes,
        passes * rows,
        padding,
        rows - 1,
        used,
        used * rows,
    )
    slopes = np.clip(rows + drafts - _KNOTS[:-1], 0.0, np.diff(_KNOTS))
    return np.concatenate([others, slopes])


def _prior() -> tuple[Vector, Vector]:
    """Mean and covariance of the speed, which is not known (nan), and of all coefficients."""
    means, deviations = zip(*_PRIOR)
    places = np.log(_KNOTS[:-1])
    distances = np.abs(places[:, None] - places) / _ALIKE
    slopes = _ALL_SLOPES**2 + _EACH_SLOPE**2 * np.exp(-distances)
    others = len(_PRIOR) + 1
    covariance = np.zeros((others + len(places),) * 2)
    covariance[:others, :others] = np.diag([0.0, *np.square(deviations)])
    covariance[others:, others:] = slopes
    return np.array([np.nan, *means, *[_SLOPE] * len(places)]), covariance
