"""Chooses the routes of a model's products, by what is right and fast on this machine.

A kernel is compared for each kind of layer (class, shapes, format) and each of its bands of rows:
it must agree with float32, give a row the same bits whatever is beside it, and must not be slower
than mlx's operation by more than a bound, for which small ones on CUDA are not timed. From how many
rows on expanding the weights is faster is measured too; small weights are expanded for every
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

logger = logging.getLogger(__name__)

WeightShapes = tuple[tuple[tuple[int, ...], Format], ...]  # shapes of codes
Kind = tuple[type[nn.Module], WeightShapes]

# Bytes of a layer's weights. Timing smaller ones would time the host: on an H200 it takes 40 to 60
# us for either form, and of 512 outputs of 2,048 tokens mlx's kernel takes the GPU 70.
SMALL = 1 << 20
# Pairs of token and expert of a prompt, if weights are not quantized: more are not measured.
_MOST_PLAIN_PAIRS = 2048
_TIMED, _ROUNDS = 8, 5  # layers of a shape, and how often
# Rows that are compared, beside those that are timed, as far as a kernel serves them: two blocks,
# the last of which is not full; and as many as Metal's experts serve at most.
_COMPARED = 13, 64
NOT_HERE = "it does not run here: {}"
TOLERANCE = 0.02  # of bfloat16 results, relative to the largest
_EMBEDDINGS = nn.QuantizedEmbedding, nn.Embedding
_STORING = nn.QuantizedLinear, nn.Linear, *_EMBEDDINGS, QuantizedSwitchLinear, SwitchLinear

# Rows that expansion is tried with, as long as it is faster.
_EXPANDED = (2048, 1024, 512, 256, gpu.MOST_ROWS + 1)
_FEWER = (gpu.MOST_ROWS, gpu.MOST_PROMPT_ROWS + 1)  # then of dense weights; experts have a kernel
_MOST_OUTPUTS = 1 << 16  # lm_head has more, and is asked for few rows
_CHOSEN = 8  # experts of each row
_EXPANSION_ROUNDS, _CALLS = 3, 4


def choose_routes(model: nn.Module, dtype: mx.Dtype) -> bool:
    """Set the routes of all products; whether any uses the kernel."""
    for module in model.modules():
        if "switch_mlp" in module:
            module.switch_mlp.top_k = module.top_k  # which its kernel is compiled for
    used = False
    # An MLP is compared with what its own last product will be.
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
    """The layers that the kernel is made for, by mlx's class, shapes and format."""
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
    """Whether the kernel is made for all quantized weights of a model. None is read."""
    quantized = (nn.QuantizedLinear, QuantizedSwitchLinear)
    parts = (module for module in model.modules() if isinstance(module, quantized))
    return all(skinny_kernel().applies(weight_of(part), dtype) for part in parts)


def all_routable(model: nn.Module) -> bool:
    """Whether all quantized weights are of layers whose operations this module chooses."""
    return all(mlx_class(module) in _STORING for module in model.modules() if "scales" in module)


def kernel_bands(module: nn.Module, dtype: mx.Dtype) -> dict[int, range]:
    """Numbers of tokens for which the kernel is made, each band by the number to time it with.

    None if it is not made for one of the layer's weights.
    """
    kind = mlx_class(module)
    if kind not in ROUTED or (kind is SwitchGLU and type(module.activation) is not SwiGLU):
        return {}
    parts = parts_of(module)
    if any(mlx_class(part) not in _STORING or "bias" in part for part in parts):
        return {}
    weights = [weight_of(part) for part in parts]
    applies = all(skinny_kernel().applies(weight, dtype) for weight in weights)
    is_one_format = len({weight.form for weight in weights[:2]}) == 1
    bands: dict[int, range] = skinny_kernel().bands(weights[0])
    return bands if applies and is_one_format else {}


def with_kernel(module: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """A copy of a layer that runs the kernel wherever that is made for, unchecked."""
    bands = [*kernel_bands(module, dtype).values()]
    return with_routes(module, Routes(range(bands[0].start, bands[-1].stop)))


def problem(module: nn.Module, dtype: mx.Dtype) -> str | None:
    """Why a layer can't run the kernel for all numbers of rows that it is made for."""
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
    return int(getattr(module, "top_k", 2))  # those of a model have their block's


def _kernel_rows(
    modules: Sequence[nn.Module], dtype: mx.Dtype, shapes: WeightShapes
) -> tuple[range, tuple[range, ...]]:
    """The numbers of rows that the kernel is to serve in layers of a kind, and gaps in them."""
    first, served = modules[0], list[range]()
    for rows, band in kernel_bands(first, dtype).items():
        if type(first) is Qwen3NextMLP and not routes_of(first.down_proj).serves(rows):
            continue  # Its rows would depend on one another all the same.
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
    experts: Callable[[mx.array], mx.array] = lambda pair: pair,  # of each pair, by its number
) -> tuple[mx.array, ...]:
    """Some rows, and of a mixture the experts of all of them."""
    weight = weight_of(parts_of(module)[0])
    x = mx.random.normal((rows, weight.inputs), key=mx.random.key(0)).astype(dtype)
    if mlx_class(module) is not SwitchGLU:
        return (x,)
    pairs = mx.arange(rows * _top_k(module))
    return x, (experts(pairs) % weight.codes.shape[0]).reshape(rows, -1)


