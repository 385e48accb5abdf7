"""Acceptance per position: priors, conditional trials, forgetting."""

import itertools

import pytest

from mlx_mtp.speculative.depth import RowRates

K = 5


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
