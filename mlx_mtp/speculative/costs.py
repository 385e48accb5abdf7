"""What decode steps cost by their shape: a linear model of a step's seconds, learned online.

A matrix product's time depends only on its number of tokens, not on which rows they belong to, so
the costs of windows can be inferred from steps with other numbers of rows. Steps are measured in
use, and while no request runs (`mlx_mtp/calibration`); `table` carries costs to the next run.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_mtp.config import MAX_DRAFT_TOKENS, MAX_HOST_DRAFTS

# Kinds of measured steps. In calibration: drafts of the MTP head, of the host (no passes of the
# head), of the host for one row only, and steps without look-ahead. In use: drafts of the head.
MTP, HOST, RAGGED, SYNC, USE = "mtp", "host", "ragged", "sync", "use"
LEAST_COST = 1e-15  # minimum cost in a table

# Numbers of tokens between which a step's cost is linear: at some of them a product's time jumps.
_KNOTS = np.array(
    [*range(1, 7), 8, 9, 10, 12, 13, 16, 20, 24, 32, 48, 64, 96, 128, 256, 1024], float
)
# The prior of the slopes: the cost of one more token, relative to a step of one token. The mean is
# about the gain of a draft. Then standard deviations, of what all slopes share and of each token's
# own part, and the distance, in logarithms of tokens, over which the latter's correlation is 1/e.
_SLOPE, _ALL_SLOPES, _EACH_SLOPE, _ALIKE = 0.4, 0.35, 0.25, 0.7
# Prior mean and standard deviation of the other coefficients, in the same unit.
_PRIOR = (
    (1.0, 0.1),  # a step of one token
    (0.0, 0.1),  # extra cost if a step has any drafts
    (0.0, 0.02),  # extra cost per row if a step has any drafts
    (0.15, 0.1),  # a pass of the head
    (0.01, 0.03),  # extra cost of a pass of the head per row
    (0.04, 0.05),  # a place of padding (see `StepShape.padding`)
    (0.0, 0.05),  # each row after the first, besides the row's token
    (0.0, 0.3),  # extra cost of a step in use
    (0.0, 0.01),  # extra cost of a step in use per row
    (0.1, 0.3),  # extra cost of a step without look-ahead: the device waits for the host
    (0.0, 0.01),  # extra cost of a step without look-ahead per row
)
# Relative standard deviation of the machine's speed at first, and of its change per measurement.
_FIRST_SPEED, _SPEED_CHANGES = 0.3, 0.015
_CHANGES = 0.0003  # share of what is known of its coefficients that a measurement in use forgets
_NOISE = 0.04  # relative standard deviation of a measurement
_BLOCK, _PLAIN_BLOCK, _FEWEST_STEPS = 8, 16, 3  # steps per measurement: most, most if plain, fewest
_LATE = 1.3  # times the median of a block: longer pairs of steps are cut to this
_LEAST_PLAIN = 0.1  # minimum cost of a step, relative to one of one token
# Limits of the costs of windows, relative to a step without drafts: the minimum extra cost; the
# minimum extra cost of one draft in each row; the standard deviations added to the estimate.
_LEAST_MORE, _LEAST_SLOPE, _CAUTION = -0.5, 0.01, 0.5

Vector = NDArray[np.float64]


class StepShape(NamedTuple):
    """The numbers that determine the cost of a decode step in this model."""

    rows: int
    drafts: int  # verified drafts of all rows
    passes: int  # passes of the MTP head
    longest: float  # drafts in the longest window; a fraction if a cost is interpolated
    sync: bool = False  # True without look-ahead: it is read before the next step is planned

    @property
    def padding(self) -> float:
        """Number of places by which all windows together are shorter than the longest one."""
        return self.rows * self.longest - self.drafts


class CostKey(NamedTuple):
    """The key of a cost in a `Table`: a cell of decode steps, or a chunk's length or context."""

    kind: str
    rows: int
    size: float  # decode steps: drafts per row that has drafts; chunks: tokens

    @property
    def shape(self) -> StepShape:
        """The shape of the decode steps that have this cost."""
        size = int(self.size)
        drafts = size if self.kind == RAGGED else self.rows * size
        passes = size * (self.kind in (MTP, USE))
        return StepShape(self.rows, drafts, passes, size, self.kind == SYNC)


Table = Mapping[CostKey, float]  # seconds of decode steps; for chunks see `engine.chunk_costs`


