"""Activation functions and softmax of float32 for a CPU.

There mlx computes exponentials one by one, in 12 ns each. These functions take only arithmetic,
which the C++ compiler that mlx runs vectorizes: 1 ns. They are compiled in two parts, as mlx does
not compile an expression this deep into one operation.
"""

import functools

import mlx.core as mx

_BEYOND = 20.0  # from here on the sigmoid is 1, or 0 if x is negative: it is within 2e-9 of these

_FEW_SCORES = 2048  # of a softmax that is faster in mlx's one operation

_elementwise = functools.partial(mx.compile, shapeless=True)


def sigmoid_times(x: mx.array, factor: mx.array) -> mx.array:
    """Returns the sigmoid of x times `factor`, of the same shape.

    The sigmoid's error is at most 4e-7; that of `mx.sigmoid` is 9e-8.
    """
    return _sigmoid_times(x, _root(x), factor)


def silu(x: mx.array) -> mx.array:
    """Returns x times its sigmoid."""
    return sigmoid_times(x, x)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Returns silu of `gate`, times x."""
    return _swiglu(gate, _root(gate), x)


def softmax(x: mx.array) -> mx.array:
    """Returns the softmax of the last axis, which may hold -inf, but not only -inf."""
    if x.size < _FEW_SCORES:
        return mx.softmax(x, axis=-1, precise=True)
    half = _half_below(x, x.max(axis=-1, keepdims=True))
    weights = _exp_minus_double(half, _root(half))
    return weights / weights.sum(axis=-1, keepdims=True)


@_elementwise
def _root(x: mx.array) -> mx.array:
    """Returns exp(-x / 8) by its Padé approximant of order [3/3], for |x| up to `_BEYOND`."""
    square = mx.square(x)
    even, odd = 120 + square * (12 / 8**2), x * (60 / 8 + square * (1 / 8**3))
    return (even - odd) / (even + odd)


@_elementwise
def _sigmoid_times(x: mx.array, root: mx.array, factor: mx.array) -> mx.array:
    return factor * _sigmoid(x, root)


@_elementwise
def _swiglu(gate: mx.array, root: mx.array, x: mx.array) -> mx.array:
    return (gate * x) * _sigmoid(gate, root)


@_elementwise
def _half_below(x: mx.array, highest: mx.array) -> mx.array:
    return (highest - x) * 0.5


@_elementwise
def _exp_minus_double(x: mx.array, root: mx.array) -> mx.array:
    eighth = mx.square(root)
    return mx.where(x > _BEYOND, 0.0, mx.square(mx.square(mx.square(eighth))))


def _sigmoid(x: mx.array, root: mx.array) -> mx.array:
    near = 1 / (1 + mx.square(mx.square(mx.square(root))))
    return mx.where(mx.abs(x) > _BEYOND, x > 0, near)  # A NaN stays one.
