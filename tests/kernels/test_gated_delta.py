"""The recurrence and its fold: mlx-lm's loop, the chunkwise form and a NumPy loop agree."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.kernels import portable
from mlx_mtp.kernels.gated_delta import fold, run
from mlx_mtp.kernels.window import Window

TOLERANCE = 1e-5


def random_window(random, batch: int, length: int, hk: int, hv: int, dk=32, dv=8, decay=0.3):
    """Queries and a window, q and k of length one, as the model makes them."""

    def unit(*shape):
        x = random.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    arrays = (
        unit(batch, length, hk, dk),
        unit(batch, length, hk, dk),
        random.standard_normal((batch, length, hv, dv)),
        random.uniform(decay, 1.0, (batch, length, hv)),
        random.uniform(0.0, 1.0, (batch, length, hv)),
    )
    q, *window = (mx.array(a.astype(np.float32)) for a in arrays)
    return q, Window(*window)


def random_state(random, batch: int, hv: int, dk=32, dv=8):
    return mx.array(random.standard_normal((batch, hv, dv, dk)).astype(np.float32))


def written_out(q, window: Window, state, lengths=None):
    """Token by token in float64: S = g S; S += beta (v - S k) k^T; y = S q / sqrt(Dk)."""
    q, k, v, g, beta = (np.array(a, dtype=np.float64) for a in (q, *window))
    state = np.array(state, dtype=np.float64)
    batch, length, hv, _ = v.shape
    out = np.zeros(v.shape)
    for b in range(batch):
        for h in range(hv):
            kh = h // (hv // k.shape[2])
            for t in range(length if lengths is None else lengths[b]):
                s = state[b, h] * g[b, t, h]
                delta = (v[b, t, h] - s @ k[b, t, kh]) * beta[b, t, h]
                state[b, h] = s + np.outer(delta, k[b, t, kh])
                out[b, t, h] = state[b, h] @ q[b, t, kh] * q.shape[-1] ** -0.5
    return out, state


def replay(q, window: Window, state, previous: Window | None, num_kept):
    """The accepted prefix of the window before under a mask, then the window on top of it."""
    if previous is not None:
        _, state = portable.loop(previous.k, previous, state, num_kept)
    return portable.loop(q, window, state)[0], state


def close(ours, true, tolerance=TOLERANCE):
    np.testing.assert_allclose(np.array(ours), np.array(true), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("hk", "hv"), [(1, 1), (2, 2), (2, 4), (1, 4), (2, 6)])
@pytest.mark.parametrize("length", [1, 2, 4, 9, 63, 64, 65, 130])
def test_all_forms_equal_the_rule_written_out(length, hk, hv):
    random = np.random.default_rng(length)
    q, window = random_window(random, 2, length, hk, hv)
    state = random_state(random, 2, hv)
    expected, expected_state = written_out(q, window, state)
    for form in (portable.loop, portable.run):
        outputs, after, *_ = form(q, window, state)
        close(outputs, expected)
        close(after, expected_state)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    length=st.integers(1, 200),
    batch=st.integers(1, 3),
    decay=st.sampled_from([0.0, 1e-6, 0.5, 0.999]),
)
def test_prefill_of_ragged_lengths(seed, length, batch, decay):
    """What lies beyond a row's length changes nothing, whatever it is; 1e-4 is the promise."""
    random = np.random.default_rng(seed)
    q, window = random_window(random, batch, length, 2, 4, decay=decay)
    state = random_state(random, batch, 4)
    lengths = random.integers(0, length + 1, batch)
    outputs, after, _ = run(q, window, state, None, None, mx.array(lengths.astype(np.int32)))
    expected, expected_state = written_out(q, window, state, lengths)
    assert np.isfinite(np.array(outputs)).all()
    close(after, expected_state, 1e-4)
    for row, kept in enumerate(lengths):
        close(outputs[row, :kept], expected[row, :kept], 1e-4)


def test_decays_that_underflow_and_keys_that_repeat():
    """A power series of the triangular system, or quotients of decays, would overflow here."""
    random = np.random.default_rng(0)
    q, window = random_window(random, 1, 128, 1, 2)
    same = mx.broadcast_to(window.k[:, :1], window.k.shape)
    g = mx.where(mx.arange(128)[:, None] % 7 == 0, 0.0, window.g)
    harsh = window._replace(k=same, g=g, beta=mx.ones_like(window.beta))
    state = random_state(random, 1, 2)
    outputs, after, _ = portable.run(q, harsh, state)
    expected, expected_state = written_out(q, harsh, state)
    close(outputs, expected, 1e-4)
    close(after, expected_state, 1e-4)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(
        st.one_of(st.integers(1, 6), st.sampled_from([64, 130])), min_size=1, max_size=4
    ),
    batch=st.integers(1, 3),
)
def test_windows_with_rejected_tails_equal_the_replay_and_token_by_token(seed, lengths, batch):
    """A chain of windows of different lengths, each row keeping its own part, 0 included."""
    random = np.random.default_rng(seed)
    state = replayed = mx.zeros((batch, 4, 8, 32))
    single = [np.zeros((1, 4, 8, 32)) for _ in range(batch)]
    previous, pending, kept = None, None, None
    for length in lengths:
        q, window = random_window(random, batch, length, 2, 4)
        outputs, state, pending = run(q, window, state, pending, kept)
        true, replayed = replay(q, window, replayed, previous, kept)
        close(outputs, true)
        close(state, replayed)
        counts = random.integers(0, length + 1, batch)
        previous, kept = window, mx.array(counts.astype(np.int32))
        for row in range(batch):
            close(state[row], single[row][0])
            one = Window(*(a[row : row + 1] for a in window))
            y, single[row] = written_out(q[row : row + 1], one, single[row], counts[row : row + 1])
            close(outputs[row, : counts[row]], y[0, : counts[row]])
    folded = fold(pending, kept, state)
    for row in range(batch):
        close(folded[row], single[row][0])


def test_nothing_to_fold_leaves_the_state_itself():
    state = mx.ones((1, 2, 8, 32))
    assert fold(None, None, state) is state