class BatchCosts(NamedTuple):
    """Costs of steps with one number of rows, relative to a step of these rows without drafts.

    `verify[n]` is the cost of a step with n drafts in all rows together, `passes[n]` the extra cost
    of n passes of the head, and `padding` that of each place (see `StepShape.padding`).
    """

    verify: Vector
    passes: Sequence[float]
    padding: float
    others: int = 0  # rows among these that have no drafts, and are not in the shape of a step

    def cost(self, shape: StepShape) -> float:
        drafting = float(self.verify[shape.drafts]) + self.passes[shape.passes]
        return drafting + self.padding * shape.padding


class StepCosts:
    """A linear model of the seconds of decode steps: `features @ coefficients`.

    A Kalman filter estimates the coefficients. All of them can change by one factor with each
    measurement, because other work on the machine slows all steps alike.
    """

    def __init__(self) -> None:
        self._table: dict[CostKey, float] = {}
        self._times = Counter[CostKey]()  # how often each cell was measured
        self.load_table({})
        self._steps: list[tuple[StepShape, float]] = []  # steps of the incomplete block
        # The first launch of a shape is not measured: it compiles kernels and fills buffer pools.
        self._seen = set[tuple[float, ...]]()
        # Rows, passes and sync of the last step; how many of the next steps are not measured.
        self._kind, self._num_new = (0, 0, False), 0

    def observe(self, shape: StepShape, seconds: float | None) -> None:
        """Learn from a step in use; `seconds` is None if its time is not known."""
        rows, _, passes, longest, sync = shape
        kind, launch = (rows, passes, sync), (rows, passes, longest)
        if kind != self._kind:
            # A step commits the windows of the step before, drafted in the one before that.
            self._num_new = 1 + (passes != self._kind[1])
        has_drafts = any(each.drafts for each, _ in self._steps)
        most = _BLOCK if has_drafts else _FEWEST_STEPS if shape.drafts else _PLAIN_BLOCK
        if self._num_new or not seconds or len(self._steps) >= most:
            self._end_block()
        if seconds and launch in self._seen and not self._num_new:
            self._steps.append((shape, seconds))
        elif seconds:
            self._seen.add(launch)
        self._kind, self._num_new = kind, max(self._num_new - 1, 0)

    def of_batch(self, rows: int, *, sync: bool = False, others: int = 0) -> BatchCosts:
        rows += others
        if rows not in self._batch_costs:
            self._batch_costs[rows] = self._costs_of(rows)
        return self._batch_costs[rows][sync]._replace(others=others)

    def has_measured(self, rows: int, depth: int, kinds: Sequence[str]) -> bool:
        """Returns True if `depth` or more drafts of the head in about `rows` rows ran twice."""
        near = [c for c in self._times if c.size >= depth and 0.4 < c.rows / rows < 2.5]
        return sum(self._times[cell] for cell in near if cell.kind in kinds) >= 2

    def has_plain(self, rows: int) -> bool:
        """Returns True if steps of about `rows` rows without drafts were measured in use."""
        return any(c.kind == USE and not c.size and 0.6 < c.rows / rows < 1.7 for c in self._table)

    def table(self) -> Table:
        self._end_block()
        return dict(self._table)

    def load_table(self, table: Table) -> None:
        """Estimate anew, also from costs measured while no request ran or in an earlier run."""
        steps = [cell for cell in table if cell.kind in (MTP, HOST, RAGGED, SYNC, USE)]
        self._table |= {cell: table[cell] for cell in steps}
        self._times |= Counter(steps * 2)
        self._mean, self._covariance = map(np.copy, _prior())  # of the coefficients
        self._unit = 0.0  # seconds of the prior's unit; 0: not known yet
        self._batch_costs: dict[int, tuple[BatchCosts, BatchCosts]] = {}
        for cell, seconds in sorted(self._table.items(), key=lambda each: each[0][1:]):
            self._learn(_features(cell.shape, in_use=cell.kind == USE), seconds)

    def _end_block(self) -> None:
        """Learn from a block's mean time, as the host can't see where a single step ends."""
        steps, self._steps = self._steps, []
        if len(steps) < _FEWEST_STEPS:
            return
        shapes, times = zip(*steps)
        features = np.stack([_features(shape, in_use=True) for shape in shapes])
        expected = np.maximum(features @ self._mean, _LEAST_PLAIN * (self._unit or 1.0))
        # Pairs: on some devices, the host sees two steps end in one round, and none in the next.
        ratios = np.add(times[1:], times[:-1]) / (expected[1:] + expected[:-1])
        seconds = float(np.minimum(ratios, _LATE * median_low(ratios)).mean() * expected.mean())
        features = features.mean(axis=0)
        # Only the coefficients of these steps: plain steps must not make drafts ever less certain.
        forgotten = _CHANGES * (features != 0.0)
        self._covariance *= np.sqrt(np.outer(1.0 - forgotten, 1.0 - forgotten))
        self._covariance += np.diag(forgotten * np.diag(_prior()[1]) * self._unit**2)
        self._learn(features, seconds)
        key = CostKey(USE, *self._kind[:2])
        if {*shapes} == {key.shape}:
            self._table[key] = seconds
            self._times[key] += 1

    def _learn(self, features: Vector, seconds: float) -> None:
        speed = _SPEED_CHANGES
        if not self._unit:
            self._unit, speed = seconds / float(self._mean @ features), _FIRST_SPEED
            self._mean *= self._unit
            self._covariance *= self._unit**2
        self._covariance += speed**2 * np.outer(self._mean, self._mean)
        spread = self._covariance @ features
        gain = spread / (features @ spread + (_NOISE * seconds) ** 2)
        self._mean += gain * (seconds - self._mean @ features)
        self._covariance -= np.outer(gain, spread)
        self._batch_costs.clear()

    def _costs_of(self, rows: int) -> tuple[BatchCosts, BatchCosts]:
        """Returns the costs of steps with look-ahead, and of steps without."""
        ends, steps, idle = _steps_of(rows)
        plain = max(float(steps[0] @ self._mean), _LEAST_PLAIN * self._unit)
        more = (steps - steps[0]) @ self._mean / plain  # costs over that of a plain step
        # By the coefficients, except for those of use: what use adds makes drafts only cheaper.
        gradients = (idle - np.outer(1.0 + more, idle[0])) / plain
        variances = ((gradients @ self._covariance) * gradients).sum(axis=1)
        cautious = more + _CAUTION * np.sqrt(np.maximum(variances, 0.0))
        known = np.maximum.accumulate([_LEAST_MORE, *cautious[-len(ends) :]])[1:]
        drafts = np.arange(1, ends[-1] + 1)
        verify = 1.0 + np.interp(drafts, ends, known) + _LEAST_SLOPE / rows * drafts
        _, place, *passes, alone = np.maximum(more, 0.0)[: -len(ends)].tolist()
        verify, place = np.concatenate([[1.0], verify]), place + _LEAST_SLOPE / rows
        return BatchCosts(verify, passes, place), BatchCosts(verify + alone, passes, place)


