"""A part of an array that a kernel addresses by constants, without a slice or reshape of mlx.

mlx makes each of its operations anew in every step, which takes the host about as long as a launch.
"""

from __future__ import annotations

import itertools
import operator
from typing import NamedTuple

import mlx.core as mx


class View(NamedTuple):
    """Numbers of a row-contiguous array; strides and offset count numbers."""

    array: mx.array
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, source: Operand) -> View:
        """All of an array that a kernel takes as contiguous; a view as it is."""
        if isinstance(source, View):
            return source
        return cls(source, source.shape, _dense(source.shape))

    @property
    def dtype(self) -> mx.Dtype:
        return self.array.dtype

    def constants(self, name: str, first: int = 0) -> dict[str, int]:
        """NAME_AT, its offset; NAME_BY0 and so on, the strides from axis `first` on."""
        strides = {f"{name}_BY{i}": stride for i, stride in enumerate(self.strides[first:])}
        return {f"{name}_AT": self.offset, **strides}


Operand = mx.array | View


def column_view(
    x: mx.array, rows: tuple[int, ...], first: int, step: int, shape: tuple[int, ...]
) -> View:
    """[*rows, *shape] of x [.., W], i of the first axis of `shape` from `first + i * step` on."""
    inner = step, *_dense(shape[1:])
    return View(x, (*rows, *shape), (*(x.shape[-1] * n for n in _dense(rows)), *inner), first)


def made(source: Operand) -> mx.array:
    """As an array of mlx."""
    if isinstance(source, mx.array):
        return source
    return mx.as_strided(*source)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array."""
    return (*itertools.accumulate(shape[:0:-1], operator.mul, initial=1),)[::-1] if shape else ()
