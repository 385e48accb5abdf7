"""Parts of an array that a kernel addresses by constants, without a slice or reshape of mlx.

mlx builds a slice or reshape anew in every step, which costs the host about as much as a launch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import NamedTuple

import mlx.core as mx


class View(NamedTuple):
    """Elements of a row-contiguous array; strides and offset count elements."""

    array: mx.array
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, source: Operand) -> View:
        """Returns the given view, or one of a whole array, which a kernel takes as contiguous."""
        if isinstance(source, View):
            return source
        return cls(source, source.shape, dense(source.shape))

    @property
    def dtype(self) -> mx.Dtype:
        return self.array.dtype

    def constants(self, name: str, first: int = 0) -> dict[str, int]:
        """Returns NAME_AT, the offset, and NAME_BY0 and so on, the strides from axis `first` on."""
        strides = {f"{name}_BY{i}": stride for i, stride in enumerate(self.strides[first:])}
        return {f"{name}_AT": self.offset, **strides}


Operand = mx.array | View


def column_view(
    x: Operand, rows: tuple[int, ...], first: int, step: int, shape: tuple[int, ...]
) -> View:
    """Returns columns of x [.., W] as [*rows, *shape].

    Item i of the first axis of `shape` begins at column `first + i * step`.
    """
    array, _, strides, offset = View.of(x)
    outer = (strides[-2] * n for n in dense(rows))
    return View(array, (*rows, *shape), (*outer, step, *dense(shape[1:])), offset + first)


def to_array(source: Operand) -> mx.array:
    """Returns the operand as an mlx array."""
    if isinstance(source, mx.array):
        return source
    return mx.as_strided(*source)


def to_arrays(sources: Iterable[Operand]) -> list[mx.array]:
    """Returns the operands as mlx arrays."""
    return [to_array(each) for each in sources]


def arrays_and_constants(
    names: Iterable[str], operands: Iterable[Operand]
) -> tuple[list[mx.array], dict[str, int]]:
    """Returns the arrays of operands [B, T, ..], and the constants of their views.

    NAME_BY0 is the stride of T: to a kernel, token t of row b is number b * T + t.
    """
    views, constants = [View.of(each) for each in operands], dict[str, int]()
    for name, view in zip(names, views, strict=True):
        constants |= view.constants(name.upper(), first=1)
    return [view.array for view in views], constants


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous array."""
    return (*itertools.accumulate(shape[:0:-1], operator.mul, initial=1),)[::-1] if shape else ()
