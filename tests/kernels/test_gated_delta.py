"""The portable recurrence and fold against a NumPy loop, and against running token by token."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.kernels.gated_delta import Window, fold, fold_and_verify, gated_delta


def random_window(random, batch: int, length: int, hk: int, hv: int, dk=32, dv=8):
    """Queries and a window, keys of length one, as the model makes them."""

    def unit(*shape):
        x = random.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q = unit(batch, length, hk, dk) * dk**-0.5
    window = Window(
        *(
            mx.array(a.astype(np.float32))
            for a in (
                unit(batch, length, hk, dk),
                random.standard_normal((batch, length, hv, dv)),
                random.uniform(0.3, 1.0, (batch, length, hv)),
                random.uniform(0.0, 1.0, (batch, length, hv)),
            )
        )
    )
    return mx.array(q.astype(np.float32)), window


def reference(q, window: Window, state):
    """Token by token in float64: S = g S; S += beta (v - S k) k^T; y = S q."""
    q, k, v, g, beta = (np.array(a, dtype=np.float64) for a in (q, *window))
    state = np.array(state, dtype=np.float64)
    batch, length, hv, _ = v.shape
    out = np.zeros(v.shape)
    for b in range(batch):
        for h in range(hv):
            kh = h // (hv // k.shape[2])
            for t in range(length):
                s = state[b, h] * g[b, t, h]
                delta = (v[b, t, h] - s @ k[b, t, kh]) * beta[b, t, h]
                state[b, h] = s + np.outer(delta, k[b, t, kh])
                out[b, t, h] = state[b, h] @ q[b, t, kh]
    return out, state


@pytest.mark.parametrize(("hk", "hv"), [(1, 1), (2, 2), (2, 4), (1, 4)])
@pytest.mark.parametrize("length", [1, 2, 4, 9])
def test_equals_the_rule_written_out(length, hk, hv):
    random = np.random.default_rng(length)
    q, window = random_window(random, 2, length, hk, hv)
    state = mx.array(random.standard_normal((2, hv, 8, 32)).astype(np.float32))
    outputs, after = gated_delta(q, window, state)
    expected, expected_state = reference(q, window, state)
    np.testing.assert_allclose(np.array(outputs), expected, atol=1e-5)
    np.testing.assert_allclose(np.array(after), expected_state, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    batch=st.integers(1, 3),
)
def test_windows_with_rejected_tails_equal_token_by_token_bitwise(seed, lengths, batch):
    """A chain of windows of different lengths, each row keeping its own part, 0 included."""
    random = np.random.default_rng(seed)
    state = mx.zeros((batch, 4, 8, 32))
    single = [mx.zeros((1, 4, 8, 32)) for _ in range(batch)]
    previous, kept = None, None
    for length in lengths:
        q, window = random_window(random, batch, length, 2, 4)
        outputs, state = fold_and_verify(q, window, state, previous, kept)
        for row in range(batch):
            np.testing.assert_array_equal(np.array(state[row]), np.array(single[row][0]))
        counts = random.integers(0, length + 1, batch)
        previous, kept = window, mx.array(counts.astype(np.int32))
        for row in range(batch):
            for t in range(length):
                one = Window(*(a[row : row + 1, t : t + 1] for a in window))
                y, after = gated_delta(q[row : row + 1, t : t + 1], one, single[row])
                if t >= counts[row]:
                    break
                np.testing.assert_array_equal(np.array(outputs[row, t]), np.array(y[0, 0]))
                single[row] = after
    folded = fold(previous, kept, state)
    for row in range(batch):
        np.testing.assert_array_equal(np.array(folded[row]), np.array(single[row][0]))
