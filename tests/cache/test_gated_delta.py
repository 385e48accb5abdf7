"""The cache around the recurrence: histories, joins, leaves, known and unknown lengths."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.kernels.window import Convolution, Projected

KERNEL, HK, RATIO, DK, DV = 4, 2, 2, 32, 8
CHANNELS = 2 * HK * DK + HK * RATIO * DV


def normal(random, *shape):
    return mx.array(random.standard_normal(shape).astype(np.float32))


def convolution(random) -> Convolution:
    shapes = (CHANNELS, KERNEL, 1), (HK * RATIO,), (HK * RATIO,)
    return Convolution(*(normal(random, *shape) for shape in shapes))


class Rows:
    """A batch's cache, and each row run alone, token by token, through a cache of its own."""

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

    def leave(self, gone: int) -> None:
        keep = [i for i in range(len(self.alone)) if i != gone]
        self.cache = self.cache.select(mx.array(keep))
        self.alone = [self.alone[i] for i in keep]

    def join(self, other: Rows) -> None:
        self.cache.extend(other.cache)
        self.alone += other.alone

    def check(self) -> None:
        """State and convolution inputs equal those of the rows alone."""
        self.cache.fold()
        assert self.cache.batch_size == len(self.alone)
        for row, single in enumerate(self.alone):
            if single.state is None:
                np.testing.assert_array_equal(self.cache.history[row], 0)
                np.testing.assert_array_equal(self.cache.state[row], 0)
                continue
            single.fold()
            np.testing.assert_array_equal(self.cache.history[row], single.history[0])
            close(self.cache.state[row], single.state[0])


def close(ours, true) -> None:
    np.testing.assert_allclose(np.array(ours), np.array(true), rtol=1e-5, atol=2e-6)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["verify", "known", "leave", "join"]),
            st.sampled_from([1, 2, 3, 5, 20]),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_batch_equals_rows_alone(seed, steps):
    random = np.random.default_rng(seed)
    weights = convolution(random)
    rows = Rows(random, weights, 2)
    rows.window(3, known=False)
    for kind, length in steps:
        count = len(rows.alone)
        if kind == "leave" and count > 1:
            rows.leave(int(random.integers(0, count)))
        elif kind == "join" and count < 5:
            other = Rows(random, weights, 1)
            other.window(length, known=bool(length % 2))
            rows.join(other)
        else:
            rows.window(length, known=kind == "known")
    rows.check()


def test_a_long_prompt_leaves_no_long_history():
    random = np.random.default_rng(0)
    rows = Rows(random, convolution(random), 2)
    rows.window(100, known=True)
    assert rows.cache.history.shape == (2, KERNEL - 1, CHANNELS)
