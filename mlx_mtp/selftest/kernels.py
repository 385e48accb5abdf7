"""The kernels against the portable code; without a GPU, the portable code against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import mlx.core as mx

from mlx_mtp.cache.specs import GatedDeltaSpec
from mlx_mtp.kernels import (
    chunkwise,
    gated_delta_kernel,
    gpu,
    inputs_kernel,
    reference,
    self_check,
)
from mlx_mtp.kernels.cases import Cases, Shape
from mlx_mtp.models.loaded import LoadedModel

TOLERANCE = 1e-4
"""Of results near 1, in float32's measure; the kernels' own check before first use has the same."""
_LENGTH = 90
"""Positions on which the portable code is checked: two chunks, the second one short."""
_ROWS = 3


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One comparison.

    Args:
        name: what was compared, with what.
        shape: whose, in words.
        dtype: of the activations.
        difference: the largest, in float32's measure; None if it could not be had.
        problem: why it could not; None if it was.
        applies: False where the kernel isn't made for this shape and portable code runs.
    """

    name: str
    shape: str
    dtype: str
    difference: float | None = None
    problem: str | None = None
    applies: bool = True

    @property
    def ok(self) -> bool:
        """Nothing is wrong here."""
        if not self.applies:
            return True
        # So that NaN is wrong too.
        return self.difference is not None and self.difference < TOLERANCE


def shapes_of(model: LoadedModel) -> dict[str, Shape]:
    """That of a model's GatedDeltaNet layers, if it has any."""
    specs = [spec for spec in model.layer_specs if isinstance(spec, GatedDeltaSpec)]
    return {"this model": specs[0].shape} if specs else {}


def check_kernels(shapes: Mapping[str, Shape]) -> list[KernelCheck]:
    """Compare at these shapes, by what they are called.

    On a GPU in float32 and bfloat16; portable code computes in float32 whatever it is given.
    """
    on_gpu = gpu.backend() is not None
    checks = _gpu if on_gpu else _cpu
    return [
        _measured(compare, KernelCheck(name, called, str(dtype).removeprefix("mlx.core.")), applies)
        for called, shape in shapes.items()
        for dtype in ((mx.float32, mx.bfloat16) if on_gpu else (mx.float32,))
        for name, compare, applies in checks(shape, dtype)
    ]


_Case = tuple[str, Callable[[], float], bool]


def _gpu(shape: Shape, dtype: mx.Dtype) -> Iterator[_Case]:
    by_head, size = shape[:4], shape.conv_size
    yield (
        "gated delta kernel / portable",
        lambda: self_check.gated_delta(gated_delta_kernel.run, by_head, dtype),
        shape.key_dim % gpu.LANES == 0,
    )
    yield (
        "inputs kernel / portable",
        lambda: self_check.inputs(inputs_kernel.prepare, by_head, size, dtype),
        shape.key_dim % gpu.LANES == 0 and shape.value_dim % gpu.LANES == 0,
    )


def _cpu(shape: Shape, _dtype: mx.Dtype) -> Iterator[_Case]:
    yield "chunkwise / mlx-lm's loop", lambda: _chunkwise(shape), True
    yield "fold / mlx-lm's loop", lambda: _fold(shape), True


def _measured(compare: Callable[[], float], check: KernelCheck, applies: bool) -> KernelCheck:
    name, shape, dtype = check.name, check.shape, check.dtype
    if not applies:
        return KernelCheck(name, shape, dtype, applies=False)
    try:
        return KernelCheck(name, shape, dtype, compare())
    except Exception as error:
        # A compiler's complaint may be pages long.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return KernelCheck(name, shape, dtype, problem=lines[0][:200])


def _chunkwise(shape: Shape) -> float:
    """Ragged lengths, the outputs of kept positions and the state after them."""
    cases = Cases(0, shape, mx.float32)
    q, window = cases.window(_ROWS, _LENGTH)
    state, lengths = cases.state(_ROWS), cases.counts(_ROWS, _LENGTH)
    y, after, _ = chunkwise.run(q, window.cut(lengths), state)
    true_y, true_after = reference.gated_delta(q, window, state, lengths)
    kept = (mx.arange(_LENGTH) < lengths[:, None])[..., None, None]
    return max(_largest(mx.where(kept, y - true_y, 0)), _largest(after - true_after))


def _fold(shape: Shape) -> float:
    """A verify window of which each row keeps its own part."""
    cases = Cases(1, shape, mx.float32)
    q, window = cases.window(_ROWS, 5)
    state, kept = cases.state(_ROWS), cases.counts(_ROWS, 5)
    _, _, pending = chunkwise.run(q, window, state, advance=False)
    folded = chunkwise.fold(pending, kept, state)
    return _largest(folded - reference.gated_delta(q, window, state, kept)[1])


def _largest(difference: mx.array) -> float:
    return float(mx.abs(difference.astype(mx.float32)).max())
