"""Acceptance, and costs of steps: measured, inferred, with noise."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.speculative.costs import HOST, MTP, RAGGED, CostKey, StepCosts, StepShape
from mlx_mtp.speculative.draft_policy import HeadRates, RowDrafting
from mlx_mtp.speculative.ngram import NgramRates
from tests.support.harness import curve

TRUE = (1.0, 1.4, 1.7, 2.1, 2.4)


def even(size: int, depth: int) -> StepShape:
    return StepShape(size, size * depth, depth, depth)


def stay(costs: StepCosts, size: int, depth: int, seconds: float, steps: int = 9) -> None:
    """Steps in use, between others whose time is not known."""
    for _ in range(steps):
        costs.observe(even(size, depth), seconds)
    costs.observe(even(size, depth), None)


def relative(costs: StepCosts, size: int) -> list[float]:
    return [costs.of_batch(size).cost(even(size, depth)) for depth in range(len(TRUE))]


def calibrated(size: int, noise: float = 0.0, seed: int = 0, times: int = 3) -> StepCosts:
    costs, chance = StepCosts(), random.Random(seed)
    for depth, cost in [*enumerate(TRUE)][1:] * times:
        seconds, plain = (0.01 * x * chance.lognormvariate(0.0, noise) for x in (cost, 1.0))
        costs.compare(CostKey(MTP, size, depth), seconds, plain)
    return costs


def test_what_was_calibrated_is_the_cost_and_is_kept():
    fresh, costs = relative(StepCosts(), 3), calibrated(2)
    assert fresh[0] == 1.0
    assert fresh == sorted(set(fresh))
    assert relative(costs, 2) == pytest.approx(TRUE, rel=0.015)
    seconds = {depth: 0.01 * cost for depth, cost in enumerate(TRUE)}
    assert costs.table() == pytest.approx(curve(MTP, 2, seconds), rel=0.01)
    again = StepCosts()
    again.load_table(costs.table())
    assert relative(again, 2) == pytest.approx(TRUE, rel=0.015)


def test_noisy_comparisons_are_mended_by_those_beside_them():
    own = priced = 0.0
    for seed in range(30):
        costs = calibrated(1, noise=0.1, seed=seed, times=6)
        table = costs.table()
        for depth, cost in enumerate(relative(costs, 1)):
            ratio = table[CostKey(MTP, 1, depth)] / table[CostKey(MTP, 1, 0)]
            own += abs(ratio / TRUE[depth] - 1.0)
            priced += abs(cost / TRUE[depth] - 1.0)
    assert priced < 0.9 * own


@pytest.mark.parametrize("factor", [0.4, 1.0, 1.5, 3.0, 100.0])
def test_a_slower_machine_changes_no_ratio_once_two_numbers_of_drafts_ran(factor):
    costs = calibrated(1)
    for _ in range(12):
        stay(costs, 1, 2, 0.01 * factor * TRUE[2], 24)
        stay(costs, 1, 0, 0.01 * factor, 9)
    assert relative(costs, 1) == pytest.approx(TRUE, rel=0.05)


def test_work_of_the_host_in_each_step_makes_drafts_cheaper_and_is_kept():
    """As over HTTP: 10 ms a step without drafts, and 6 ms beside the model."""
    costs = calibrated(1)
    for depth in (1, 0, 3) * 3:
        stay(costs, 1, depth, 0.01 * TRUE[depth] + 0.006, 17)
    true = [(cost + 0.6) / 1.6 for cost in TRUE]
    assert relative(costs, 1) == pytest.approx(true, rel=0.03)
    again = StepCosts()
    again.load_table(costs.table())
    assert relative(again, 1) == pytest.approx(true, rel=0.03)
    # A number of rows beside it begins with the same; one far away doesn't.
    assert relative(costs, 2)[1] < 1.3 < relative(costs, 16)[1]


def test_a_number_of_drafts_that_takes_more_than_its_neighbours_is_learned():
    costs, odd = calibrated(1), (1.0, 1.4, 2.2, 2.3, 2.4)
    for depth in (1, 2, 3, 0) * 4:
        stay(costs, 1, depth, 0.01 * odd[depth], 17)
    assert relative(costs, 1)[:4] == pytest.approx(odd[:4], rel=0.06)


def test_late_steps_and_first_launches_change_nothing():
    costs = calibrated(1)
    for _ in range(4):
        for depth in (0, 2):
            costs.observe(even(1, depth), 30.0 if depth else None)
            for number in range(16):
                late = 9.0 if number % 8 == 5 else 1.0
                costs.observe(even(1, depth), 0.01 * TRUE[depth] * late)
    assert relative(costs, 1) == pytest.approx(TRUE, rel=0.05)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_costs_are_numbers_whatever_is_seen_and_loaded(data):
    times = st.one_of(st.none(), st.just(0.0), st.floats(1e-6, 1e3))
    costs = StepCosts()
    for _ in range(data.draw(st.integers(1, 3))):
        for _ in range(data.draw(st.integers(0, 40))):
            rows = data.draw(st.sampled_from([1, 2, 32]))
            longest = data.draw(st.integers(0, 16))
            drafts = data.draw(st.integers(longest, rows * longest))
            shape = StepShape(rows, drafts, data.draw(st.integers(0, 8)), longest)
            costs.observe(shape, data.draw(times))
        table = costs.table()
        costs = StepCosts()
        costs.load_table(table)
        for rows in (1, 3, 32):
            of_batch = costs.of_batch(rows)
            assert all(math.isfinite(x) for x in (*of_batch.verify, *of_batch.passes))
            assert min(of_batch.verify) > 0 <= of_batch.padding


def test_rows_that_differ_cost_their_tokens_their_longest_window_and_the_deepest_passes():
    costs = calibrated(4)
    costs.compare(CostKey(HOST, 4, 4), 0.02, 0.01)
    for padding in (0.02, 0.1):
        ragged = costs.of_batch(4).cost(StepShape(4, 16, 0, 4)) - 1.0
        costs.compare(CostKey(RAGGED, 4, 16), 0.01 * (1.0 + ragged + padding * 12), 0.01)
        prices = costs.of_batch(4)
        assert prices.cost(StepShape(4, 16, 0, 16)) == pytest.approx(
            1.0 + ragged + padding * 12, rel=0.05
        )
        costs = calibrated(4)
        costs.compare(CostKey(HOST, 4, 4), 0.02, 0.01)
    prices = costs.of_batch(4)
    shapes = [StepShape(4, 4, 1, 1), StepShape(4, 4, 3, 1), StepShape(4, 12, 3, 3)]
    assert prices.cost(shapes[0]) < prices.cost(shapes[1]) < prices.cost(shapes[2])


def test_the_price_of_padding_is_learned_in_use():
    """Windows of which one alone is long, in steps that no two are alike."""
    costs, chance = calibrated(8), random.Random(1)
    curve_of = calibrated(8).of_batch(8)
    for _ in range(400):
        longest = chance.choice([0, 2, 5, 9, 14])
        shape = StepShape(8, longest, 0, longest)
        plain = curve_of.cost(shape._replace(longest=longest / 8))
        costs.observe(shape, 0.01 * (plain + 0.08 * shape.padding / 8))
    learned = costs.of_batch(8)
    for longest in (5, 14):
        shape = StepShape(8, longest, 0, longest)
        plain = curve_of.cost(shape._replace(longest=longest / 8))
        assert learned.cost(shape) == pytest.approx(plain + 0.08 * shape.padding / 8, rel=0.1)


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
    assert rows[1].miss_ratio == pytest.approx(1.0, abs=0.02)


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
