"""Compares a kernel with the portable code, in float32 on the CPU, on small random cases.

Each function returns the largest difference, in float32's measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_mtp.kernels import chunkwise, portable_inputs
from mlx_mtp.kernels.cases import Cases, Shape
from mlx_mtp.kernels.window import Pending, Window

Prepare = Callable[..., tuple[mx.array, Window, mx.array]]
# Half a unit in the last place of results near 1, over that of float32.
_COARSER = {mx.float32: 1, mx.float16: 1 << 13, mx.bfloat16: 1 << 16}


def gated_delta(
    run: Callable[..., tuple[mx.array, mx.array, mx.array]],
    shape: tuple[int, int, int, int],
    dtype: mx.Dtype,
) -> float:
    """Run two windows through `gated_delta_kernel.run`, the second on top of a part of the first.

    Args:
        run: the kernel.
        shape: Hk, Dk, Hv, Dv.
        dtype: of q, k, v and beta.
    """
    cases = Cases(0, Shape(*shape), dtype)
    (first_q, first), (q, second) = cases.window(2, 2), cases.window(2, 3)
    state = cases.state(2)
    kept = mx.array([1, 2], dtype=mx.int32)
    mx.eval(first_q, first, q, second, state, kept)

    _, folded, delta = run(first_q, first, state, None, None)
    pending = Pending(first.k, delta, first.g)
    y, folded, delta = run(q, second, folded, pending, kept)
    _, advanced, _ = run(q, second, state, pending, kept, kept)
    mx.eval(y, folded, delta, advanced)
    with mx.stream(mx.cpu):
        _, _, true_pending = chunkwise.run(first_q, first, state)
        true_folded = chunkwise.fold(true_pending, kept, state)
        true_y, _, true_after = chunkwise.run(q, second, true_folded)
        _, true_advanced, _ = chunkwise.run(q, second.cut(kept), true_folded)
    true = [true_y, true_folded, true_after.delta, true_advanced]
    return _difference([y, folded, delta, advanced], true)


def inputs(prepare: Prepare, shape: tuple[int, int, int, int], size: int, dtype: mx.Dtype) -> float:
    """Run two windows through `inputs_kernel.prepare`, the second on top of a part of the first.

    Args:
        prepare: the kernel.
        shape: Hk, Dk, Hv, Dv.
        size: K of the convolution.
        dtype: of the projections.
    """
    cases = Cases(0, Shape(*shape, size), dtype)
    convolution = cases.convolution()
    first, second = cases.projected(2, 2), cases.projected(2, 3)
    history = cases.history(2, 0)
    kept = mx.array([1, 2], dtype=mx.int32)
    mx.eval(convolution, first, second, history, kept)

    def both(run: Prepare) -> list[mx.array]:
        _, _, conv_input = run(first, convolution, history, None)
        q, window, conv_input = run(second, convolution, conv_input, kept)
        return [q, *window, conv_input]

    ours = both(prepare)
    mx.eval(ours)
    with mx.stream(mx.cpu):
        return _difference(ours, both(portable_inputs.prepare))


def _difference(ours: Sequence[mx.array], true: Sequence[mx.array]) -> float:
    # A few units in the last place of a coarse type are no error. NumPy's maximum keeps a NaN.
    found = [
        float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max()) / _COARSER[a.dtype]
        for a, b in zip(ours, true, strict=True)
    ]
    return float(np.max(found))
