"""The caches against rows alone: random windows, rollbacks, joins, leaves and growth."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.kernels.window import Convolution, Projected

HEADS, DIM = 2, 4
KERNEL, HK, RATIO, DK, DV = 4, 2, 2, 32, 8
CHANNELS = 2 * HK * DK + HK * RATIO * DV
SEEDS = st.integers(0, 2**16)


def steps(kinds: list[str], values: list[int], most: int) -> st.SearchStrategy:
    step = st.tuples(st.sampled_from(kinds), st.sampled_from(values))
    return st.lists(step, min_size=1, max_size=most)


class KVRows:
    """A cache of KV, and what it should hold: a list of entries per row."""

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
            first = len(self.rows[row]) + 1
            assert mask[row, 0].sum(axis=1).tolist() == list(range(first, first + length))
            for entries, sign in ((keys, 1), (values, -1)):
                got = np.array(entries[row])[:, mask[row, 0, -1]]
                np.testing.assert_array_equal(got.transpose(1, 0, 2), sign * np.stack(seen))
        kept = self.random.integers(0, length + 1, count)
        self.cache.offset = self.cache.offset + mx.array(kept.astype(np.int32))
        for row in range(count):
            self.rows[row] += list(new[row].transpose(1, 0, 2))[: kept[row]]

    def join(self, other: KVRows) -> None:
        self.cache.extend(other.cache)
        self.rows += other.rows

    def leave(self, row: int) -> None:
        keep = [i for i in range(len(self.rows)) if i != row]
        before, old = self.cache, np.array(self.cache.keys)
        self.cache = self.cache.select(mx.array(keep))
        self.rows = [self.rows[i] for i in keep]
        self.window(1)
        np.testing.assert_array_equal(np.array(before.keys), old)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, steps=steps(["window", "join", "leave"], [1, 2, 4, 9, 130], 12))
def test_rows_hold_what_was_kept_of_them(seed, steps):
    model = KVRows(seed, 2)
    model.window(3)
    for kind, value in steps:
        if kind == "join" and len(model.rows) < 8:
            other = KVRows(seed + 1, value % 3 + 1)
            other.window(5)
            model.join(other)
        elif kind == "leave" and len(model.rows) > 1:
            model.leave(value % len(model.rows))
        else:
            model.window(value)
        assert model.cache.offset.tolist() == [len(r) for r in model.rows]
    model.window(2)


def test_capacity_follows_the_longest_row_that_is_left():
    model, short = KVRows(0, 1), KVRows(1, 1)
    for _ in range(8):
        model.window(200)
    short.window(3)
    model.join(short)
    model.window(2)
    assert model.cache.capacity >= len(model.rows[0])
    model.leave(0)
    assert model.cache.capacity == 256


def normal(random, *shape):
    return mx.array(random.standard_normal(shape).astype(np.float32))


def convolution(random) -> Convolution:
    shapes = (CHANNELS, KERNEL, 1), (HK * RATIO,), (HK * RATIO,)
    return Convolution(*(normal(random, *shape) for shape in shapes))


def close(ours, true) -> None:
    np.testing.assert_allclose(np.array(ours), np.array(true), rtol=1e-5, atol=2e-6)


class StateRows:
    """A cache of states, and each row run alone, token by token, through a cache of its own."""

    def __init__(self, random, weights: Convolution, count: int) -> None:
        self.random, self.weights = random, weights
        self.cache = GatedDeltaCache(count, KERNEL)
        self.alone = [GatedDeltaCache(1, KERNEL) for _ in range(count)]

    def window(self, length: int, *, known: bool) -> None:
        """One window, each row keeping a random part of it, and the same tokens one by one."""
        count = len(self.alone)
        shapes = (HK, DK), (HK, DK), (HK, RATIO, DV), (HK, RATIO), (HK, RATIO)
        projected = Projected(*(normal(self.random, count, length, *shape) for shape in shapes))
        kept = mx.array(self.random.integers(0, length + 1, count).astype(np.int32))
        self.cache.coming = kept if known else None
        outputs = self.cache.run(projected, self.weights)
        if not known:
            self.cache.num_kept = kept
        for row, number in enumerate(kept.tolist()):
            for t in range(number):
                one = Projected(*(a[row : row + 1, t : t + 1] for a in projected))
                self.alone[row].coming = mx.array([1])
                expected = self.alone[row].run(one, self.weights)
                close(outputs[row, t], expected[0, 0])

    def check(self) -> None:
        """State and convolution inputs equal those of the rows alone."""
        self.cache.fold()
        assert self.cache.batch_size == len(self.alone)
        assert self.cache.history.shape[1] == KERNEL - 1
        for row, single in enumerate(self.alone):
            single.fold()
            history, state = (
                (0, 0) if single.state is None else (single.history[0], single.state[0])
            )
            np.testing.assert_array_equal(self.cache.history[row], history)
            close(self.cache.state[row], state)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, steps=steps(["verify", "known", "leave", "join"], [1, 2, 3, 5, 20], 8))
def test_a_batch_of_states_equals_rows_alone(seed, steps):
    random = np.random.default_rng(seed)
    weights = convolution(random)
    rows = StateRows(random, weights, 2)
    rows.window(3, known=False)
    for kind, length in steps:
        count = len(rows.alone)
        if kind == "leave" and count > 1:
            gone = int(random.integers(0, count))
            keep = [i for i in range(count) if i != gone]
            rows.cache = rows.cache.select(mx.array(keep))
            rows.alone = [rows.alone[i] for i in keep]
        elif kind == "join" and count < 5:
            other = StateRows(random, weights, 1)
            other.window(length, known=bool(length % 2))
            rows.cache.extend(other.cache)
            rows.alone += other.alone
        else:
            rows.window(length, known=kind == "known")
    rows.check()