def _problem(module: nn.Module, dtype: mx.Dtype, band: range, timed: int) -> str | None:
    """Why the kernel must not serve a layer: results are wrong, or a row's depend on others."""
    least, last = band.start, band.stop - 1
    sizes = sorted({max(least, min(rows, last)) for rows in (*_COMPARED, timed)})
    # The first expert has more rows than a block, others few, and they are in no order.
    x, *rest = inputs_of(
        module, sizes[-1], dtype, lambda pair: mx.where(pair % 3 > 0, 0, -1 - pair)
    )
    try:
        # For more rows mlx compiles another kernel, which may take it half a minute a format.
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
    """Whether a mixture's shared expert is computed with the others: it must give the same."""
    routed, shared = block.switch_mlp, block.shared_expert
    if not (routes_of(routed).serves(2) and routes_of(shared).serves(2)):
        return False
    both = ([weight_of(part) for part in parts_of(each)] for each in (routed, shared))
    if any(a.form != b.form or a.codes.shape[1:] != b.codes.shape for a, b in zip(*both)):
        return False
    rows, last = min(routes_of(routed).kernel.stop - 1, _COMPARED[-1]) // 2 * 2, block.num_experts
    (x,) = inputs_of(shared, rows, dtype)
    chosen = mx.arange(rows * block.top_k).reshape(rows, -1) % last
    pairs = mx.pad(chosen, [(0, 0), (0, 1)], constant_values=last).flatten().astype(mx.int32)
    order = mx.argsort(pairs).astype(mx.int32)
    fault = "it gives other results"
    try:
        together = experts_in_order(routed, x, shared, pairs[order], order)
        # By itself it may serve fewer rows than with the others.
        alone = mx.concatenate([shared(x[at : at + 2]) for at in range(0, rows, 2)])
        true = mx.concatenate([routed(x, chosen), alone[:, None]], axis=1)
        if mx.array_equal(together.reshape(true.shape), true).item():
            return True
    except Exception as problem:
        fault = NOT_HERE.format(problem)
    logger.warning("The few-rows kernel is not used for shared experts: %s", fault)
    return False


def _is_worth_it(modules: Sequence[nn.Module], dtype: mx.Dtype, rows: int) -> bool:
    """Whether the kernel is fast enough for a number of rows, beside mlx's operations."""
    nbytes = sum(weight_of(part).codes.nbytes for part in parts_of(modules[0]))
    if gpu.backend() == "cuda" and nbytes < SMALL:
        return True
    times, inputs = [], inputs_of(modules[0], rows, dtype)
    for routes in (Routes(kernel=range(rows, rows + 1)), BY_MLX):
        layers = [with_routes(module, routes) for module in modules]
        # As layers are: else the host's time would be all that is seen.
        launch = mx.compile(lambda *inputs: [product(layer, *inputs) for layer in layers])  # noqa: B023
        times.append(timed(lambda: launch(*inputs), _ROUNDS)[1])  # noqa: B023
    return bool(times[0] < times[1] * skinny_kernel().WORTH)


def in_float32(module: nn.Module) -> nn.Module:
    """A layer of the same codes that mlx multiplies and adds in float32."""
    twin = with_routes(module, BY_MLX)
    for name, value in module.items():
        if isinstance(value, nn.Module) and "weight" in value:
            twin[name] = in_float32(value)
        elif isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
            twin[name] = value.astype(mx.float32)
    return twin


def _choose_expansion(model: nn.Module, dtype: mx.Dtype) -> None:
    """Let products of many rows expand their weights, each shape from where it is faster."""
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
    """From how many rows on expansion is right, and faster if not small; infinity: never."""
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
    """The last of several calls, each behind the one before it, as layers are.

    One alone would be mostly its launch, and small ones that can would run side by side.
    """
    x, *rest = inputs
    for _ in range(_CALLS - 1):
        (x,) = mx.depends([x], [module(x, *rest)])
    return module(x, *rest)


def timed(call: Callable[[], Any], rounds: int = _EXPANSION_ROUNDS) -> tuple[Any, float]:
    """What a call returns, evaluated, and the fewest seconds that it took in some rounds."""
    mx.eval(result := call())
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        mx.eval(call())
        times.append(time.perf_counter() - began)
    return result, min(times)
