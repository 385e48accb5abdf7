"""Chooses the routes of a model's products by what is correct and fast on this machine.

The kernel is checked for each kind of layer (class, shapes, format) and each of its bands of rows:
it must agree with float32, give a row the same bits whatever the other rows are, and take at most
`WORTH` times as long as mlx's operation; on CUDA, small weights are not timed. The number of rows
from which expanding the weights is faster is measured too; small weights are expanded for every
prompt.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP, Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear

from mlx_mtp.kernels import cpu, gpu
from mlx_mtp.kernels.cuda import grouped_gemm
from mlx_mtp.kernels.formats import Format, Weight, weight_of
from mlx_mtp.kernels.topk import sorted_pairs
from mlx_mtp.models.gemm.routes import (
    BY_MLX,
    ROUTED,
    Routes,
    experts_in_order,
    mlx_class,
    parts_of,
    product,
    routes_of,
    set_routes,
    skinny_kernel,
    with_routes,
)
from mlx_mtp.models.gemm.stacks import PARTS, stack_weights, stacked_weight

logger = logging.getLogger(__name__)

WeightShapes = tuple[tuple[tuple[int, ...], Format], ...]  # shape of the codes, and format, of each
Kind = tuple[type[nn.Module], WeightShapes]

# Bytes of a layer's weights. Timing smaller ones would time the host, which takes 40 to 60 us for
# either form (H200); mlx's kernel takes the GPU 70 us for 512 outputs of 2,048 tokens.
SMALL = 1 << 20
# Maximum (token, expert) pairs of a prompt for the kernel with unquantized weights; more were not
# measured.
_MOST_PLAIN_PAIRS = 2048
_TIMED, _ROUNDS = 8, 5  # layers of a kind that are timed, and how often
# Numbers of rows to check beside the timed one, if the kernel serves them: two blocks, the second
# one partly filled; and the maximum of Metal's kernel for experts.
_COMPARED = 13, 64
NOT_HERE = "it does not run here: {}"
TOLERANCE = 0.02  # maximum error of bfloat16 results, relative to the largest result
_DOWN = ("down_proj",)
_EMBEDDINGS = nn.QuantizedEmbedding, nn.Embedding
_STORING = nn.QuantizedLinear, nn.Linear, *_EMBEDDINGS, QuantizedSwitchLinear, SwitchLinear

# Numbers of rows for which expansion is tried, in this order, until it is not faster.
_EXPANDED = (2048, 1024, 512, 256, gpu.MOST_ROWS + 1)
_FEWER = (gpu.MOST_ROWS, gpu.MOST_PROMPT_ROWS + 1)  # tried next for dense weights, not for experts
_MOST_OUTPUTS = 1 << 16  # of weights that are expanded; lm_head has more, and computes few rows
_CHOSEN = 8  # experts of each row, when expansion is timed
_EXPANSION_ROUNDS, _CALLS = 3, 4  # how often expansion is timed, and calls in each round


def choose_routes(model: nn.Module, dtype: mx.Dtype) -> bool:
    """Set the routes of all products of a model; returns whether any uses the kernel.

    On a GPU this also stacks weights (see `stacks`), as the kernel needs that of MLPs.
    """
    if gpu.backend() is not None:
        stack_weights(model, lambda weight: bool(skinny_kernel().applies(weight, dtype)))
    for module in model.modules():
        if "switch_mlp" in module:
            module.switch_mlp.top_k = module.top_k  # Its kernel is compiled for this number.
    used = False
    # Single weights first: an MLP is checked with the final routes of its down projection.
    kinds = kinds_of(model, dtype).items()
    for (_, shapes), modules in sorted(kinds, key=lambda kind: len(kind[0][1])):
        kernel, gaps = _kernel_rows(modules, dtype, shapes)
        for module in modules if kernel else ():
            used = True
            set_routes(module, Routes(kernel, gaps, prompt=_most_of_prompt(module)))
    for module in model.modules():
        if type(module) is Qwen3NextSparseMoeBlock:
            module.joins_shared = _joins(module, dtype)
    if gpu.backend() == "cuda":
        _choose_expansion(model, dtype)
    for name, module in model.named_modules() if gpu.backend() is None else ():
        if name.endswith("lm_head") and cpu.BlockedLinear.serves(module):
            module.__class__ = cpu.BlockedLinear
    return used


def kinds_of(model: nn.Module, dtype: mx.Dtype) -> dict[Kind, list[nn.Module]]:
    """Returns the layers that the kernel supports, by mlx's class, shapes and formats."""
    tied = not any(name.endswith("lm_head") for name, _ in model.named_modules())
    kinds: dict[Kind, list[nn.Module]] = {}
    for module in model.modules():
        kind = mlx_class(module)
        if (tied or kind not in _EMBEDDINGS) and kernel_bands(module, dtype):
            weights = map(weight_of, parts_of(module))
            shapes = tuple((weight.codes.shape, weight.form) for weight in weights)
            kinds.setdefault((kind, shapes), []).append(module)
    return kinds


