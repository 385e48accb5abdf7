"""What goes into the recurrence, against the modules of mlx-lm that it stands for."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from mlx_mtp.kernels.inputs import prepare
from mlx_mtp.kernels.self_check import Cases
from mlx_mtp.kernels.window import Projected, Shape

HK, DK, DV, K = 2, 32, 16, 4


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 5, 70])
def test_equals_mlx_lms_modules(length, ratio):
    cases = Cases(length, Shape(HK, DK, HK * ratio, DV), mx.float32)
    heads, channels = HK * ratio, cases.shape.channels
    weights, projected, history = (
        cases.convolution(),
        cases.projected(3, length),
        cases.history(3, 0),
    )
    q, inner, conv_input = prepare(projected, weights, history, None)

    conv1d = nn.Conv1d(channels, channels, K, groups=channels, bias=False)
    conv1d.weight = weights.weight
    mixed = mx.concatenate([t.reshape(3, length, -1) for t in projected[:3]], axis=-1)
    np.testing.assert_array_equal(conv_input, mx.concatenate([history, mixed], axis=1))
    true_q, true_k, true_v = mx.split(nn.silu(conv1d(conv_input)), [HK * DK, 2 * HK * DK], axis=-1)
    true_q, true_k = (t.reshape(3, length, HK, DK) for t in (true_q, true_k))
    # mlx-lm folds the output's scale into q; here the recurrence applies it.
    true_q, true_k = normalize_qk(true_q, true_k, inv_scale=DK**-0.5, eps=1e-6)
    a, b = (t.reshape(3, length, heads) for t in projected[3:])
    ours = (q * DK**-0.5, *inner)
    true_g = compute_g(weights.log_decay, a, weights.dt_bias)
    true = (true_q, true_k, true_v.reshape(3, length, heads, DV), true_g, mx.sigmoid(b))
    for left, right in zip(ours, true, strict=True):
        np.testing.assert_allclose(np.array(left), np.array(right), rtol=1e-5, atol=1e-6)


def test_a_history_of_another_window_counts_what_each_row_kept():
    cases = Cases(0, Shape(HK, DK, HK, DV), mx.float32)
    weights, second = cases.convolution(), cases.projected(3, 2)
    _, _, conv_input = prepare(cases.projected(3, 5), weights, cases.history(3, 0), None)
    kept = [0, 3, 5]
    together, inner, joined = prepare(second, weights, conv_input, mx.array(kept, dtype=mx.int32))
    for row, count in enumerate(kept):
        alone = Projected(*(t[row : row + 1] for t in second))
        history = conv_input[row : row + 1, count : count + K - 1]
        q, window, own = prepare(alone, weights, history, None)
        for batched, single in zip((together, *inner, joined), (q, *window, own), strict=True):
            np.testing.assert_allclose(np.array(batched[row]), np.array(single[0]), atol=1e-6)
