"""The depth that brings the most tokens per second, from measured cost and acceptance.

For B rows and depth k a step is expected to bring the sum over rows of 1 + p1 + p1 p2 + .. (k terms
of p) tokens, and takes cost[B][k]. The quotient is largest at the depth to use; where that is 0,
speculation is parked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mlx_mtp.speculative.costs import StepCosts
from mlx_mtp.speculative.depth import DecodeStep, Row
from mlx_mtp.speculative.probes import Prober, Prospects
from mlx_mtp.speculative.rates import PooledRates

logger = logging.getLogger(__name__)

_MARGIN = 1.02
"""What a deeper one must promise to replace the depth in use: estimates are noisy, and of two
depths that seem equal the lower one can't lose much."""
_HOPE = 1.0
"""Successes added to those seen, when it is asked what a depth could bring."""
_STEPS_PER_REVIEW = 4
"""A review takes some 40 microseconds of the host's time."""


class DepthController:
    """A `DepthPolicy` that follows cost and acceptance.

    Args:
        costs: what is known of them; kept up to date here.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._pool = PooledRates(costs.max_depth)
        self._prober = Prober()
        self._choices: dict[int, int] = {}
        self._speeds: dict[int, float] = {}
        self._last_size = 0
        self._until_review = 0

    def depth(self, rows: Sequence[Row], *, steady: bool) -> int:
        """See `DepthPolicy`."""
        size = len(rows)
        least = max((row.fixed for row in rows if row.fixed is not None), default=0)
        if all(row.fixed is not None for row in rows):
            self._choices[size] = least
            return least
        steady = steady and size == self._last_size
        self._last_size = size
        probed = self._prober.next_window(size, least, steady=steady)
        if probed is not None:
            return probed
        if self._review_is_due(size, least, steady=steady):
            self._review(rows, least, steady=steady)
            probed = self._prober.next_window(size, least, steady=steady)
        return self._choices[size] if probed is None else probed

    def observe(self, step: DecodeStep) -> None:
        """See `DepthPolicy`."""
        for outcome in step.outcomes:
            rates, seen = outcome.row.rates, (outcome.num_drafts, outcome.num_accepted)
            rates.forget(rates.observe(*seen, cut=outcome.cut))
            self._pool.observe(*seen, cut=outcome.cut)
        self._pool.forget(0)
        self._costs.observe(step.batch_size, step.depth, step.seconds)
        cost = self._costs.relative(step.batch_size)[step.depth]
        self._prober.account(step, cost, self._speeds.get(step.batch_size))

    def choices(self) -> dict[int, int]:
        """See `DepthPolicy`."""
        return self._choices

    def _review_is_due(self, size: int, least: int, *, steady: bool) -> bool:
        self._until_review -= 1
        known = self._choices.get(size, -1) >= least
        return not (steady and known and self._until_review > 0)

    def _review(self, rows: Sequence[Row], least: int, *, steady: bool) -> None:
        """Choose the depth for so many rows, and see whether a probe is due."""
        size, costs = len(rows), self._costs.relative(len(rows))
        self._until_review = _STEPS_PER_REVIEW
        tokens = _expected(rows, self._pool.expected())
        speeds = {k: tokens[k] / costs[k] for k in range(least, len(costs))}
        best = max(speeds, key=speeds.__getitem__)
        choice = self._choices.get(size)
        if (
            choice not in speeds
            or speeds[best] > (_MARGIN if best > choice else 1) * speeds[choice]
        ):
            logger.debug("%d rows: depth %s -> %d", size, choice, best)
            choice = self._choices[size] = best
        self._speeds[size] = speeds[choice]
        if steady:
            most = _expected(rows, self._pool.expected(_HOPE), _HOPE)
            doubts = {k: self._costs.doubt(size, k) for k in speeds}
            hopes = {k: most[k] / (costs[k] * (1 - doubts[k])) for k in speeds}
            unconfirmed = frozenset(self._costs.unconfirmed(size))
            self._prober.consider(
                Prospects(size, choice, costs, speeds, hopes, doubts, unconfirmed)
            )


def _expected(rows: Sequence[Row], pool: Sequence[float], hope: float = 0.0) -> list[float]:
    """Tokens of a step of these rows at each depth from 0 to K."""
    total = [0.0] * (len(pool) + 1)
    for row in rows:
        tokens = row.rates.expected_tokens(pool, hope)
        for depth in range(len(total)):
            total[depth] += tokens[row.num_drafts(depth)]
    return total