def kernel_takes_all_weights(model: nn.Module, dtype: mx.Dtype) -> bool:
    """Returns whether the kernel supports all quantized weights of a model. No weight is read."""
    quantized = (nn.QuantizedLinear, QuantizedSwitchLinear)
    parts = (module for module in model.modules() if isinstance(module, quantized))
    return all(skinny_kernel().applies(weight_of(part), dtype) for part in parts)


def all_routable(model: nn.Module) -> bool:
    """Returns whether this module can route all layers that have quantized weights."""
    return all(mlx_class(module) in _STORING for module in model.modules() if "scales" in module)


def kernel_bands(module: nn.Module, dtype: mx.Dtype) -> dict[int, range]:
    """Returns the bands of token counts that the kernel supports, by the count to time each with.

    There are none if the kernel doesn't support one of the layer's weights, or if an MLP's are not
    stacked.
    """
    kind = mlx_class(module)
    if kind not in ROUTED or (kind is SwitchGLU and type(module.activation) is not SwiGLU):
        return {}
    parts = parts_of(module)
    if any(mlx_class(part) not in _STORING or "bias" in part for part in parts):
        return {}
    if len(parts) > 1 and stacked_weight(*(module[name] for name in PARTS)) is None:
        return {}
    weights = [weight_of(part) for part in parts]
    applies = all(skinny_kernel().applies(weight, dtype) for weight in weights)
    bands: dict[int, range] = skinny_kernel().bands(weights[0])
    return bands if applies else {}


