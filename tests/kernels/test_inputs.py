"""What goes into the recurrence, against the modules of mlx-lm that it stands for."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from mlx_mtp.kernels.inputs import prepare
from mlx_mtp.kernels.window import Convolution, Projected

HK, DK, DV, K = 2, 32, 16, 4


def normal(random, *shape):
    return mx.array(random.standard_normal(shape).astype(np.float32))


def projected(random, batch: int, length: int, ratio: int) -> Projected:
    keyed = [normal(random, batch, length, HK, DK) for _ in range(2)]
    gates = [normal(random, batch, length, HK, ratio) for _ in range(2)]
    return Projected(*keyed, normal(random, batch, length, HK, ratio, DV), *gates)


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 5, 70])
def test_equals_mlx_lms_modules(length, ratio):
    random = np.random.default_rng(length)
    heads, channels = HK * ratio, 2 * HK * DK + HK * ratio * DV
    conv1d = nn.Conv1d(channels, channels, K, groups=channels, bias=False)
    weights = Convolution(conv1d.weight, normal(random, heads), normal(random, heads))
    window = projected(random, 3, length, ratio)
    history = normal(random, 3, K - 1, channels)
    q, inner, conv_input = prepare(window, weights, history, None)

    mixed = mx.concatenate([t.reshape(3, length, -1) for t in window[:3]], axis=-1)
    np.testing.assert_array_equal(conv_input, mx.concatenate([history, mixed], axis=1))
    out = nn.silu(conv1d(conv_input))
    true_q, true_k, true_v = mx.split(out, [HK * DK, 2 * HK * DK], axis=-1)
    true_q, true_k = (t.reshape(3, length, HK, DK) for t in (true_q, true_k))
    # mlx-lm folds the output's scale into q; here the recurrence applies it.
    true_q, true_k = normalize_qk(true_q, true_k, inv_scale=DK**-0.5, eps=1e-6)
    a, b = (t.reshape(3, length, heads) for t in window[3:])
    expected = (
        (q * DK**-0.5, true_q),
        (inner.k, true_k),
        (inner.v, true_v.reshape(3, length, heads, DV)),
        (inner.g, compute_g(weights.log_decay, a, weights.dt_bias)),
        (inner.beta, mx.sigmoid(b)),
    )
    for ours, true in expected:
        np.testing.assert_allclose(np.array(ours), np.array(true), rtol=1e-5, atol=1e-6)


def test_a_history_of_another_window_counts_what_each_row_kept():
    random = np.random.default_rng(0)
    channels = 2 * HK * DK + HK * DV
    weights = Convolution(normal(random, channels, K, 1), normal(random, HK), normal(random, HK))
    first, second = projected(random, 3, 5, 1), projected(random, 3, 2, 1)
    _, _, conv_input = prepare(first, weights, normal(random, 3, K - 1, channels), None)
    kept = [0, 3, 5]
    together, inner, joined = prepare(second, weights, conv_input, mx.array(kept, dtype=mx.int32))
    for row, count in enumerate(kept):
        alone = Projected(*(t[row : row + 1] for t in second))
        history = conv_input[row : row + 1, count : count + K - 1]
        q, window, own = prepare(alone, weights, history, None)
        for batched, single in zip((together, *inner, joined), (q, *window, own), strict=True):
            np.testing.assert_allclose(np.array(batched[row]), np.array(single[0]), atol=1e-6)
