"""Acceptance per position: priors, conditional trials, forgetting."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.speculative.depth import PooledRates, RowRates

K = 5


def test_an_unseen_row_does_what_all_others_do_and_the_past_gives_way():
    pool, row = PooledRates(K), RowRates(K)
    for _ in range(200):
        pool.observe(3, 1, cut=False)
    first, second, *_ = pool.expected()
    assert (first > 0.9, second < 0.1) == (True, True)
    expected = [1.0, 1 + first, 1 + first * (1 + second)]
    assert row.expected_tokens(pool.expected())[:3] == pytest.approx(expected)
    for _ in range(50):
        row.observe(1, 0, cut=False)
    assert row.expected_tokens([0.8] * K)[1] < 1.15
    for _ in range(2000):
        row.forget(0)
    assert row.expected_tokens([0.8] * K)[1] == pytest.approx(1.8, abs=0.01)


def test_a_position_counts_only_where_those_before_it_were_right():
    row = RowRates(K)
    for accepted in [0] * 300 + [2] * 300:
        assert row.observe(4, accepted, cut=False) == accepted + 1
    assert row.observe(3, 1, cut=True) == 1  # the row ended: the next draft was not tried
    gains = [b - a for a, b in itertools.pairwise(row.expected_tokens([0.9] * K))]
    rates = [gains[0], *(b / a for a, b in itertools.pairwise(gains))]
    assert min(rates[:2]) > 0.8
    assert rates[2] < 0.2
    # Behind the one that failed nothing was tried, nor at all at the last.
    assert rates[3:] == pytest.approx([0.9, 0.9])


@given(st.lists(st.tuples(st.integers(0, K), st.integers(0, K), st.booleans()), max_size=60))
def test_rates_stay_rates(windows):
    pool, row = PooledRates(K), RowRates(K)
    for drafts, accepted, cut in windows:
        for rates in (pool, row):
            rates.forget(rates.observe(drafts, min(drafts, accepted), cut=cut))
    likely, most = pool.expected(), pool.expected(1.0)
    assert all(0 <= a <= b + 1e-12 <= 1 + 1e-12 for a, b in zip(likely, most))
    for tokens in (row.expected_tokens(likely), row.expected_tokens(most, 1.0)):
        assert tokens[0] == 1.0
        assert all(0 <= b - a <= 1 for a, b in itertools.pairwise(tokens))
