"""Activation functions for the CPU, compared with float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.kernels import activations


@pytest.mark.parametrize("most", [1, 5, 20, 21, 1000])
def test_sigmoid(most):
    x, factor = mx.random.uniform(-most, most, (2, 64, 300))
    exact = 0.5 + 0.5 * np.tanh(np.array(x, np.float64) / 2)
    sigmoids = np.array(activations.sigmoid_times(x, mx.ones_like(x)), np.float64)
    assert np.abs(sigmoids - exact).max() < 5e-7
    for result, expected in (
        (activations.silu(x), exact * np.array(x)),
        (activations.silu_times(x, factor), exact * np.array(x) * np.array(factor)),
    ):
        assert np.allclose(np.array(result), expected, rtol=2e-6, atol=2e-6 * most)


def test_sigmoid_at_the_ends():
    x = mx.array([float("inf"), -float("inf"), 0.0, float("nan")])
    *ends, of_nan = activations.sigmoid_times(x, mx.ones_like(x)).tolist()
    assert ends == [1, 0, 0.5] and of_nan != of_nan
    assert mx.isnan(activations.silu(x))[3].item()


@pytest.mark.parametrize("length", [5, 3000])  # with one operation, and with exponentials
@pytest.mark.parametrize("spread", [0.1, 10, 300])
def test_softmax(length, spread):
    x = mx.random.normal((3, length)) * spread
    masked = mx.where(mx.random.uniform(shape=x.shape) < 0.5, x, -mx.inf)
    masked[:, 0] = x[:, 0]
    powers = np.exp(np.array(masked, np.float64) - np.array(masked.max(axis=-1, keepdims=True)))
    expected = powers / powers.sum(axis=-1, keepdims=True)
    assert np.abs(np.array(activations.softmax(masked)) - expected).max() < 5e-6 * expected.max()
