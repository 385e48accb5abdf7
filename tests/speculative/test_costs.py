"""Acceptance, and costs of steps: measured, inferred, with noise."""

import itertools
import random

import pytest

from mlx_mtp.speculative.costs import HOST, KNOTS, MTP, CostKey, StepCosts, StepShape
from mlx_mtp.speculative.draft_policy import HeadRates, RowDrafting
from mlx_mtp.speculative.ngram import NgramRates
from tests.support.harness import curve

TRUE = (1.0, 1.4, 1.7, 2.1, 2.4)


def even(size: int, depth: int) -> StepShape:
    return StepShape(size, size * depth, depth)


def stay(costs: StepCosts, size: int, depth: int, seconds: float | None, steps: int = 9) -> None:
    for _ in range(steps):
        costs.observe(even(size, depth), seconds)
    costs.end_reading()


def relative(costs: StepCosts, size: int) -> list[float]:
    return [costs.of_batch(size).cost(size * depth, depth) for depth in range(len(TRUE))]


def measured(size: int) -> StepCosts:
    """First steps of a shape compile kernels, and some others are late."""
    costs = StepCosts()
    for depth, cost in enumerate(TRUE):
        costs.observe(even(size, depth), 30.0)
        for number in range(8):
            costs.observe(even(size, depth), 0.01 * cost * (9.0 if number in (2, 6) else 1.0))
    costs.end_reading()
    return costs


def test_what_was_measured_is_reported_and_unknown_times_change_nothing():
    fresh, costs = relative(StepCosts(), 3), measured(2)
    assert fresh[0] == 1.0
    assert fresh == sorted(set(fresh))
    stay(costs, 2, 2, None, 50)
    assert relative(costs, 2) == pytest.approx(TRUE, rel=0.01)
    assert costs.table() == pytest.approx(curve(MTP, 2, dict(enumerate(TRUE))), rel=0.01)
    again = StepCosts()
    again.load_table(costs.table())
    assert relative(again, 2) == pytest.approx(TRUE, rel=0.01)


def test_a_machine_that_slows_down_changes_no_ratio_but_one_that_changed_is_learned():
    costs = measured(1)
    for factor in (1.0, 1.5, 3.0, 0.4, 2.0):
        stay(costs, 1, 2, 0.01 * factor * TRUE[2], 40)
        assert relative(costs, 1) == pytest.approx(TRUE, rel=0.01)
    costs = measured(1)
    for _ in range(12):
        stay(costs, 1, 0, 0.01, 8)
        stay(costs, 1, 1, 0.018, 8)
    assert relative(costs, 1)[1] == pytest.approx(1.8, rel=0.03)
    # The others keep their place against the plain step.
    assert relative(costs, 1)[3] == pytest.approx(TRUE[3], rel=0.12)


def test_noisy_prices_are_mended_by_those_beside_them_and_quiet_ones_stay():
    steps = (1.0, 1.05, 1.13, 1.08, 1.2)
    costs = StepCosts()
    costs.load_table(curve(MTP, 1, dict(enumerate(steps))))
    assert relative(costs, 1) == pytest.approx(steps, rel=0.015)
    own = priced = 0.0
    for seed in range(30):
        chance, costs = random.Random(seed), StepCosts()
        for depth in (1, 2, 3, 4) * 6:
            for each in (0, depth):
                stay(costs, 1, each, 0.01 * TRUE[each] * chance.lognormvariate(0.0, 0.1))
        for depth, price in enumerate(relative(costs, 1)):
            own += abs(costs.table()[CostKey(MTP, 1, depth)] / TRUE[depth] - 1.0)
            priced += abs(price / TRUE[depth] - 1.0)
    assert priced < 0.8 * own


def test_rows_that_differ_cost_their_tokens_and_the_passes_of_the_deepest():
    prices = measured(4).of_batch(4)
    assert prices.cost(4, 1) < prices.cost(4, 3) < prices.cost(12, 3)
    between = (prices.cost(4, 2) + prices.cost(8, 2)) / 2
    assert prices.cost(6, 2) == pytest.approx(between, rel=0.02)


def test_windows_without_the_heads_passes_have_prices_of_their_own():
    costs = measured(1)
    assert 1.0 < costs.of_batch(1).cost(4, 0) < TRUE[4]
    for _ in range(12):
        stay(costs, 1, 0, 0.01)
        for _ in range(9):
            costs.observe(StepShape(1, 16, 0), 0.03)
        costs.end_reading()
    assert costs.of_batch(1).cost(16, 0) == pytest.approx(3.0, rel=0.05)
    assert relative(costs, 1) == pytest.approx(TRUE, rel=0.05)
    table = costs.table()
    assert table[CostKey(HOST, 1, 16)] == pytest.approx(3.0, rel=0.05)
    assert {key.size for key in table if key.kind == HOST} <= set(KNOTS)


def test_a_position_counts_only_where_those_before_it_were_right():
    pool = HeadRates(5)
    for accepted in [0] * 300 + [2] * 300:
        pool.observe(4, accepted)
        pool.fade(1)
    chances = pool.cumulative_acceptance(1.0)
    rates = [chances[0], *(b / a for a, b in itertools.pairwise(chances))]
    assert min(rates[:2]) > 0.95
    assert rates[2] < 0.05
    # Behind the one that failed nothing was tried, nor at all at the last.
    assert rates[3:] == pytest.approx([0.95 * rates[2], 0.95**2 * rates[2]])
    for _ in range(5000):
        pool.fade(1)
    assert pool.cumulative_acceptance(1.0)[2] > 0.4 > chances[2]


def test_a_row_is_as_much_better_than_all_as_it_was():
    pool, rows = HeadRates(4), [RowDrafting(), RowDrafting()]
    for number in range(200):
        for row, accepted in zip(rows, (4, number % 2)):
            row.observe(accepted < 4, pool.observe(4, accepted))
        pool.fade(2)
    good, bad = (pool.cumulative_acceptance(row.miss_ratio) for row in rows)
    assert good[3] > 0.9
    assert bad[0] == pytest.approx(0.5, abs=0.1)
    for _ in range(300):
        rows[1].observe(False, pool.observe(0, 0))
    assert rows[1].miss_ratio == pytest.approx(1.0, abs=0.01)


def test_ngram_drafts_are_rated_by_the_length_of_the_match_before_them():
    row, pool = NgramRates(0.97), NgramRates(0.99)
    first = row.cumulative_acceptance(3, 16, pool)
    assert first == sorted(first, reverse=True)
    assert row.cumulative_acceptance(40, 16, pool)[-1] > first[-1]
    for _ in range(50):
        pool.observe(3, 0, missed=True)  # Short matches are chance,
        pool.observe(20, 16, missed=False)  # long ones go on.
    assert row.cumulative_acceptance(3, 1, pool)[0] < 0.1
    assert row.cumulative_acceptance(20, 16, pool)[-1] > 0.9
