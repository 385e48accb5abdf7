"""Acceptance rates, and costs of steps: measured, inferred, with noise."""

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.calibration.calibrator import typical_costs
from mlx_mtp.speculative import costs as costs_module
from mlx_mtp.speculative.costs import (
    HOST,
    MTP,
    RAGGED,
    SYNC,
    USE,
    CostKey,
    StepCosts,
    StepShape,
)
from mlx_mtp.speculative.draft_policy import HeadRates
from mlx_mtp.speculative.ngram import NgramRates

Seconds = Callable[[StepShape], float]
TRUE = (1.0, 1.4, 1.7, 2.1, 2.4)


def even(size: int, depth: int) -> StepShape:
    return StepShape(size, size * depth, depth, depth)


def one_row(shape: StepShape) -> float:
    """Returns the true seconds of a step whose rows have equal numbers of drafts."""
    return 0.01 * TRUE[shape.longest]


def stay(costs: StepCosts, size: int, depth: int, seconds: float, steps: int = 9) -> None:
    """Observe `steps` steps of one shape, and then one without a known time."""
    for _ in range(steps):
        costs.observe(even(size, depth), seconds)
    costs.observe(even(size, depth), None)


def relative(costs: StepCosts, size: int) -> list[float]:
    return [costs.of_batch(size).cost(even(size, depth)) for depth in range(len(TRUE))]


def calibrated(seconds: Seconds = one_row, cells=((MTP, 1, range(1, 5)),), times=3) -> StepCosts:
    keys = [
        key
        for kind, rows, sizes in [*cells] * times
        for size in sizes
        for key in (CostKey(MTP, rows, 0), CostKey(kind, rows, size), CostKey(MTP, rows, 0))
    ]
    costs = StepCosts()
    costs.load_table(typical_costs([(key, seconds(key.shape)) for key in keys]))
    return costs


@pytest.fixture(autouse=True)
def estimates(monkeypatch):
    """Compares costs as they are estimated, without the addition for uncertainty."""
    monkeypatch.setattr(costs_module, "_CAUTION", 0.0)


def test_what_was_calibrated_is_the_cost_and_is_kept():
    fresh, costs = relative(StepCosts(), 3), calibrated()
    assert fresh[0] == 1.0
    assert fresh == sorted(set(fresh))
    assert relative(costs, 1) == pytest.approx(TRUE, rel=0.05)
    table = {CostKey(MTP, 1, depth): 0.01 * cost for depth, cost in enumerate(TRUE)}
    assert costs.table() == pytest.approx(table)
    again = StepCosts()
    again.load_table(costs.table())
    assert relative(again, 1) == pytest.approx(TRUE, rel=0.08)


CELLS = (
    (MTP, 1, (1, 2, 3)),
    (MTP, 4, (1, 3)),
    (HOST, 1, (4, 16)),
    (RAGGED, 4, (16,)),
    (MTP, 16, (1, 3)),
)


