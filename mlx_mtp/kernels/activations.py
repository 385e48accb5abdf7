"""Activation functions and softmax of float32 for a CPU.

mlx computes exponentials one by one there, in 12 ns each. These functions use only arithmetic,
which the C++ compiler that mlx runs vectorizes, and take 1 ns. Each is compiled in two parts,
because mlx does not fuse an expression this deep into one operation.
"""

import functools

import mlx.core as mx

_BEYOND = 20.0  # for larger |x| the sigmoid is taken as 0 or 1, an error of at most 2.1e-9
_FEW_SCORES = 2048  # with fewer, mlx's own softmax, a single operation, is faster

elementwise = functools.partial(mx.compile, shapeless=True)


def sigmoid_times(x: mx.array, factor: mx.array) -> mx.array:
    """Returns the sigmoid of x times `factor`, of the same shape.

    The sigmoid's absolute error is at most 4e-7; that of `mx.sigmoid` is 9e-8.
    """
    return _sigmoid_times(x, _root(x), factor)


def silu(x: mx.array) -> mx.array:
    """Returns x times its sigmoid."""
    return sigmoid_times(x, x)


def silu_times(gate: mx.array, x: mx.array) -> mx.array:
    """Returns silu of `gate`, times x."""
    return _silu_times(gate, _root(gate), x)


def softmax(x: mx.array) -> mx.array:
    """Returns the softmax over the last axis; a row may contain -inf, but not consist of it.

    The relative error of large weights is about 2e-6.
    """
    if x.size < _FEW_SCORES:
        return mx.softmax(x, axis=-1, precise=True)
    half = (x.max(axis=-1, keepdims=True) - x) * 0.5
    weights = _exp_minus_double(half, _root(half))
    return weights / weights.sum(axis=-1, keepdims=True)


@elementwise
def _root(x: mx.array) -> mx.array:
    """Returns exp(-x / 8) by its Padé approximant of order [3/3], for |x| up to `_BEYOND`."""
    square = mx.square(x)
    even, odd = 120 + square * (12 / 8**2), x * (60 / 8 + square * (1 / 8**3))
    return (even - odd) / (even + odd)


@elementwise
def _sigmoid_times(x: mx.array, root: mx.array, factor: mx.array) -> mx.array:
    return factor * _sigmoid(x, root)


@elementwise
def _silu_times(gate: mx.array, root: mx.array, x: mx.array) -> mx.array:
    # This product comes first because a deeper expression would take a third operation.
    return (gate * x) * _sigmoid(gate, root)


@elementwise
def _exp_minus_double(x: mx.array, root: mx.array) -> mx.array:
    eighth = mx.square(root)  # `root` is exp(-x / 8), so this is exp(-2x / 8).
    return mx.where(x > _BEYOND, 0.0, mx.square(mx.square(mx.square(eighth))))


def _sigmoid(x: mx.array, root: mx.array) -> mx.array:
    # `root` is exp(-x / 8).
    near = 1 / (1 + mx.square(mx.square(mx.square(root))))
    return mx.where(mx.abs(x) > _BEYOND, x > 0, near)  # A NaN is not beyond, and stays NaN.
