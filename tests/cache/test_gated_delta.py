"""The cache around the recurrence: convolution tails, joins, leaves, known and unknown lengths."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.gated_delta import GatedDeltaCache
from tests.kernels.test_gated_delta import random_window

KERNEL, CHANNELS = 4, 6


class Rows:
    """Each row run alone, token by token, through a cache of its own."""

    def __init__(self, random, count: int) -> None:
        self.random = random
        self.caches = [GatedDeltaCache() for _ in range(count)]
        self.histories: list[list[np.ndarray]] = [[] for _ in range(count)]

    def keep(self, row: int, q, window, mixed) -> None:
        cache = self.caches[row]
        cache.lengths = mx.array([1])
        conv_input = cache.conv_input(mixed, KERNEL)
        cache.update(q, window, conv_input)
        self.histories[row].append(np.array(mixed[0, 0]))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["verify", "known", "leave", "join"]), st.sampled_from([1, 2, 3, 5])
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_batch_equals_rows_alone(seed, steps):
    random = np.random.default_rng(seed)
    cache, rows = run_window(random, GatedDeltaCache(), Rows(random, 2), 3, known=False)
    for kind, length in steps:
        count = len(rows.caches)
        if kind == "leave" and count > 1:
            gone = int(random.integers(0, count))
            keep = [i for i in range(count) if i != gone]
            cache = cache.take(mx.array(keep))
            rows.caches = [rows.caches[i] for i in keep]
            rows.histories = [rows.histories[i] for i in keep]
        elif kind == "join" and count < 5:
            other, more = run_window(
                random, GatedDeltaCache(), Rows(random, 1), length, known=bool(length % 2)
            )
            cache.extend(other)
            rows.caches += more.caches
            rows.histories += more.histories
        else:
            cache, rows = run_window(random, cache, rows, length, known=kind == "known")
    cache.fold()
    for row, history in enumerate(rows.histories):
        padded = [np.zeros(CHANNELS, np.float32)] * (KERNEL - 1) + history
        np.testing.assert_array_equal(np.array(cache.conv[row]), np.stack(padded[-KERNEL + 1 :]))
        if history:
            expected = np.array(rows.caches[row].state[0])
            np.testing.assert_array_equal(np.array(cache.state[row]), expected)


def run_window(random, cache: GatedDeltaCache, rows: Rows, length: int, *, known: bool):
    """One window of the batch, each row keeping a random part, and the same rows alone."""
    count = len(rows.caches)
    q, window = random_window(random, count, length, 2, 4)
    mixed = mx.array(random.standard_normal((count, length, CHANNELS)).astype(np.float32))
    kept = mx.array(random.integers(0, length + 1, count).astype(np.int32))
    cache.lengths = kept if known else None
    conv_input = cache.conv_input(mixed, KERNEL)
    assert conv_input.shape == (count, KERNEL - 1 + length, CHANNELS)
    for row, history in enumerate(rows.histories):
        padded = [np.zeros(CHANNELS, np.float32)] * (KERNEL - 1) + history
        tail = np.array(conv_input[row, : KERNEL - 1])
        np.testing.assert_array_equal(tail, np.stack(padded[-KERNEL + 1 :]))
    cache.update(q, window, conv_input)
    if not known:
        cache.num_kept = kept
    for row, number in enumerate(kept.tolist()):
        for t in range(number):
            one = type(window)(*(a[row : row + 1, t : t + 1] for a in window))
            rows.keep(row, q[row : row + 1, t : t + 1], one, mixed[row : row + 1, t : t + 1])
    return cache, rows
