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

    def join(self, other: Model) -> None:
        self.cache.extend(other.cache)
        self.rows += other.rows

    def leave(self, row: int) -> None:
        keep = [i for i in range(len(self.rows)) if i != row]
        self.cache = self.cache.select(mx.array(keep))
        self.rows = [self.rows[i] for i in keep]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    steps=st.lists(
        st.tuples(st.sampled_from(["window", "join", "leave"]), st.sampled_from([1, 2, 4, 9, 130])),
        min_size=1,
        max_size=12,
    ),
)
def test_rows_hold_what_was_kept_of_them(seed, steps):
    model = Model(seed, 2)
    model.window(3)
    for kind, value in steps:
        if kind == "join" and len(model.rows) < 8:
            other = Model(seed + 1, value % 3 + 1)
            other.window(5)
            model.join(other)
        elif kind == "leave" and len(model.rows) > 1:
            model.leave(value % len(model.rows))
        else:
            model.window(value)
        assert model.cache.offset.tolist() == [len(r) for r in model.rows]
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
    model, short = Model(0, 1), Model(1, 1)
    for _ in range(8):
        model.window(200)
    short.window(3)
    model.join(short)
    model.window(2)
    assert model.cache.capacity >= len(model.rows[0])
    model.leave(0)
    model.window(2)
    assert model.cache.capacity == 256
    model.window(3)


def test_masks_are_causal_and_ragged():
    mask = causal_mask(mx.array([0, 2]), 2, 4)
    expected = [[[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 1, 0], [1, 1, 1, 1]]]
    assert mask[:, 0].astype(mx.int32).tolist() == expected
    with pytest.raises(ValueError, match="sliding"):
        RaggedKVCache(1).make_mask(1, window_size=4)