@lru_cache(maxsize=64)
def _steps_of(rows: int) -> tuple[list[int], Vector, Vector]:
    """Returns numbers of drafts between which costs are linear, and features in use and idle."""
    most = rows * MAX_HOST_DRAFTS
    ends = [1, *(int(n) - rows for n in _KNOTS if rows + 1 < n < rows + most), most]
    # A plain step, one with a place of padding, passes of the head, sync, and verified drafts.
    shapes = [StepShape(rows, 0, 0, 0), StepShape(rows, 0, 0, 1 / rows)]
    shapes += [StepShape(rows, 0, n, 0) for n in range(MAX_DRAFT_TOKENS + 1)]
    shapes += [StepShape(rows, 0, 0, 0, sync=True)]
    shapes += [StepShape(rows, n, 0, n / rows) for n in ends]
    in_use, idle = (np.stack([_features(s, in_use=used) for s in shapes]) for used in (True, False))
    return ends, in_use, idle


@lru_cache(maxsize=4096)
def _features(shape: StepShape, *, in_use: bool) -> Vector:
    """Returns shared features [F]: one per coefficient of `_PRIOR` and interval of `_KNOTS`."""
    rows, drafts, passes, _, sync = shape
    others = [1, drafts > 0, (drafts > 0) * rows, passes, passes * rows, shape.padding, rows - 1]
    others += [in_use, in_use * rows, sync, sync * rows]
    slopes = np.clip(rows + drafts - _KNOTS[:-1], 0.0, np.diff(_KNOTS))
    return np.concatenate([others, slopes])


@cache
def _prior() -> tuple[Vector, Vector]:
    """Returns mean and covariance of all coefficients, relative to a step of one token."""
    means, deviations = zip(*_PRIOR)
    places = np.log(_KNOTS[:-1])
    alike = np.exp(-np.abs(places[:, None] - places) / _ALIKE)
    covariance = np.diag([*np.square(deviations), *np.zeros(len(places))])
    each = _EACH_SLOPE / np.sqrt(np.diff(_KNOTS))  # An interval's slope is a mean of its tokens'.
    covariance[len(means) :, len(means) :] = _ALL_SLOPES**2 + np.outer(each, each) * alike
    return np.array([*means, *[_SLOPE] * len(places)]), covariance
