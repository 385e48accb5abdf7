"""Probes: a few steps at another depth than the one in use, to learn what it costs and brings.

A probe is made where a depth could be better than the one in use, going by what is possible and
not by what is likely; what is tried is known better, so that probes back off by themselves. They
are paid for from a share of the time, and what a probe really lost is what it is charged for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_mtp.speculative.depth import DecodeStep

_PROMISING_SHARE = 0.015
"""Of the time, for depths that could well be better."""
_REFRESHING_SHARE = 0.004
"""Of the time, where none could: drift must be seen some day."""
_MOST_SAVED = 8.0
"""Plain steps that may be saved up for probes, or owed for them."""
_LEAST_LOSS = 0.05
"""Of a probe's time, to be reckoned with even where the depths seem equal."""
_COST_WINDOWS = 6
"""Of a probe that measures cost: two of its steps are transitions."""
_ACCEPTANCE_WINDOWS = 2
"""Of a probe that is about acceptance alone."""
_REST = 16
"""Steps at the depth in use between two probes, which are compared with it."""
_PLAIN_DOUBT = 0.15
"""The plain step is what all depths are held against: above this doubt its cost comes first."""
_MISHAP = 2.0
"""How far off a cost may be that was read only once."""


@dataclass(frozen=True, slots=True)
class Prospects:
    """What is known of the depths of one batch size.

    Args:
        batch_size: rows.
        choice: the depth in use.
        costs: relative cost of a step by depth.
        speeds: expected tokens per plain step's time, for the depths that are possible.
        hopes: the same, as high as it could be.
        doubts: by what share each cost may be lower than it seems.
        unconfirmed: depths whose cost was read only once.
    """

    batch_size: int
    choice: int
    costs: list[float]
    speeds: Mapping[int, float]
    hopes: Mapping[int, float]
    doubts: Mapping[int, float]
    unconfirmed: frozenset[int]


@dataclass(slots=True)
class _Probe:
    batch_size: int
    depth: int
    left: int


class Prober:
    """At most one probe at a time, and the time that is saved for the next."""

    def __init__(self) -> None:
        self._probe: _Probe | None = None
        self._on_trial: Counter[tuple[int, int]] = Counter()
        self._saved = 0.0
        self._share = _PROMISING_SHARE
        self._rest = 0
        self._confirm_next = False

    def next_window(self, batch_size: int, least: int, *, steady: bool) -> int | None:
        """The depth of the probe that goes on; None without one, and then it is over.

        Args:
            batch_size: rows of the window.
            least: the window's depth can't be lower.
            steady: its step's cost can be measured.
        """
        probe = self._probe
        if probe is None:
            return None
        if not steady or probe.batch_size != batch_size or probe.depth < least:
            self._probe = None
            return None
        probe.left -= 1
        if probe.left == 0:
            self._probe, self._rest = None, _REST
        self._on_trial[batch_size, probe.depth] += 1
        return probe.depth

    def consider(self, prospects: Prospects) -> None:
        """Begin a probe, if there is a depth to try and time saved for it."""
        if self._rest > 0:
            return
        hopes = {k: hope for k, hope in prospects.hopes.items() if k != prospects.choice}
        if not hopes:
            return
        speed = prospects.speeds[prospects.choice]
        depth = max(hopes, key=hopes.__getitem__)
        promising = hopes[depth] > speed
        if 0 in hopes and prospects.doubts[0] > _PLAIN_DOUBT:
            depth, promising = 0, True
        elif not promising and prospects.choice == 0:
            # The first draft tells whether it is worth while to look at more.
            depth = min(hopes)
        elif not promising and self._confirm_next:
            once = {k: _MISHAP * hopes[k] for k in prospects.unconfirmed & hopes.keys()}
            if max(once.values(), default=0.0) > speed:
                depth = max(once, key=once.__getitem__)
        self._share = _PROMISING_SHARE if promising else _REFRESHING_SHARE
        windows = _num_windows(prospects, depth)
        loss = max(1 - prospects.speeds[depth] / speed, _LEAST_LOSS)
        if self._saved >= min(windows * prospects.costs[depth] * loss, _MOST_SAVED):
            self._probe = _Probe(prospects.batch_size, depth, windows)
            self._confirm_next = not self._confirm_next

    def account(self, step: DecodeStep, cost: float, speed: float | None) -> None:
        """Save a share of a step's time, and pay for it if it was a probe's.

        Args:
            step: as it was read.
            cost: of it, in plain steps.
            speed: expected tokens per plain step's time at the depth in use.
        """
        self._rest -= 1
        self._saved += self._share * cost
        at = (step.batch_size, step.depth)
        if self._on_trial[at] > 0 and speed is not None:
            self._on_trial[at] -= 1
            tokens = sum(1 + outcome.num_accepted for outcome in step.outcomes)
            self._saved -= cost - tokens / speed
        self._saved = min(max(self._saved, -_MOST_SAVED), _MOST_SAVED)


def _num_windows(prospects: Prospects, depth: int) -> int:
    """How long a probe must be for what it is about: cost, or acceptance."""
    if depth < prospects.choice or depth in prospects.unconfirmed:
        return _COST_WINDOWS
    from_cost = 1 / (1 - prospects.doubts[depth])
    from_acceptance = prospects.hopes[depth] / prospects.speeds[depth] / from_cost
    return _COST_WINDOWS if from_cost > from_acceptance else _ACCEPTANCE_WINDOWS
