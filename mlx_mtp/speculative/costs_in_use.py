"""What decode steps take in use, fitted to the curves of costs that were calibrated.

A ridge regression of a few coefficients, and what each number of drafts takes beyond it. No arrays.
"""

import statistics
from collections.abc import Sequence

KNOTS = (0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # drafts per row
BLOCK, _FEWEST_STEPS = 8, 3  # steps of a block, and the fewest if others interrupt it
_MEMORY = 0.97  # share of what is known that stays with each block
# Bounds of the standard deviation of a block's seconds, relative to what is expected.
_NOISE, _MOST_NOISE = 0.05, 0.15
_LATE = 1.3  # times the usual seconds: a step of a block counts as no more
_FASTEST, _SLOWEST = 0.5, 2.0  # shares by which a block counts as less or more than expected
# Standard deviations of the fit's coefficients before anything is measured in use: machine and
# fixed; drafting and padding with calibrated costs (relative, or of a draft or place per row), and
# without.
MACHINE, CALIBRATED, UNKNOWN = 0.3, ((0.1, 0.1), (0.3, 0.03)), (0.5, 1.0)
_LEAST_SHARE = 0.2  # of a block in what its number of drafts takes more than the fit says
_SCALES = 0.05, 60.0  # bounds of the factors on drafting and padding over the fixed one
LEAST_FIXED = 0.1
_SAME_MACHINE = 0.6, 4.0  # times the calibrated seconds that steps in use may take


class CostsInUse:
    """What steps of one number of rows take in use, relative to the calibrated seconds.

    The seconds of a step are `unit * (fixed + drafting * d + padding * p)`, where d and p are what
    the curves of costs add to a step without drafts, and the `factors` are 1 if steps take what was
    calibrated. A slower machine raises all three; a longer context, or work of the host, `fixed`
    alone. They are the least squares fit of blocks of steps, the latest weighted most, with a
    normal prior (ridge regression). Blocks, as the host can't see where one step ends and the next
    begins.
    """

    def __init__(self, unit: float, factors: Sequence[float], deviations: Sequence[float]) -> None:
        self._block: list[tuple[float, float, float, float]] = []
        self._deviations = deviations
        self._begin(unit, factors)

    def add(self, depth: float, drafting: float, padding: float, seconds: float) -> int:
        """Count a step that verifies `depth` drafts per row; returns the length of the block."""
        self._block.append((depth, drafting, padding, seconds))
        return len(self._block)

    def end_block(self) -> bool:
        """Learn from the steps that were added, if they are enough; True if so."""
        block, self._block = self._block, []
        if len(block) < _FEWEST_STEPS:
            return False
        depth, *parts = (statistics.mean(each) for each in [*zip(*block)][:3])
        beside = 1.0, *parts
        ratios = [step[3] / self._expected((1.0, *step[1:3])) for step in block]
        usual = _LATE * statistics.median_low(ratios)  # Some steps are late.
        seconds = statistics.mean(min(ratio, usual) for ratio in ratios) * self._expected(beside)
        expected = self._expected(beside)
        low, high = (bound * self._unit * expected for bound in _SAME_MACHINE)
        is_known = self._unit and depth and self.counts[0]
        if not is_known and not low < seconds < high:
            # Not the machine that was calibrated, or nothing was: ratios of costs are known.
            expected /= self.factors[0]
            self._begin(seconds / expected, [x / self.factors[0] for x in self.factors])
        off = seconds / self._unit / expected - 1.0
        off = min(max(off, -_FASTEST), _SLOWEST)
        self._variance += (1.0 - _MEMORY) * (min(off**2, _MOST_NOISE**2) - self._variance)
        value = expected * (1.0 + off)
        self._fit((sum(beside), *beside), value)
        knot = min(range(len(KNOTS)), key=lambda n: abs(KNOTS[n] - depth))
        self.counts[knot] += 1
        share = max(1.0 / (self.counts[knot] + 1), _LEAST_SHARE)
        self.more[knot] += share * (value - self._expected(beside) - self.more[knot])
        return True

    def _expected(self, beside: Sequence[float]) -> float:
        return sum(factor * x for factor, x in zip(self.factors, beside))

    def _begin(self, unit: float, factors: Sequence[float]) -> None:
        self._unit = unit
        self.factors = tuple(factors)  # fixed, drafting, padding
        # The fit has four coefficients: one for the machine, and what each factor has beside it.
        self._prior = (1.0, *(factor - 1.0 for factor in factors))
        # By knot: blocks, and what they took more than the fit says.
        self.counts, self.more = [0] * len(KNOTS), [0.0] * len(KNOTS)
        self._variance = _NOISE**2
        self._products = [[0.0] * 4 for _ in range(4)]  # of the features
        self._results = [0.0] * 4  # of features and seconds

    def _fit(self, features: Sequence[float], value: float) -> None:
        for i, x in enumerate(features):
            self._results[i] = _MEMORY * self._results[i] + x * value
            row = zip(self._products[i], features)
            self._products[i] = [_MEMORY * total + x * y for total, y in row]
        left, right = [[*row] for row in self._products], [*self._results]
        for i, (deviation, mean) in enumerate(zip(self._deviations, self._prior)):
            weight = max(self._variance, _NOISE**2) / deviation**2
            left[i][i] += weight
            right[i] += weight * mean
        machine, *beside = _solved(left, right)
        fixed, *others = (max(machine + each, LEAST_FIXED) for each in beside)
        low, high = (bound * fixed for bound in _SCALES)
        self.factors = (fixed, *(min(max(each, low), high) for each in others))


def _solved(left: list[list[float]], right: list[float]) -> list[float]:
    """x of `left @ x = right`, by Gaussian elimination; `left` is positive definite."""
    places = range(len(right))
    for i in places:
        for j in places[i + 1 :]:
            share = left[j][i] / left[i][i]
            left[j] = [a - share * b for a, b in zip(left[j], left[i])]
            right[j] -= share * right[i]
    for i in reversed(places):
        right[i] -= sum(left[i][j] * right[j] for j in places[i + 1 :])
        right[i] /= left[i][i]
    return right
