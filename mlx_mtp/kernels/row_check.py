"""Checks for each kernel that a row of a decode step has the same bits alone and among others.

The kernels are written to guarantee this; here it is tried with this machine's compiler and GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_mtp.kernels import gated_delta, gpu, norms, short_conv, topk
from mlx_mtp.kernels.cases import KernelCase
from mlx_mtp.kernels.gated_delta_step import GATED_DELTA_STEP
from mlx_mtp.kernels.gdn_types import GDNProjections, GDNShape, GDNWindow
from mlx_mtp.kernels.self_check import RandomInputs
from mlx_mtp.kernels.view import to_arrays

ROWS = (1, 2, 3, 4, 5, 8, 16, 33, 64)  # numbers of rows of the compared steps
ALONE = 8  # rows that are also computed alone
_WINDOW, _KEPT = 5, 3  # tokens of a window, and how many of them are kept


def row_problem(case: KernelCase) -> str | None:
    """Returns what is wrong with an operation of a decode step at a shape; None if nothing is.

    Either no kernel runs, or a row's bits depend on the other rows.
    """
    operation, shape, dtype = case
    if operation is GATED_DELTA_STEP:
        return None  # It has the bits of other kernels of this list, or is not used.
    if not operation.works(shape, dtype):
        return "no kernel is used"
    with gpu.decode_pass():
        if isinstance(operation, norms.FusedNorm):
            same = _norm(operation, shape, dtype)
        elif operation is topk.ROUTER:
            same = _router(shape, dtype)
        elif operation is short_conv.SHORT_CONV:
            same = _short_conv(shape, dtype)
        elif operation is gated_delta.GATED_DELTA:
            same = _gated_delta(shape, dtype)
        else:
            return None  # attention: `works` has compared it
    return None if same else "a row depends on the others"


def same_rows(run: Callable[[slice], Sequence[mx.array]]) -> bool:
    """Returns whether `run` gives a row the same bits for all `ROWS`, wherever the row is in them.

    `run` computes the rows of a slice of `2 * ROWS[-1]` rows; rows are the first axis of its
    results.
    """
    middle = range(ROWS[-1], ROWS[-1] + ALONE)
    alone = [run(slice(row, row + 1)) for row in middle]
    for number, rows in enumerate(ROWS):
        # In turns these rows are the first and the last ones.
        first = middle.start if number % 2 else middle.stop - rows
        found = run(slice(first, first + rows))
        for row, expected in zip(middle, alone):
            if first <= row < first + rows:
                among = [each[row - first] for each in found]
                if not _equal([each[0] for each in expected], among):
                    return False
    return True


def of_rows(arrays: Sequence[mx.array], alone: norms.Sizes, rows: slice) -> list[mx.array]:
    """Returns the parts of arrays that belong to `rows`; `alone` are their shapes for one row.

    An array with the same shape for any number of rows is returned as it is.
    """
    parts = []
    for array, one in zip(arrays, alone, strict=True):
        sizes = enumerate(zip(array.shape, one, strict=True))
        axis = next((axis for axis, (many, few) in sizes if many != few), None)
        if axis is not None:
            part = slice(one[axis] * rows.start, one[axis] * rows.stop)
            array = array[(slice(None),) * axis + (part,)]
        parts.append(array)
    return parts


def _norm(operation: norms.FusedNorm, shape: norms.NormShape, dtype: mx.Dtype) -> bool:
    most = 2 * ROWS[-1]
    _, *arrays = operation._random_arguments(shape, dtype, most)

    def run(rows: slice) -> Sequence[mx.array]:
        return operation.by_kernel(shape, *of_rows(arrays, operation.sizes(shape, 1)[0], rows))

    return same_rows(run)


def _router(router: topk.Router, dtype: mx.Dtype) -> bool:
    shapes = [(2 * ROWS[-1], columns) for columns in (router.experts, 1)]
    logits, gate = (mx.random.normal(s, key=mx.random.key(0)).astype(dtype) for s in shapes)

    def run(rows: slice) -> Sequence[mx.array]:
        choice = topk.run_kernel(logits[rows], gate[rows], router)
        return choice.experts, choice.weights

    return same_rows(run)


def _short_conv(shape: GDNShape, dtype: mx.Dtype) -> bool:
    """Compares each row's window with the row's tokens one by one."""
    inputs = RandomInputs(0, shape, dtype)
    projected, convolution = inputs.projected(ALONE, _WINDOW), inputs.convolution()
    history = inputs.history(ALONE, 0)

    def run(rows: slice, of: slice, before: mx.array, kept: mx.array | None) -> list[mx.array]:
        own = GDNProjections(*(each[rows, of] for each in to_arrays(projected)))
        q, window, after = short_conv.run_kernel(own, convolution, before, kept)
        return [*to_arrays([q, *window]), after]

    everything = run(slice(None), slice(None), history, None)
    for row in range(ALONE):
        own, before, kept = slice(row, row + 1), history[row : row + 1], None
        for t in range(_WINDOW):
            *found, before = run(own, slice(t, t + 1), before, kept)
            kept = mx.array([1], dtype=mx.int32)
            if not _equal([a[:, 0] for a in found], [a[own, t] for a in everything[:-1]]):
                return False
    return True


def _gated_delta(shape: GDNShape, dtype: mx.Dtype) -> bool:
    """Compares each row's two windows, the first partly kept, with the row's tokens one by one."""
    inputs = RandomInputs(0, shape, dtype)
    q, window = inputs.window(ALONE, _WINDOW + _KEPT)
    state, kept = inputs.state(ALONE), mx.full((ALONE,), _KEPT, dtype=mx.int32)

    def part(rows: slice, of: slice) -> tuple[mx.array, GDNWindow]:
        return q[rows, of], GDNWindow(*(each[rows, of] for each in to_arrays(window)))

    everyone, one = slice(None), mx.array([1], dtype=mx.int32)
    first, after, pending = gated_delta.run_kernel(
        *part(everyone, slice(_WINDOW)), state, None, None
    )
    # The second window begins with what followed the kept tokens.
    second, folded, _ = gated_delta.run_kernel(
        *part(everyone, slice(_KEPT, None)), after, pending, kept
    )
    for row in range(ALONE):
        own, current = slice(row, row + 1), state[row : row + 1]
        for t in range(_WINDOW):
            if t == _KEPT and not _equal([current], [folded[own]]):
                return False
            given = part(own, slice(t, t + 1))
            y, current, _ = gated_delta.run_kernel(*given, current, None, None, one)
            among = [first[own, t]] + ([second[own, t - _KEPT]] if t >= _KEPT else [])
            if not _equal([y[:, 0]] * len(among), among):
                return False
    return True


def _equal(found: Sequence[Any], true: Sequence[Any]) -> bool:
    return all(mx.array_equal(a, b).item() for a, b in zip(found, true, strict=True))