@pytest.mark.parametrize("seed", range(6))
def test_costs_of_shapes_that_were_not_measured_follow_from_their_tokens(seed):
    """On random machines, the costs of drafts of 2, 8 and 32 rows are inferred from other steps."""
    chance = random.Random(seed)
    weights, window, head, place = (
        chance.uniform(*x) for x in ((1, 20), (0, 2), (0.1, 2), (0, 0.2))
    )
    few, many, bend = (
        chance.uniform(0.02, 0.5),
        chance.uniform(0.1, 1.0),
        chance.choice([4, 16, 32]),
    )

    def seconds(shape: StepShape) -> float:
        tokens = shape.rows + shape.drafts
        of_tokens = few * min(tokens, bend) + many * max(tokens - bend, 0)
        drafting = window * (shape.longest > 0) + head * shape.passes + place * shape.padding
        return 0.001 * (weights + of_tokens + drafting) * chance.lognormvariate(0.0, 0.02)

    costs, off = calibrated(seconds, CELLS), []
    for rows, depth in (*itertools.product((2, 8), (1, 2, 3)), (32, 1)):
        true = seconds(even(rows, depth)) / seconds(even(rows, 0))
        off.append(relative(costs, rows)[depth] / true - 1.0)
    assert min(off) > -0.3 and max(off) < 0.3, off
    assert abs(sorted(off)[len(off) // 2]) < 0.12


@pytest.mark.parametrize("factor", [1.5, 2.5, 5.0])
def test_one_disturbed_measurement_of_a_calibration_changes_costs_little(factor):
    """Other work makes one measurement longer by a factor: each one in turn."""
    for disturbed in range(36):
        number = itertools.count()
        costs = calibrated(lambda s: one_row(s) * (factor if next(number) == disturbed else 1.0))  # noqa: B023
        assert next(number) == 36
        assert relative(costs, 1) == pytest.approx(TRUE, rel=0.12), disturbed


def test_calibrated_costs_far_below_the_prior_are_not_cut():
    """As on a GPU, where tokens and passes of the head cost almost nothing."""

    def seconds(shape: StepShape) -> float:
        return 0.008 * (1.0 + 0.002 * (shape.rows + shape.drafts) + 0.01 * shape.passes)

    costs = calibrated(seconds, (*CELLS, (MTP, 16, (5,)), (MTP, 32, (1,))))
    for rows in (1, 4, 16):
        true = [seconds(even(rows, depth)) / seconds(even(rows, 0)) for depth in range(len(TRUE))]
        assert relative(costs, rows) == pytest.approx(true, rel=0.1)


# Milliseconds of steps of 24 layers of the 27B on an H200, by kind, rows and drafts of each row.
H200 = {
    (MTP, 1): {0: 5.0, 1: 6.1, 2: 7.2, 3: 9.2, 4: 9.7, 6: 12.4, 8: 10.4},
    (MTP, 2): {0: 4.2, 1: 5.3, 3: 8.5},
    (MTP, 4): {0: 5.3, 1: 6.5, 2: 11.1, 3: 12.1, 5: 18.0, 8: 23.6},
    (MTP, 16): {0: 6.4, 1: 11.5, 2: 16.5, 3: 26.6, 5: 35.0},
    (HOST, 1): {4: 6.2, 16: 9.1},
    (HOST, 4): {4: 9.5, 16: 21.9},
    (HOST, 16): {8: 38.0},
    (RAGGED, 4): {16: 9.0},
    (RAGGED, 16): {16: 14.6},
    (SYNC, 1): {0: 7.5},
    (SYNC, 16): {0: 10.3},
}
H200_NOT_CALIBRATED = {6: 32.0, 10: 46.0, 12: 59.0, 16: 74.0}


def test_costs_measured_on_a_gpu_are_the_costs_and_those_of_longer_windows_follow():
    """Tokens cost far less than the prior expects, which once made estimated seconds negative."""
    table = {CostKey(*key, size): ms / 1e3 for key, of in H200.items() for size, ms in of.items()}
    costs = StepCosts()
    costs.load_table(table)
    off = {}
    for key in table:
        shape, true = key.shape, table[key] / table[CostKey(MTP, key.rows, 0)]
        off[key] = costs.of_batch(key.rows, sync=shape.sync).cost(shape) / true - 1.0
    assert sorted(map(abs, off.values()))[len(off) * 3 // 4] < 0.12, off
    assert max(map(abs, off.values())) < 0.5, off  # (1, 8) took less than (1, 6): noise
    for count, ms in H200_NOT_CALIBRATED.items():
        shape = StepShape(16, 16 * count, 0, count)
        true = ms / H200[MTP, 16][0]
        assert costs.of_batch(16).cost(shape) == pytest.approx(true, rel=0.25)


@pytest.mark.parametrize("rounds", [(0.5, 1.5), (0.3, 1.3, 1.4)])
def test_rounds_in_which_two_steps_end_or_none_are_averaged(rounds):
    """As seen on an H200: the host's rounds with look-ahead take turns."""
    costs, uneven = calibrated(), itertools.cycle(rounds)
    for depth in (0, 3) * 12:
        for _ in range(17):
            costs.observe(even(1, depth), 0.01 * TRUE[depth] * next(uneven))
    assert costs.table()[CostKey(USE, 1, 3)] == pytest.approx(0.01 * TRUE[3], rel=0.12)
    assert relative(costs, 1)[3] == pytest.approx(TRUE[3], rel=0.12)


def test_long_windows_among_short_ones_are_not_taken_for_delays():
    """Copies of 2 to 16 tokens take turns, and cost twice what was calibrated."""
    costs, chance = calibrated(cells=((MTP, 8, (1, 2)), (HOST, 8, (4,)))), random.Random(1)

    def seconds(shape: StepShape) -> float:
        return 0.001 * (6 + 2.0 * shape.drafts)

    for _ in range(300):
        longest = chance.choice([2, 3, 4, 16])
        shape = StepShape(8, longest, 0, longest)
        costs.observe(shape, seconds(shape))
        if chance.random() < 0.05:
            stay(costs, 8, 0, seconds(even(8, 0)))
    for longest in (4, 16):
        shape = StepShape(8, longest, 0, longest)
        true = seconds(shape) / seconds(even(8, 0))
        assert costs.of_batch(8).cost(shape) == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("passes", [0, 1])
def test_a_copy_now_and_then_is_measured_with_the_steps_beside_it(passes):
    """One row copies in a sixth of the steps, and that costs three times what was calibrated."""
    own = StepShape(16, 16 * passes, passes, passes)
    copy = StepShape(16, 15 * passes + 8, passes, 8)
    price = 0.4

    def seconds(shape: StepShape) -> float:
        return 0.01 * (1.0 + 0.5 * shape.passes + price * (shape.longest > shape.passes))

    costs = calibrated(seconds, ((MTP, 16, (1, 2)), (RAGGED, 16, (8,))))
    price = 1.2

    def error() -> float:
        of_batch = costs.of_batch(16)
        extra = of_batch.cost(copy) / of_batch.cost(own) - 1.0
        return extra / (seconds(copy) / seconds(own) - 1.0) - 1.0

    before = error()
    chance = random.Random(0)
    for _ in range(400):
        shape = chance.choice([own, own, own, own, own, copy])
        costs.observe(shape, seconds(shape))
    assert before < -0.5
    assert abs(error()) < 0.25


def test_the_first_step_of_a_kind_is_not_measured():
    """It takes twice as long, as it commits the windows of the step before it."""
    costs = calibrated()
    for _ in range(20):
        for seconds in (0.02, 0.01, 0.01, 0.01, 0.01):
            costs.observe(even(1, 0), seconds)
        costs.observe(even(1, 3), 0.01 * TRUE[3])
    assert costs.table()[CostKey(USE, 1, 0)] == pytest.approx(0.01)


@pytest.mark.parametrize("copies", range(16))
def test_a_few_plain_steps_among_copies_are_measured(copies):
    """The policy plans twelve, the first of which can still verify drafts of the head."""
    costs, copy = StepCosts(), StepShape(4, 16, 0, 4)
    for shape in (*[copy] * (16 + copies), *[even(4, 0)] * 11, copy):
        costs.observe(shape, 0.02 if shape == copy else 0.01)
    assert costs.has_plain(4)
    assert costs.table()[CostKey(USE, 4, 0)] == pytest.approx(0.01)


def test_a_table_has_what_the_last_few_steps_cost():
    costs = StepCosts()
    for _ in range(6):
        costs.observe(even(1, 0), 0.01)
    assert costs.table() == {CostKey(USE, 1, 0): pytest.approx(0.01)}


def test_long_plain_decoding_makes_drafts_no_dearer(monkeypatch):
    """With the addition for uncertainty: what steps without drafts don't show stays known."""
    monkeypatch.undo()

    def seconds(shape: StepShape) -> float:
        drafting = 0.1 * (shape.drafts > 0) + 0.01 * shape.drafts + 0.05 * shape.passes
        return 0.01 * (1.0 + 0.02 * shape.rows + drafting)

    costs = calibrated(seconds, CELLS)
    before = [relative(costs, rows) for rows in (4, 16)]
    stay(costs, 16, 0, seconds(even(16, 0)), 6000)
    for rows, known in zip((4, 16), before):
        assert relative(costs, rows) == pytest.approx(known, rel=0.15)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 3.0])
def test_a_slower_machine_changes_ratios_little_once_two_numbers_of_drafts_ran(factor):
    costs = calibrated()
    for _ in range(12):
        stay(costs, 1, 2, 0.01 * factor * TRUE[2], 24)
        stay(costs, 1, 0, 0.01 * factor, 9)
    assert relative(costs, 1)[:3] == pytest.approx(TRUE[:3], rel=0.15)


def test_work_of_the_host_in_each_step_makes_drafts_cheaper_and_is_kept():
    """As over HTTP, a step without drafts takes 10 ms, and the host's work 6 ms more."""
    costs = calibrated()
    for depth in (1, 0, 3) * 4:
        stay(costs, 1, depth, 0.01 * TRUE[depth] + 0.006, 17)
    true = [(cost + 0.6) / 1.6 for cost in TRUE]
    assert relative(costs, 1) == pytest.approx(true, rel=0.06)
    again = StepCosts()
    again.load_table(costs.table())
    assert relative(again, 1) == pytest.approx(true, rel=0.12)


@pytest.mark.parametrize("known", [False, True], ids=["in use", "calibrated"])
def test_what_a_step_without_look_ahead_adds_is_learned(known):
    """A step takes 10 ms with look-ahead and 13 without, whatever its drafts."""

    def seconds(shape: StepShape) -> float:
        return one_row(shape) + 0.003 * shape.sync

    cells = ((MTP, 1, range(1, 5)), *(((SYNC, 1, (0,)),) if known else ()))
    costs = calibrated(seconds, cells)
    for depth in () if known else (1, 0, 3) * 4:
        for sync in (False, True):
            for _ in range(9):
                shape = even(1, depth)._replace(sync=sync)
                costs.observe(shape, seconds(shape))
    verify = costs.of_batch(1).verify
    assert costs.of_batch(1, sync=True).verify - verify == pytest.approx(0.3, abs=0.03)
    assert relative(costs, 1) == pytest.approx(TRUE, rel=0.04)


def test_a_number_of_drafts_that_takes_more_than_its_neighbours_is_learned():
    costs, odd = calibrated(), (1.0, 1.4, 2.2, 2.3, 2.4)
    for depth in (1, 2, 3, 0) * 6:
        stay(costs, 1, depth, 0.01 * odd[depth], 17)
    assert relative(costs, 1)[:4] == pytest.approx(odd[:4], rel=0.08)


def test_only_windows_of_the_head_measure_its_drafts():
    cells = ((HOST, 4, (4, 16)), (MTP, 4, (1, 2)))
    costs = calibrated(lambda shape: 0.01 + 0.001 * shape.drafts, cells)
    known = [costs.has_measured(rows, 2, (MTP, USE)) for rows in (1, 4, 9, 16)]
    assert known == [False, True, True, False]
    assert not costs.has_measured(4, 3, (MTP, USE)) and not costs.has_measured(4, 2, (USE,))


def test_late_steps_and_first_launches_change_nothing():
    costs = calibrated()
    for _ in range(4):
        for depth in (0, 2):
            costs.observe(even(1, depth), 30.0 if depth else None)
            for number in range(16):
                late = 9.0 if number % 8 == 5 else 1.0
                costs.observe(even(1, depth), 0.01 * TRUE[depth] * late)
    assert relative(costs, 1) == pytest.approx(TRUE, rel=0.06)


def test_costs_are_still_learned_after_long_use():
    """After long use with noisy times, drafts cost three times as much, which is learned."""
    costs, chance = calibrated(), random.Random(0)
    for number in range(20_000):
        rows, depth = chance.choice([1, 4, 16]), number % 3
        seconds = 0.01 * (1 + 0.4 * depth) * chance.lognormvariate(0.0, 0.3)
        stay(costs, rows, depth, seconds, 3)
    for number in range(150):
        depth = number % 3
        stay(costs, 4, depth, 0.01 * (1 + 1.2 * depth), 9)
    assert relative(costs, 4)[1:3] == pytest.approx([2.2, 3.4], rel=0.2)


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


def test_the_cost_of_padding_is_learned_in_use():
    """Only one window of a step is long, and the shapes of steps vary."""

    def seconds(shape: StepShape) -> float:
        return 0.001 * (6 + 0.5 * (shape.rows + shape.drafts) + 0.1 * shape.padding)

    def cheap(shape: StepShape) -> float:
        return seconds(shape) - 0.0001 * shape.padding

    costs, chance = calibrated(cheap, ((MTP, 8, (1, 2)), (RAGGED, 8, (16,)))), random.Random(1)
    before = costs.of_batch(8).padding
    for _ in range(400):
        longest = chance.choice([0, 2, 5, 9, 14])
        shape = StepShape(8, longest, 0, longest)
        costs.observe(shape, seconds(shape))
    for longest in (5, 14):
        shape = StepShape(8, longest, 0, longest)
        true = seconds(shape) / seconds(even(8, 0))
        assert costs.of_batch(8).cost(shape) == pytest.approx(true, rel=0.1)
    assert costs.of_batch(8).padding > 2 * before


def test_a_position_counts_only_where_those_before_it_were_right():
    pool = HeadRates(5)
    for accepted in [0] * 300 + [2] * 300:
        pool.observe([(4, accepted)])
    chances = pool.cumulative_acceptance()
    rates = [chances[0], *(b / a for a, b in itertools.pairwise(chances))]
    assert min(rates[:2]) > 0.95
    assert rates[2] < 0.05
    # No position after the failed one was tried, and the last one was never drafted.
    assert rates[3:] == pytest.approx([0.95 * rates[2], 0.95**2 * rates[2]])
    for _ in range(5000):
        pool.observe([])
    assert pool.cumulative_acceptance()[2] > 0.4 > chances[2]


@pytest.mark.parametrize("seed", range(5))
def test_few_trials_of_a_request_change_its_rate_of_copies_little(seed):
    """The copies of 16 requests are equally good: what differs after ten trials is chance."""
    chance, pool = random.Random(seed), NgramRates(0.997)
    requests = [NgramRates(0.97) for _ in range(16)]
    for _, own in itertools.product(range(10), requests):
        is_right = chance.random() < 0.8
        for rates in (own, pool):
            rates.observe(8, int(is_right), missed=not is_right)
    estimates = [own.cumulative_acceptance(8, 1, pool)[0] for own in requests]
    assert max(estimates) - min(estimates) < 0.1


def test_ngram_drafts_are_rated_by_the_length_of_the_match_before_them():
    row, pool = NgramRates(0.97), NgramRates(0.99)
    first = row.cumulative_acceptance(3, 16, pool)
    assert first == sorted(first, reverse=True)
    assert row.cumulative_acceptance(40, 16, pool)[-1] > first[-1]
    for _ in range(50):
        pool.observe(3, 0, missed=True)  # Short matches are accidental,
        pool.observe(20, 16, missed=False)  # long ones continue.
    assert row.cumulative_acceptance(3, 1, pool)[0] < 0.1
    assert row.cumulative_acceptance(20, 16, pool)[-1] > 0.9
