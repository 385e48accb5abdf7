"""Acceptance per position: priors, conditional trials, forgetting."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.speculative.rates import PooledRates, RowRates

K = 5


def test_an_unseen_row_does_what_all_others_do():
    pool = PooledRates(K)
    for _ in range(200):
        pool.observe(3, 1, cut=False)
    expected = pool.expected()
    assert expected[0] > 0.9
    assert expected[1] < 0.1
    tokens = RowRates(K).expected_tokens(expected)
    first, second = expected[:2]
    assert tokens[:3] == pytest.approx([1.0, 1 + first, 1 + first * (1 + second)])
    assert len(tokens) == K + 1


def test_a_position_counts_only_where_those_before_it_were_right():
    row = RowRates(K)
    for accepted in [0] * 300 + [2] * 300:
        row.observe(4, accepted, cut=False)
    tokens = row.expected_tokens([0.9] * K)
    gains = [b - a for a, b in itertools.pairwise(tokens)]
    rates = [gains[0], *(b / a for a, b in itertools.pairwise(gains))]
    assert rates[0] > 0.8
    assert rates[1] > 0.8
    assert rates[2] < 0.2
    # Behind the one that failed nothing was tried, nor at all at the last.
    assert rates[3:] == pytest.approx([0.9, 0.9])


def test_a_row_that_ended_in_its_window_failed_at_nothing():
    cut, failed = RowRates(K), RowRates(K)
    for _ in range(10):
        assert cut.observe(3, 1, cut=True) == 1
        assert failed.observe(3, 1, cut=False) == 2
    pool = [0.5] * K
    assert cut.expected_tokens(pool)[2] > failed.expected_tokens(pool)[2]
    assert cut.expected_tokens(pool)[1] == failed.expected_tokens(pool)[1]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_it_comes_near_the_true_rate_and_follows_it(rate):
    draw, row = random.Random(1), RowRates(K)
    for _ in range(200):
        row.observe(1, 1, cut=False)
    seen = []
    for _ in range(600):
        row.observe(1, int(draw.random() < rate), cut=False)
        seen.append(row.expected_tokens([0.5] * K)[1] - 1)
    assert sum(seen[60:]) / len(seen[60:]) == pytest.approx(rate, abs=0.06)


def test_what_is_long_ago_gives_way_to_the_prior_and_hope_helps_where_little_is_known():
    row, pool = RowRates(K), [0.8] * K
    for _ in range(50):
        row.observe(1, 0, cut=False)
    fresh, hoped = row.expected_tokens(pool)[1], row.expected_tokens(pool, 1.0)[1]
    assert fresh < 1.15
    assert 0 < hoped - fresh < 0.06
    for _ in range(2000):
        row.forget(0)
    assert row.expected_tokens(pool)[1] == pytest.approx(1.8, abs=0.01)


@given(
    windows=st.lists(st.tuples(st.integers(0, K), st.integers(0, K), st.booleans()), max_size=60),
    hope=st.sampled_from([0.0, 1.0]),
)
def test_rates_stay_rates(windows, hope):
    pool, row = PooledRates(K), RowRates(K)
    for drafts, accepted, cut in windows:
        for rates in (pool, row):
            tried = rates.observe(drafts, min(drafts, accepted), cut=cut)
            assert 0 <= tried <= drafts
            rates.forget(tried)
    expected = pool.expected(hope)
    assert all(0 <= rate <= 1 for rate in expected)
    assert all(a <= b + 1e-12 for a, b in zip(pool.expected(), pool.expected(1.0)))
    tokens = row.expected_tokens(expected, hope)
    assert tokens[0] == 1.0
    assert all(0 <= b - a <= 1 for a, b in itertools.pairwise(tokens))
