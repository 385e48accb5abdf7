"""The caches compared with rows alone: random windows, rollbacks, joins, leaves and growth."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.layout import Layout, most_slots, rounded_capacity
from mlx_mtp.kernels.gdn_types import GDNProjections, GDNShape, ShortConvWeights

HEADS, DIM = 2, 4
HK, RATIO, DK, DV = 2, 2, 32, 8
SHAPE = GDNShape(HK, DK, HK * RATIO, DV)
SEEDS = st.integers(0, 2**16)


def steps(kinds: list[str], values: list[int], most: int) -> st.SearchStrategy:
    step = st.tuples(st.sampled_from(kinds), st.sampled_from(values))
    return st.lists(step, min_size=1, max_size=most)


class KVRows:
    """A KV cache, and the list of entries that it should hold for each row."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = np.random.default_rng(seed)
        self.rows: list[list[np.ndarray]] = [[] for _ in range(count)]
        self.cache = BatchCache([RaggedKVCache()], count)

    def window(self, longest: int) -> None:
        """Run windows of any lengths, check attention, keep a random part of each."""
        lengths = self.random.integers(0, longest + 1, len(self.rows))
        lengths[self.random.integers(len(lengths))] = longest
        bounds = [len(row) + length for row, length in zip(self.rows, lengths.tolist())]
        self.cache.reserve([bound + int(self.random.integers(0, 3)) for bound in bounds])
        self.check_layout()
        packing = self.cache.begin_window(lengths.tolist())
        count = int(lengths.sum())
        k, v = self.random.standard_normal((2, count, HEADS, DIM)).astype(np.float32)
        q = self.random.standard_normal((count, RATIO * HEADS, DIM)).astype(np.float32)
        self.cache.layers[0].write(packing, mx.stack([mx.array(k), mx.array(v)], axis=1))
        outputs = np.array(self.cache.layers[0].attend(packing, mx.array(q), 0.5))
        on_cpu = self.cache.layers[0].attend_on_cpu(packing, mx.array(0.5 * q))
        np.testing.assert_allclose(on_cpu, outputs, rtol=1e-4, atol=1e-5)
        kept, token = self.random.integers(0, lengths + 1), 0
        for row, length, number in zip(self.rows, lengths.tolist(), kept.tolist()):
            seen = [*row, *zip(k[token : token + length], v[token : token + length])]
            for step in {0, length // 2, length - 1} if length else ():
                entries = np.stack(seen[: len(row) + step + 1], axis=1)
                keys, values = np.repeat(entries, RATIO, axis=2)
                scores = np.exp(0.5 * np.einsum("hd,shd->hs", q[token + step], keys))
                expected = np.einsum("hs,shd->hd", scores, values) / scores.sum(1)[:, None]
                np.testing.assert_allclose(outputs[token + step], expected, rtol=1e-4, atol=1e-5)
            row += seen[len(row) : len(row) + number]
            token += length
        self.cache.commit(mx.array(kept.astype(np.int32)))

    def check_layout(self) -> None:
        """Check that every row has a place of its own, and that few slots are empty."""
        layout = self.cache.layout
        assert len({*layout.places}) == len(self.rows)
        capacities = [buffer.capacity for buffer, _ in layout.places]
        assert all(c >= len(row) for c, row in zip(capacities, self.rows, strict=True))
        for capacity in {buffer.capacity for buffer in layout.buffers}:
            same = [buffer for buffer in layout.buffers if buffer.capacity == capacity]
            rows = sum(buffer in same for buffer, _ in layout.places)
            slots = sum(buffer.slots for buffer in same)
            assert rows <= slots <= (2 * rows if most_slots(capacity) > 1 else rows)

    def join(self, other: KVRows) -> None:
        self.cache.extend(other.cache)
        self.rows += other.rows

    def part_and_join(self, longest: int) -> None:
        """Split the rows, write to both parts of the same buffers, and join them, like a group."""
        other, middle = KVRows(longest, 0), len(self.rows) // 2
        other.rows, self.rows = self.rows[middle:], self.rows[:middle]
        other.cache = self.cache.select([*range(middle, middle + len(other.rows))])
        self.cache = self.cache.select([*range(middle)])
        self.window(longest)
        other.window(longest)
        self.join(other)

    def leave(self, row: int) -> None:
        keep = [i for i in range(len(self.rows)) if i != row]
        before, old = self.cache, [np.array(a) for a in self.cache.layers[0].arrays]
        self.cache = self.cache.select(keep)
        self.rows = [self.rows[i] for i in keep]
        self.window(1)
        for array, then in zip(before.layers[0].arrays, old, strict=True):
            np.testing.assert_array_equal(np.array(array), then)


@pytest.mark.usefixtures("small_classes")
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=SEEDS, steps=steps(["window", "join", "leave", "part"], [1, 2, 4, 9, 130, 400], 12))
def test_rows_hold_what_was_kept_of_them(seed, steps):
    model = KVRows(seed, 2)
    model.window(3)
    for kind, value in steps:
        if kind == "join" and len(model.rows) < 8:
            other = KVRows(seed + 1, value % 3 + 1)
            other.window(value)
            model.join(other)
        elif kind == "leave" and len(model.rows) > 1:
            model.leave(value % len(model.rows))
        elif kind == "part" and len(model.rows) > 1:
            model.part_and_join(value)
        else:
            model.window(value)
        assert model.cache.offset.tolist() == [len(r) for r in model.rows]
    model.window(2)


