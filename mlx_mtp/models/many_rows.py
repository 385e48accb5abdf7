"""Quantized products of a prompt's many rows on CUDA, where expanding the weights first pays.

mlx's quantized product takes as long for each further row; an expanded weight is read by the
library's own product. From how many rows on that is faster is measured when a model is loaded.
"""

import time
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.kernels.gpu import backend

_ROWS = (2048, 1024, 512, 256, 128)  # that are tried, as long as expanding is faster
_ROUNDS = 3
_MOST_OUTPUTS = 1 << 16  # lm_head has more, and is asked for few rows
_TOLERANCE = 0.02  # of bfloat16 results, relative to the largest

Shape = tuple[tuple[int, ...], int, int, str]


class ExpandedLinear(nn.QuantizedLinear):
    """A product that expands its weights from `least_rows` rows on."""

    least_rows: float = float("inf")

    def __call__(self, x: mx.array) -> mx.array:
        if x.size // x.shape[-1] < self.least_rows:
            return super().__call__(x)
        weights = self.weight, self.scales, self.biases
        full = mx.dequantize(*weights, self.group_size, self.bits, self.mode, dtype=x.dtype)
        product = x @ full.T
        return product + self.bias if "bias" in self else product


def use_expanded(model: nn.Module, dtype: mx.Dtype) -> None:
    """Let products of many rows expand their weights, each shape from where it is faster."""
    if backend() != "cuda":
        return
    found: dict[Shape, float] = {}
    for module in model.modules():
        if type(module) is nn.QuantizedLinear and module.mode == "affine":
            module.__class__ = ExpandedLinear
        if not isinstance(module, ExpandedLinear) or module.weight.shape[0] > _MOST_OUTPUTS:
            continue
        shape = tuple(module.weight.shape), module.bits, module.group_size, str(module.scales.dtype)
        if shape not in found:
            found[shape] = _least_rows(module, dtype)
        module.least_rows = found[shape]


def _least_rows(module: ExpandedLinear, dtype: mx.Dtype) -> float:
    width, least = module.scales.shape[-1] * module.group_size, float("inf")
    for rows in _ROWS:
        x = mx.random.normal((1, rows, width), key=mx.random.key(0)).astype(dtype)
        module.least_rows = float("inf")
        usual, seconds = _timed(lambda: module(x))  # noqa: B023
        module.least_rows = rows
        ours, faster = _timed(lambda: module(x))  # noqa: B023
        error = mx.abs(ours.astype(mx.float32) - usual.astype(mx.float32)).max()
        largest = mx.abs(usual.astype(mx.float32)).max()
        if faster >= seconds or not (error <= _TOLERANCE * largest).item():
            break
        least = rows
    return least


def _timed(call: Callable[[], mx.array]) -> tuple[mx.array, float]:
    result = call()
    mx.eval(result)
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        mx.eval(call())
        times.append(time.perf_counter() - began)
    return result, min(times)