def with_kernel(module: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """Returns a copy of a layer that runs the kernel for all supported token counts, unchecked."""
    bands = [*kernel_bands(module, dtype).values()]
    return with_routes(module, Routes(range(bands[0].start, bands[-1].stop)))


def problem(module: nn.Module, dtype: mx.Dtype) -> str | None:
    """Returns why a layer can't run the kernel for all supported token counts; None if it can."""
    bands = kernel_bands(module, dtype)
    problems = (_problem(module, dtype, band, rows) for rows, band in bands.items())
    return next((each for each in problems if each), None)


def _most_of_prompt(module: nn.Module) -> int:
    if mlx_class(module) is not SwitchGLU:
        return 0
    is_quantized = "scales" in module.gate_proj
    most: int = skinny_kernel().MOST_PAIRS if is_quantized else _MOST_PLAIN_PAIRS
    return most // _top_k(module)


def _top_k(module: nn.Module) -> int:
    return int(getattr(module, "top_k", 2))  # In a model `choose_routes` has set the block's.


def _kernel_rows(
    modules: Sequence[nn.Module], dtype: mx.Dtype, shapes: WeightShapes
) -> tuple[range, tuple[range, ...]]:
    """Returns the numbers of rows that the kernel serves in layers of a kind, and gaps in them."""
    first, served = modules[0], list[range]()
    for rows, band in kernel_bands(first, dtype).items():
        if type(first) is Qwen3NextMLP and not routes_of(first.down_proj).serves(rows):
            continue  # Through `down_proj` its rows would still depend on one another.
        fault, is_worth_it = _problem(first, dtype, band, rows), False
        if fault is None:
            try:
                is_worth_it = _is_worth_it(modules[:_TIMED], dtype, rows)
            except Exception as error:
                fault = NOT_HERE.format(error)
        layers = f"{shapes}, {band.start} rows and more"
        if fault is not None:
            logger.warning("The few-rows kernel is not used for %s: %s", layers, fault)
            gpu.refused.add("few_rows")
        elif not is_worth_it:
            logger.info("The few-rows kernel is not used for %s: mlx's is faster", layers)
        else:
            served.append(band)
    if not served:
        return range(0), ()
    pairs = itertools.pairwise(served)
    gaps = tuple(range(a.stop, b.start) for a, b in pairs if a.stop < b.start)
    return range(served[0].start, served[-1].stop), gaps


def inputs_of(
    module: nn.Module,
    rows: int,
    dtype: mx.Dtype,
    experts: Callable[[mx.array], mx.array] = lambda pair: pair,  # each pair's, by its number
) -> tuple[mx.array, ...]:
    """Returns random inputs [rows, K] of a layer, and for a mixture each row's experts."""
    weight = weight_of(parts_of(module)[0])
    x = mx.random.normal((rows, weight.inputs), key=mx.random.key(0)).astype(dtype)
    if mlx_class(module) is not SwitchGLU:
        return (x,)
    pairs = mx.arange(rows * _top_k(module))
    return x, (experts(pairs) % weight.codes.shape[0]).reshape(rows, -1)


def _problem(module: nn.Module, dtype: mx.Dtype, band: range, timed: int) -> str | None:
    """Returns why the kernel must not serve a layer: wrong results, or rows that affect others."""
    least, last = band.start, band.stop - 1
    sizes = sorted({max(least, min(rows, last)) for rows in (*_COMPARED, timed)})
    # The first expert gets more rows than a block, the others few, in no order.
    x, *rest = inputs_of(
        module, sizes[-1], dtype, lambda pair: mx.where(pair % 3 > 0, 0, -1 - pair)
    )
    try:
        # Four rows at a time: for more, mlx compiles another kernel, for up to half a minute.
        exact, inputs = in_float32(module), (x.astype(mx.float32), *rest)
        fours = [[each[at : at + 4] for each in inputs] for at in range(0, len(x), 4)]
        true = mx.concatenate([product(exact, *each) for each in fours])
        ours = with_routes(module, Routes(kernel=band))
        alone = product(ours, x[:least], *(each[:least] for each in rest))
        for rows in sizes:
            found = product(ours, x[:rows], *(each[:rows] for each in rest))
            error = mx.abs(found.astype(mx.float32) - true[:rows]).max()
            share = float(error / mx.abs(true[:rows]).max())
            if not share < TOLERANCE:
                return f"it is off by {share:.1e} at {rows} rows"
            if not mx.array_equal(found[:least], alone).item():
                return f"a row depends on the others at {rows} rows"
    except Exception as error:
        return NOT_HERE.format(error)
    return None


def _joins(block: nn.Module, dtype: mx.Dtype) -> bool:
    """Returns whether the kernel can run the shared expert among the others, with the same bits."""
    routed, shared = block.switch_mlp, block.shared_expert
    if not (routes_of(routed).serves(2) and routes_of(shared).serves(2)):
        return False
    together = [[each[name] for each in (routed, shared) for name in of] for of in (PARTS, _DOWN)]
    if any(stacked_weight(*layers) is None for layers in together):
        return False
    rows, last = min(routes_of(routed).kernel.stop - 1, _COMPARED[-1]) // 2 * 2, block.num_experts
    (x,) = inputs_of(shared, rows, dtype)
    chosen = mx.arange(rows * block.top_k).reshape(rows, -1) % last
    pairs = mx.pad(chosen, [(0, 0), (0, 1)], constant_values=last).flatten()
    fault = "it gives other results"
    try:
        joined = experts_in_order(routed, x, shared, sorted_pairs(pairs))
        # Two rows at a time: the shared expert's own routes may serve fewer rows.
        alone = mx.concatenate([shared(x[at : at + 2]) for at in range(0, rows, 2)])
        true = mx.concatenate([routed(x, chosen), alone[:, None]], axis=1)
        if mx.array_equal(joined.reshape(true.shape), true).item():
            return True
    except Exception as problem:
        fault = NOT_HERE.format(problem)
    logger.warning("The few-rows kernel is not used for shared experts: %s", fault)
    return False


def _is_worth_it(modules: Sequence[nn.Module], dtype: mx.Dtype, rows: int) -> bool:
    """Returns whether the kernel is fast enough for a number of rows, compared with mlx."""
    nbytes = sum(weight_of(part).codes.nbytes for part in parts_of(modules[0]))
    if gpu.backend() == "cuda" and nbytes < SMALL:
        return True
    times, inputs = [], inputs_of(modules[0], rows, dtype)
    for routes in (Routes(kernel=range(rows, rows + 1)), BY_MLX):
        layers = [with_routes(module, routes) for module in modules]
        # Compiled, as layers are: else only the host's time would be measured.
        launch = mx.compile(lambda *inputs: [product(layer, *inputs) for layer in layers])  # noqa: B023
        times.append(timed(lambda: launch(*inputs), _ROUNDS)[1])  # noqa: B023
    return bool(times[0] < times[1] * skinny_kernel().WORTH)


def in_float32(module: nn.Module) -> nn.Module:
    """Returns a copy of a layer with the same codes, which mlx multiplies and adds in float32."""
    twin = with_routes(module, BY_MLX)
    for name, value in module.items():
        if isinstance(value, nn.Module) and "weight" in value:
            twin[name] = in_float32(value)
        elif isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
            twin[name] = value.astype(mx.float32)
    return twin


def _choose_expansion(model: nn.Module, dtype: mx.Dtype) -> None:
    """Set, for each shape, the number of rows from which products expand their weights."""
    least: dict[tuple[Any, ...], float] = {}
    for module in model.modules():
        if not _can_expand(module):
            continue
        first = weight_of(parts_of(module)[0])
        kind = first.codes.shape, first.form, first.scales.dtype
        if kind not in least:
            with gpu.decode_pass(False):
                least[kind] = _least_rows(module, first, dtype)
        if least[kind] < float("inf"):
            set_routes(module, replace(routes_of(module), expand_from=least[kind]))


def _can_expand(module: nn.Module) -> bool:
    kind = mlx_class(module)
    if kind is nn.QuantizedLinear:
        return module.mode == "affine" and module.weight.shape[0] <= _MOST_OUTPUTS
    return (
        kind is SwitchGLU
        and len(routes_of(module).kernel) > 0
        and all(grouped_gemm.applies(weight_of(each)) for each in parts_of(module))
    )


def _least_rows(module: nn.Module, first: Weight, dtype: mx.Dtype) -> float:
    """Returns the least number of rows from which expansion is correct and faster.

    Small weights are not timed. Infinity: never.
    """
    least, is_dense = float("inf"), mlx_class(module) is nn.QuantizedLinear
    is_small = is_dense and first.codes.nbytes < SMALL
    tried = _EXPANDED + _FEWER * is_dense
    for rows in tried[-1:] if is_small else tried:
        inputs = [mx.random.normal((1, rows, first.inputs), key=mx.random.key(0)).astype(dtype)]
        if not is_dense:
            chosen = (1, rows, _CHOSEN)
            inputs.append(mx.random.randint(0, len(first.codes), chosen, key=mx.random.key(1)))
        expanding = with_routes(module, replace(routes_of(module), expand_from=rows))
        usual, seconds = timed(lambda: _in_turn(module, inputs))  # noqa: B023
        try:
            ours, faster = timed(lambda: _in_turn(expanding, inputs))  # noqa: B023
        except Exception as problem:
            message = "Weights of %s are not expanded, it does not run here: %s"
            logger.warning(message, first.codes.shape, problem)
            break
        true = usual.astype(mx.float32)
        error, largest = mx.abs(ours.astype(mx.float32) - true).max(), mx.abs(true).max()
        slower = faster >= seconds and not is_small
        if slower or not (error <= TOLERANCE * largest).item():
            break
        least = rows
    return least


def _in_turn(module: nn.Module, inputs: list[mx.array]) -> mx.array:
    """Returns the result of the last of several calls, each dependent on the one before it.

    A single call would mostly time its launch, and small independent calls would run in parallel.
    """
    x, *rest = inputs
    for _ in range(_CALLS - 1):
        (x,) = mx.depends([x], [module(x, *rest)])
    return module(x, *rest)


def timed(call: Callable[[], Any], rounds: int = _EXPANSION_ROUNDS) -> tuple[Any, float]:
    """Returns a call's evaluated result, and the least of the seconds of `rounds` more calls."""
    mx.eval(result := call())
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        mx.eval(call())
        times.append(time.perf_counter() - began)
    return result, min(times)
