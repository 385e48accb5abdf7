"""The depth that brings the most tokens per second, from measured cost and acceptance.

For B rows and depth k a step is expected to bring the sum over rows of 1 + p1 + p1 p2 + .. (k terms
of p) tokens, and takes cost[B][k]. The depth with the largest quotient is used; where that is 0,
speculation is parked.

Probes are a few steps at another depth, to measure its cost and acceptance. One is made where a
depth could be better than the one in use, by the upper end of its estimate; what was probed is
known better, so that probes become rare by themselves. They are paid for from a share of the time,
and what a probe really lost is what it is charged for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_mtp.speculative.costs import StepCosts
from mlx_mtp.speculative.depth import DecodeStep, DraftRow
from mlx_mtp.speculative.rates import PooledRates

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
        self._choices: dict[int, int] = {}
        self._speeds: dict[int, float] = {}
        self._last_size = 0
        self._until_review = 0
        self._probe: _Probe | None = None
        # Windows of probes that have not been read, by (batch size, depth).
        self._unread_probes: Counter[tuple[int, int]] = Counter()
        self._saved = 0.0
        self._share = _PROMISING_SHARE
        self._rest = 0
        self._confirm_next = False

    def depth(self, rows: Sequence[DraftRow], *, steady: bool) -> int:
        size = len(rows)
        least = max((row.fixed for row in rows if row.fixed is not None), default=0)
        if all(row.fixed is not None for row in rows):
            self._choices[size] = least
            return least
        steady = steady and size == self._last_size
        self._last_size = size
        probed = self._next_probe_window(size, least, steady=steady)
        if probed is not None:
            return probed
        self._until_review -= 1
        known = self._choices.get(size, -1) >= least
        if not (steady and known and self._until_review > 0):
            self._review(rows, least, steady=steady)
            probed = self._next_probe_window(size, least, steady=steady)
        return self._choices[size] if probed is None else probed

    def observe(self, step: DecodeStep) -> None:
        for outcome in step.outcomes:
            rates, seen = outcome.row.rates, (outcome.num_drafts, outcome.num_accepted)
            rates.forget(rates.observe(*seen, cut=outcome.cut))
            self._pool.observe(*seen, cut=outcome.cut)
        self._pool.forget(0)
        self._costs.observe(step.batch_size, step.depth, step.seconds)
        self._account(step)

    def choices(self) -> dict[int, int]:
        return self._choices

    def _review(self, rows: Sequence[DraftRow], least: int, *, steady: bool) -> None:
        """Choose the depth for so many rows, and start a probe if one is due."""
        size = len(rows)
        costs = self._costs.relative(size)
        self._until_review = _STEPS_PER_REVIEW
        tokens = _expected_tokens(rows, self._pool.expected())
        speeds = {k: tokens[k] / costs[k] for k in range(least, len(costs))}
        best = max(speeds, key=speeds.__getitem__)
        choice = self._choices.get(size, -1)
        margin = _MARGIN if best > choice else 1
        if choice not in speeds or speeds[best] > margin * speeds[choice]:
            logger.debug("%d rows: depth %s -> %d", size, choice, best)
            choice = self._choices[size] = best
        self._speeds[size] = speeds[choice]
        if steady and self._rest <= 0 and len(speeds) > 1:
            self._consider_probe(rows, choice, costs, speeds)

    def _consider_probe(
        self,
        rows: Sequence[DraftRow],
        choice: int,
        costs: Sequence[float],
        speeds: dict[int, float],
    ) -> None:
        """Start a probe of the most promising depth, if its time has been saved up.

        `costs` are relative to a plain step, `speeds` expected tokens per plain step's time.
        """
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

    def _next_probe_window(self, size: int, least: int, *, steady: bool) -> int | None:
        """The depth of the running probe; None without one, or if it can't go on."""
        probe = self._probe
        if probe is None:
            return None
        if not steady or probe.batch_size != size or probe.depth < least:
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
    """Tokens of a step of these rows at each depth from 0 to K."""
    total = [0.0] * (len(pool) + 1)
    for row in rows:
        tokens = row.rates.expected_tokens(pool, hope)
        for depth in range(len(total)):
            total[depth] += tokens[row.num_drafts(depth)]
    return total
