"""The time of the model's products by rows, and whether a row's bits depend on other rows."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_mtp.kernels.formats import Weight, weight_of
from mlx_mtp.kernels.topk import sorted_pairs
from mlx_mtp.models.gemm.measure import kernel_bands, problem, with_kernel
from mlx_mtp.models.gemm.routes import (
    BY_MLX,
    experts_in_order,
    product,
    routes_of,
    served,
    with_routes,
)
from mlx_mtp.models.model import LoadedModel, module_nbytes
from mlx_mtp.selftest.kernels import name_of
from mlx_mtp.selftest.timing import TimedLaunch, microseconds

ROWS = (1, 2, 4, 8, 16)
Timer = Callable[[TimedLaunch], float]


@dataclass(frozen=True, slots=True)
class Product:
    """One kind of product: a layer's time at each of `rows`, and the time to read its weights."""

    name: str
    layers: int
    routed: bool  # True for experts, which each row chooses for itself
    rows: Sequence[int]
    microseconds: list[float]
    nbytes: list[float]  # bytes of the weights that are read
    reading: list[float]  # microseconds to read them at the speed of mlx's own reduction
    independent: bool  # True if the first row has the same bits at each number of rows
    theirs: list[float]  # microseconds of mlx's own operation, if another is in use
    unused: list[float]  # microseconds of our kernel, if it is not used for some of these rows
    problem: str | None  # why our kernel can't be used


@dataclass
class _Timed:
    """A layer's product, numbers of rows, and the share of weights read for each number."""

    layer: nn.Module
    rows: Sequence[int]
    routed: bool = False
    run: Callable[[nn.Module, mx.array], mx.array] = product
    share: Callable[[int], float] = lambda _rows: 1.0


def _routed_experts(block: nn.Module, rows: Sequence[int]) -> _Timed:
    """The routed experts of a block, chosen at random for each row."""
    count = block.num_experts
    drawn = [mx.random.permutation(count, key=mx.random.key(row)) for row in range(rows[-1])]
    chosen = mx.stack(drawn)[:, : block.top_k]

    @functools.cache
    def ordered(tokens: int) -> mx.array:
        mx.eval(pairs := sorted_pairs(chosen[:tokens].flatten()))
        return pairs

    def run(layer: nn.Module, x: mx.array) -> mx.array:
        # If the shared expert is computed with the routed ones, a step's router sorts the pairs.
        if getattr(block, "joins_shared", False) and served(x, layer):
            pairs = experts_in_order(layer, x, None, ordered(len(x)))
            return pairs.reshape(len(x), block.top_k, -1)
        return layer(x, chosen[: len(x)])

    def share(tokens: int) -> float:
        return len(set(np.array(chosen[:tokens]).flat)) / count

    return _Timed(block.switch_mlp, rows, True, run, share)


def measure_products(
    model: LoadedModel,
    deadline: float,
    rows: Sequence[int] = ROWS,
    tokens: Sequence[int] = ROWS,
    timer: Timer = microseconds,
) -> list[Product]:
    """Measure each kind of product, the one with the most weights first, until the deadline.

    Args:
        model: the model, with weights on the device.
        deadline: a time of `time.perf_counter`; no kind is begun after it.
        rows: ascending numbers of rows to measure.
        tokens: the same for experts.
        timer: returns the microseconds of a launch.
    """
    kinds: dict[str, list[_Timed]] = {}
    for module in model.model.modules():
        if "switch_mlp" in module:  # a mixture of experts
            inner = _layer_name(module.switch_mlp)
            name = f"{module.top_k} of {module.num_experts} experts, {inner}"
            kinds.setdefault(name, []).append(_routed_experts(module, tokens))
        elif isinstance(module, nn.Linear | nn.QuantizedLinear) or module is model.output_layer:
            kinds.setdefault(_layer_name(module), []).append(_Timed(module, rows))
    products = []
    for name, layers in sorted(
        kinds.items(), key=lambda kind: -sum(module_nbytes(each.layer) for each in kind[1])
    ):
        if time.perf_counter() < deadline:
            products.append(_measured(name, layers, model.dtype, timer))
    return products


def _measured(name: str, layers: Sequence[_Timed], dtype: mx.Dtype, timer: Timer) -> Product:
    counts = layers[0].rows
    weights = [[array for _, array in tree_flatten(each.layer.parameters())] for each in layers]
    once = timer(lambda: [mx.max(array) for arrays in weights for array in arrays])
    most = mx.random.normal((counts[-1], _weight(layers[0].layer).inputs), key=mx.random.key(0))
    rows = [most[:count].astype(dtype) for count in counts]
    routes, own = routes_of(layers[0].layer), [each.layer for each in layers]
    times = _times(layers, rows, timer, own)
    first = [layers[0].run(own[0], x)[0] for x in rows]
    independent = all(mx.array_equal(first[0], other).item() for other in first[1:])
    theirs, unused, wrong = list[float](), list[float](), None
    if routes.kernel:
        theirs = _times(layers, rows, timer, [with_routes(layer, BY_MLX) for layer in own])
    made_for = kernel_bands(own[0], dtype).values()
    if any(n in band and not routes.serves(n) for n in counts for band in made_for):
        wrong = problem(own[0], dtype)
        if wrong is None:
            unused = _times(layers, rows, timer, [with_kernel(layer, dtype) for layer in own])
    shares = [*map(layers[0].share, counts)]
    return Product(
        name,
        len(layers),
        layers[0].routed,
        counts,
        times,
        [module_nbytes(layers[0].layer) * share for share in shares],
        [once / len(layers) * share for share in shares],
        independent,
        theirs,
        unused,
        wrong,
    )


def _times(
    layers: Sequence[_Timed], rows: Sequence[mx.array], timer: Timer, modules: Sequence[nn.Module]
) -> list[float]:
    """Microseconds of one layer, computed by `modules`, for each of `rows`."""
    runs = [(each.run, module) for each, module in zip(layers, modules, strict=True)]
    together = [timer(lambda x=x: [run(module, x) for run, module in runs]) for x in rows]  # type: ignore[misc]
    return [each / len(layers) for each in together]


def _weight(layer: nn.Module) -> Weight:
    return weight_of(layer.get("gate_proj", layer))


def _layer_name(layer: nn.Module) -> str:
    weight = _weight(layer)
    mode, bits, group_size = weight.form
    stored = {
        "affine": f"{bits} bit in groups of {group_size}",
        "plain": name_of(weight.codes.dtype),
    }
    return f"{weight.inputs} -> {weight.codes.shape[-2]}, {stored.get(mode, mode)}"
