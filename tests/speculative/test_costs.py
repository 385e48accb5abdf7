"""Acceptance by position, and costs of steps: measured, inferred, with noise."""

import itertools

import pytest

from mlx_mtp.speculative.controller import StepCosts
from mlx_mtp.speculative.depth import RowRates

K = 4
TRUE = (1.0, 1.4, 1.7, 2.1, 2.4)


def stay(costs: StepCosts, size: int, depth: int, seconds: float | None, steps: int = 9) -> None:
    for _ in range(steps):
        costs.observe(size, depth, seconds)
    costs.settle()


def measured(size: int) -> StepCosts:
    """First steps of a shape compile kernels, and some others are late."""
    costs = StepCosts(K)
    for depth, cost in enumerate(TRUE):
        costs.observe(size, depth, 30.0)
        for number in range(8):
            costs.observe(size, depth, 0.01 * cost * (9.0 if number in (2, 6) else 1.0))
    costs.settle()
    return costs


def test_what_was_measured_is_reported_and_unknown_times_change_nothing():
    fresh, costs = StepCosts(K).relative(3), measured(2)
    assert fresh[0] == 1.0
    assert fresh == sorted(set(fresh))
    stay(costs, 2, 2, None, 50)
    assert costs.relative(2) == pytest.approx(TRUE)
    assert costs.table() == {2: pytest.approx({k: 0.01 * c for k, c in enumerate(TRUE)})}
    assert costs.doubt(2, 1) < costs.doubt(8, 1)


def test_a_machine_that_slows_down_changes_no_ratio_but_one_that_changed_is_learned():
    costs = measured(1)
    for factor in (1.0, 1.5, 3.0, 0.4, 2.0):
        stay(costs, 1, 2, 0.01 * factor * TRUE[2], 40)
        assert costs.relative(1) == pytest.approx(TRUE)
    assert costs.table()[1][2] == pytest.approx(0.02 * TRUE[2], rel=0.05)
    costs = measured(1)
    for _ in range(12):
        stay(costs, 1, 0, 0.01, 8)
        stay(costs, 1, 1, 0.018, 8)
    assert costs.relative(1)[1] == pytest.approx(1.8, rel=0.03)
    # The others keep their place against the plain step.
    assert costs.relative(1)[3] == pytest.approx(TRUE[3], rel=0.12)


def test_a_position_counts_only_where_those_before_it_were_right():
    row = RowRates(5)
    for accepted in [0] * 300 + [2] * 300:
        assert row.observe(4, accepted, cut=False) == accepted + 1
    assert row.observe(3, 1, cut=True) == 1  # the row ended: the next draft was not tried
    gains = [b - a for a, b in itertools.pairwise(row.expected_tokens([0.9] * 5))]
    rates = [gains[0], *(b / a for a, b in itertools.pairwise(gains))]
    assert min(rates[:2]) > 0.8
    assert rates[2] < 0.2
    # Behind the one that failed nothing was tried, nor at all at the last.
    assert rates[3:] == pytest.approx([0.9, 0.9])
