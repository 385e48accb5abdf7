"""The recurrence, its fold and its inputs: mlx-lm's modules, the portable code and NumPy agree."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from mlx_mtp.kernels import portable
from mlx_mtp.kernels.gdn_types import GDNShape, GDNWindow
from mlx_mtp.kernels.recurrence import fold, run_window
from mlx_mtp.kernels.self_check import RandomInputs
from mlx_mtp.kernels.short_conv import convolve
from mlx_mtp.kernels.view import to_arrays


def written_out(q, window: GDNWindow, state, lengths=None):
    """Compute in float64 by token: S = g S; S += beta (v - S k) k^T; y = S q / sqrt(Dk)."""
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


def close(ours, true, tolerance=1e-5):
    np.testing.assert_allclose(np.array(ours), np.array(true), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("hk", "hv"), [(2, 2), (1, 4), (2, 6)])
@pytest.mark.parametrize("length", [1, 4, 63, 64, 65, 130])
def test_all_forms_equal_the_rule_written_out(length, hk, hv):
    cases = RandomInputs(length, GDNShape(hk, 32, hv, 8), mx.float32)
    q, window = cases.window(2, length)
    state = cases.state(2)
    expected, expected_state = written_out(q, window, state)
    for form in (portable.loop, portable.run_chunked):
        outputs, after, *_ = form(q, window, state)
        close(outputs, expected)
        close(after, expected_state)


def test_decays_that_underflow_and_keys_that_repeat():
    """A power series of the triangular system, or quotients of decays, would overflow here."""
    cases = RandomInputs(0, GDNShape(1, 32, 2, 8), mx.float32)
    q, window = cases.window(1, 128)
    same = mx.broadcast_to(window.k[:, :1], window.k.shape)
    g = mx.where(mx.arange(128)[:, None] % 7 == 0, 0.0, window.g)
    harsh = window._replace(k=same, g=g, beta=mx.ones_like(window.beta))
    state = cases.state(1)
    outputs, after, _ = portable.run_chunked(q, harsh, state)
    expected, expected_state = written_out(q, harsh, state)
    close(outputs, expected, 1e-4)
    close(after, expected_state, 1e-4)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(
        st.one_of(st.integers(1, 6), st.sampled_from([64, 130])), min_size=1, max_size=4
    ),
    batch=st.integers(1, 3),
    known=st.booleans(),
    decay=st.sampled_from([0.0, 1e-6, 0.5, 1.0]),
)
def test_windows_with_rejected_tails_equal_token_by_token(seed, lengths, batch, known, decay):
    """Rows keep their own parts, or nothing, of windows in a chain; the last part can be known.

    Tokens beyond a row's part change nothing.
    """
    cases, random = (
        RandomInputs(seed, GDNShape(2, 32, 4, 8), mx.float32),
        np.random.default_rng(seed),
    )
    state, pending, kept = mx.zeros((batch, 4, 8, 32)), None, None
    single = np.zeros((batch, 4, 8, 32))
    for number, length in enumerate(lengths, 1):
        q, window = cases.window(batch, length)
        window = window._replace(g=window.g * decay)
        counts = random.integers(0, length + 1, batch)
        now = mx.array(counts.astype(np.int32))
        advance = known and number == len(lengths)
        outputs, state, pending = run_window(
            q, window, state, pending, kept, now if advance else None
        )
        kept = None if advance else now
        assert np.isfinite(np.array(outputs)).all()
        if not advance:
            close(state, single, 1e-4)
        expected, single = written_out(q, window, single, counts)
        for row, count in enumerate(counts):
            close(outputs[row, :count], expected[row, :count], 1e-4)
    close(fold(pending, kept, state), single, 1e-4)


HK, DK, DV, K = 2, 32, 16, 4


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 5, 70])
def test_equals_mlx_lms_modules(length, ratio):
    cases = RandomInputs(length, GDNShape(HK, DK, HK * ratio, DV), mx.float32)
    heads, channels = HK * ratio, cases.shape.channels
    weights, projected, history = (
        cases.convolution(),
        cases.projected(3, length),
        cases.history(3, 0),
    )
    q, inner, conv_input = convolve(projected, weights, history, None)

    conv1d = nn.Conv1d(channels, channels, K, groups=channels, bias=False)
    conv1d.weight = weights.weight
    mixed = mx.concatenate([t.reshape(3, length, -1) for t in to_arrays(projected)[:3]], axis=-1)
    np.testing.assert_array_equal(conv_input, mx.concatenate([history, mixed], axis=1))
    true_q, true_k, true_v = mx.split(nn.silu(conv1d(conv_input)), [HK * DK, 2 * HK * DK], axis=-1)
    true_q, true_k = (t.reshape(3, length, HK, DK) for t in (true_q, true_k))
    # mlx-lm folds the output's scale into q; here the recurrence applies it.
    true_q, true_k = normalize_qk(true_q, true_k, inv_scale=DK**-0.5, eps=1e-6)
    a, b = (t.reshape(3, length, heads) for t in to_arrays(projected)[3:])
    ours = (q * DK**-0.5, *inner)
    true_g = compute_g(weights.log_decay, a, weights.dt_bias)
    true = (true_q, true_k, true_v.reshape(3, length, heads, DV), true_g, mx.sigmoid(b))
    for left, right in zip(ours, true, strict=True):
        np.testing.assert_allclose(np.array(left), np.array(right), rtol=1e-5, atol=1e-6)
