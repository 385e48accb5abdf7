"""Ragged KV against lists of rows: random windows, rollbacks, joins, leaves and growth."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.kv import RaggedKVCache, causal_mask

HEADS, DIM = 2, 4


class Model:
    """What the cache should hold: a list of entries per row."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = np.random.default_rng(seed)
        self.rows: list[list[np.ndarray]] = [[] for _ in range(count)]
        self.cache = RaggedKVCache(count)

    def window(self, length: int) -> None:
        """Write a window, check what attention would read, keep a random part of each row."""
        count = len(self.rows)
        new = self.random.standard_normal((count, HEADS, length, DIM)).astype(np.float32)
        longest = max(map(len, self.rows))
        self.cache.reserve(longest + length + int(self.random.integers(0, 3)))
        keys, values = self.cache.update_and_fetch(mx.array(new), mx.array(-new))
        mask = np.array(self.cache.make_mask(count * length))
        for row in range(count):
            seen = [*self.rows[row], *new[row].transpose(1, 0, 2)]
            assert mask[row, 0].sum(axis=1).tolist() == [
                len(self.rows[row]) + j + 1 for j in range(length)
            ]
            for entries, sign in ((keys, 1), (values, -1)):
                got = np.array(entries[row])[:, mask[row, 0, -1]]
                np.testing.assert_array_equal(got.transpose(1, 0, 2), sign * np.stack(seen))
        kept = self.random.integers(0, length + 1, count)
        self.cache.offset = self.cache.offset + mx.array(kept.astype(np.int32))
        for row in range(count):
            self.rows[row] += list(new[row].transpose(1, 0, 2))[: kept[row]]

    def check(self) -> None:
        assert self.cache.offset.tolist() == [len(r) for r in self.rows]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("window"), st.sampled_from([1, 2, 4, 9, 130])),
            st.tuples(st.just("join"), st.integers(1, 3)),
            st.tuples(st.just("leave"), st.integers(0, 7)),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_rows_hold_what_was_kept_of_them(seed, steps):
    model = Model(seed, 2)
    model.window(3)
    for kind, value in steps:
        if kind == "window":
            model.window(value)
        elif kind == "join":
            other = Model(seed + 1, value)
            other.window(5)
            model.cache.extend(other.cache)
            model.rows += other.rows
        elif len(model.rows) > 1:
            keep = [i for i in range(len(model.rows)) if i != value % len(model.rows)]
            model.cache = model.cache.select(mx.array(keep))
            model.rows = [model.rows[i] for i in keep]
        model.check()
    model.window(2)


def test_taking_rows_leaves_the_original_as_it_was():
    model = Model(0, 3)
    model.window(4)
    before = np.array(model.cache.keys)
    taken = model.cache.select(mx.array([2]))
    taken.reserve(8)
    taken.update_and_fetch(mx.zeros((1, HEADS, 2, DIM)), mx.zeros((1, HEADS, 2, DIM)))
    np.testing.assert_array_equal(np.array(model.cache.keys), before)


def test_a_write_past_the_reserve_is_caught():
    cache = RaggedKVCache(1)
    cache.reserve(2)
    with pytest.raises(AssertionError):
        cache.update_and_fetch(mx.zeros((1, 1, 65, DIM)), mx.zeros((1, 1, 65, DIM)))


def test_capacity_follows_the_longest_row_that_is_left():
    long, short = Model(0, 1), Model(1, 1)
    for _ in range(8):
        long.window(200)
    short.window(3)
    long.cache.extend(short.cache)
    long.rows += short.rows
    long.window(2)
    assert long.cache.capacity >= len(long.rows[0])
    long.cache, long.rows = long.cache.select(mx.array([1])), long.rows[1:]
    long.window(2)
    assert long.cache.capacity == 256
    long.window(3)


def test_masks_are_causal_and_ragged():
    mask = causal_mask(mx.array([0, 2]), 2, 4)
    expected = [[[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 1, 0], [1, 1, 1, 1]]]
    assert mask[:, 0].astype(mx.int32).tolist() == expected
    with pytest.raises(ValueError, match="sliding"):
        RaggedKVCache(1).make_mask(1, window_size=4)