def test_what_joins_leaves_or_grows_copies_no_other_row():
    """Only rows move that join, outgrow their size class, or are in a class of few rows left."""
    rows = Layout(1)

    def moved(limits: list[int]) -> list[int]:
        before = list(rows.places)
        return [before.index(old) for old, _ in rows.arrange(limits, limits)]

    def join(limit: int) -> None:
        other = Layout(1)
        other.arrange([limit], [limit])
        rows.extend(other)

    limits = [60_000]
    assert moved(limits) == []
    for limit in (500, 30_000, 400, 300, 30_000, 500, 512):
        join(limit)
        limits.append(limit)
        own = [len(limits) - 1] if limit < 8192 else []  # a long row brings its buffer along
        assert moved(limits) == own
    # Short rows have few buffers, so few launches; each long row has its own.
    assert sorted(b.slots for b in rows.buffers if b.capacity == 512) == [1, 2, 4]
    limits[3] = 600
    assert moved(limits) == [3]
    limits[0] = rows.places[0][0].capacity + 1
    assert moved(limits) == [0]
    rows, _ = rows.select([1, 2])
    assert moved([500, 30_000]) == []


def test_classes_waste_at_most_a_quarter():
    lengths = np.arange(256, 300_000, 256)
    capacities = np.array([rounded_capacity(int(n)) for n in lengths])
    assert (capacities >= lengths).all()
    assert (capacities <= 1.25 * lengths).all()
    assert len({*capacities.tolist()}) < 45


def normal(random, *shape):
    return mx.array(random.standard_normal(shape).astype(np.float32))


def convolution(random) -> ShortConvWeights:
    shapes = (SHAPE.channels, SHAPE.conv_size, 1), (HK * RATIO,), (HK * RATIO,)
    return ShortConvWeights(*(normal(random, *shape) for shape in shapes))


def close(ours, true) -> None:
    np.testing.assert_allclose(np.array(ours), np.array(true), rtol=1e-5, atol=2e-6)


def states(count: int) -> BatchCache:
    cache = BatchCache([GatedDeltaCache(count, SHAPE, mx.float32)], count)
    cache.reserve([1] * count)
    return cache


class StateRows:
    """A cache of states, and a cache for each row, which is run alone, token by token."""

    def __init__(self, random, weights: ShortConvWeights, count: int) -> None:
        self.random, self.weights = random, weights
        self.cache = states(count)
        self.alone = [states(1) for _ in range(count)]

    def window(self, length: int, *, known: bool) -> None:
        """Run a window, of which each row keeps a random part, and the same tokens one by one."""
        count = len(self.alone)
        shapes = (HK, DK), (HK, DK), (HK, RATIO, DV), (HK, RATIO), (HK, RATIO)
        projected = GDNProjections(
            *(normal(self.random, count, length, *shape) for shape in shapes)
        )
        kept = mx.array(self.random.integers(0, length + 1, count).astype(np.int32))
        outputs = self.run(self.cache, projected, kept, known=known)
        for row, number in enumerate(kept.tolist()):
            for t in range(number):
                one = GDNProjections(*(a[row : row + 1, t : t + 1] for a in projected))
                expected = self.run(self.alone[row], one, mx.array([1]), known=True)
                close(outputs[row, t], expected[0, 0])

    def run(self, cache: BatchCache, projected: GDNProjections, kept, *, known: bool):
        lengths = [projected.q.shape[1]] * len(kept)
        window = cache.begin_window(lengths, kept if known else None)
        outputs = cache.layers[0].run_window(projected, self.weights, window.kept)
        cache.commit(kept)
        return outputs

    def check(self) -> None:
        """Check that states and convolution inputs equal those of the rows alone."""
        for cache in (self.cache, *self.alone):
            cache.fold()
        states, _, histories = self.cache.layers[0].arrays
        assert histories.shape[:2] == (len(self.alone), SHAPE.conv_size - 1)
        for row, cache in enumerate(self.alone):
            state, _, history = cache.layers[0].arrays
            np.testing.assert_array_equal(histories[row], history[0])
            close(states[row], state[0])


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
            rows.cache = rows.cache.select(keep)
            rows.alone = [rows.alone[i] for i in keep]
        elif kind == "join" and count < 5:
            other = StateRows(random, weights, 1)
            other.window(length, known=bool(length % 2))
            rows.cache.extend(other.cache)
            rows.alone += other.alone
        else:
            rows.window(length, known=kind == "known")
    rows.check()
