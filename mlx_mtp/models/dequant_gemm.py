"""Quantized products of a prompt's many rows on CUDA, where expanding the weights pays.

mlx's quantized product takes as long for each further row; an expanded weight is read by the
library's own product, those of experts in `kernels.grouped`. From how many rows on that is faster
is measured when a model is loaded; small weights are expanded for every prompt.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_mtp.kernels.cuda import grouped_gemm
from mlx_mtp.kernels.cuda.dequantize import expanded
from mlx_mtp.kernels.formats import Weight, weight_of
from mlx_mtp.kernels.gpu import MOST_PROMPT_ROWS, MOST_ROWS, backend, step

logger = logging.getLogger(__name__)

_ROWS = (2048, 1024, 512, 256, MOST_ROWS + 1)  # that are tried, as long as ours is faster
_FEWER = (MOST_ROWS, MOST_PROMPT_ROWS + 1)  # then of dense weights; experts have a kernel for them
# Bytes of a layer's weights. Timing smaller ones would time the host: on an H200 it takes 40 to 60
# us for either form, and of 512 outputs of 2,048 tokens mlx's kernel takes the GPU 70.
SMALL = 1 << 20
_ROUNDS, _CALLS = 3, 4
_MOST_OUTPUTS = 1 << 16  # lm_head has more, and is asked for few rows
_CHOSEN = 8  # experts of each row
_TOLERANCE = 0.02  # of bfloat16 results, relative to the largest


class ExpandedLinear(nn.QuantizedLinear):
    """A product that expands its weights from `least_rows` rows on."""

    least_rows: float = float("inf")

    def __call__(self, x: mx.array) -> mx.array:
        if x.size // x.shape[-1] < self.least_rows:
            return super().__call__(x)
        weights = self.weight, self.scales, self.biases
        product = x @ expanded(*weights, self.group_size, self.bits).T
        return product + self.bias if "bias" in self else product


class GroupedExperts(SwitchGLU):
    """Experts that expand their weights in registers from `least_rows` tokens on."""

    least_rows: float = float("inf")

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) < self.least_rows:
            return super().__call__(x, indices)
        weights = list(map(weight_of, parts_of(self)))
        pairs = indices.reshape(-1).astype(mx.int32)
        return grouped_gemm.swiglu(rows, weights, pairs).reshape(*indices.shape, -1)


def use_many_rows(model: nn.Module, dtype: mx.Dtype) -> None:
    """Let products of many rows expand their weights, each shape from where it is faster."""
    if backend() != "cuda":
        return
    found: dict[tuple[Any, ...], float] = {}
    for module in model.modules():
        if type(module) is nn.QuantizedLinear and module.mode == "affine":
            module.__class__ = ExpandedLinear
        if not _expands(module):
            continue
        first = weight_of(parts_of(module)[0])
        kind = first.codes.shape, first.form, first.scales.dtype
        if kind not in found:
            with step(False):
                found[kind] = _least_rows(module, first, dtype)
        module.least_rows = found[kind]


def _expands(module: nn.Module) -> bool:
    if isinstance(module, ExpandedLinear):
        return module.mode == "affine" and module.weight.shape[0] <= _MOST_OUTPUTS
    return isinstance(module, GroupedExperts) and all(
        grouped_gemm.applies(weight_of(each)) for each in parts_of(module)
    )


def parts_of(module: nn.Module) -> list[nn.Module]:
    """What stores the weights: the module itself, or gate, up and down of an MLP or experts."""
    names = ("gate_proj", "up_proj", "down_proj")
    return [module] if "weight" in module else [module[name] for name in names]


def _least_rows(module: nn.Module, first: Weight, dtype: mx.Dtype) -> float:
    """From how many rows on a module is right so, and faster if not small; infinity: never."""
    least = float("inf")
    is_dense = isinstance(module, ExpandedLinear)
    is_small = is_dense and first.codes.nbytes < SMALL
    tried = _ROWS + _FEWER * is_dense
    for rows in tried[-1:] if is_small else tried:
        given = [mx.random.normal((1, rows, first.inputs), key=mx.random.key(0)).astype(dtype)]
        if isinstance(module, GroupedExperts):
            chosen = (1, rows, _CHOSEN)
            given.append(mx.random.randint(0, len(first.codes), chosen, key=mx.random.key(1)))
        module.least_rows = float("inf")
        usual, seconds = timed(lambda: _in_turn(module, given))  # noqa: B023
        module.least_rows = rows
        try:
            ours, faster = timed(lambda: _in_turn(module, given))  # noqa: B023
        except Exception as problem:
            told = "Weights of %s are not expanded, it does not run here: %s"
            logger.warning(told, first.codes.shape, problem)
            break
        wanted = usual.astype(mx.float32)
        error = mx.abs(ours.astype(mx.float32) - wanted).max()
        largest = mx.abs(wanted).max()
        slower = faster >= seconds and not is_small
        if slower or not (error <= _TOLERANCE * largest).item():
            break
        least = rows
    return least


def _in_turn(module: nn.Module, given: list[mx.array]) -> mx.array:
    """The last of several calls, each behind the one before it, as layers are.

    One alone would be mostly its launch, and small ones that can would run side by side.
    """
    x, *rest = given
    for _ in range(_CALLS - 1):
        (x,) = mx.depends([x], [module(x, *rest)])
    return module(x, *rest)


def timed(call: Callable[[], Any], rounds: int = _ROUNDS) -> tuple[Any, float]:
    """What a call returns, evaluated, and the fewest seconds that it took of some rounds."""
    mx.eval(result := call())
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        mx.eval(call())
        times.append(time.perf_counter() - began)
    return result, min(times)
