"""Routes for exact mode: a row of a decode step has the same bits whatever the other rows are.

On CUDA the kernel that is chosen by time already guarantees this. On Metal only the kernel's sums
of lanes do, so they serve all numbers of rows. Products that no kernel serves are computed in
blocks of a fixed number of rows.
"""

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.row_check import ALONE, ROWS, same_rows
from mlx_mtp.models.gemm import measure
from mlx_mtp.models.gemm.measure import NOT_HERE, TOLERANCE, Kind, kinds_of, timed
from mlx_mtp.models.gemm.routes import (
    ROUTED,
    Routes,
    mlx_class,
    parts_of,
    product,
    routes_of,
    set_routes,
    with_routes,
)

logger = logging.getLogger(__name__)

EVERY = range(1, sys.maxsize)  # all numbers of rows
_ONE_ORDER = Routes(EVERY, one_order=True)
_TIMED, _ROUNDS = 8, 5  # layers of a kind that are timed, and how often


def make_batch_invariant(model: nn.Module, dtype: mx.Dtype) -> None:
    """Route all operations of a decode step so that a row's bits don't depend on other rows.

    On Metal the MTP head stays as it is: no answer depends on its bits.
    """
    where = gpu.backend()
    if where is None:
        return
    sound = set[int]()
    if where == "metal":
        faults = one_order_faults(model, dtype)
        kinds = kinds_of(model, dtype).items()
        sound = {id(module) for kind, all_of in kinds if kind not in faults for module in all_of}
    for module in _modules(model):
        kind, routes = mlx_class(module), routes_of(module)
        if hasattr(module, "batch_invariant"):  # attention
            module.batch_invariant = True
        _forget_traces(module)
        if kind not in ROUTED:
            continue
        if where == "metal":
            routes = _ONE_ORDER if id(module) in sound else Routes()
        elif kind is not SwitchGLU and "scales" not in parts_of(module)[0]:
            routes = replace(routes, kernel=range(0))  # Steps can have more rows than it serves.
        if routes.expand_from < math.inf:
            # A constant, not the measured number: prefixes on disk outlive a process.
            most = gpu.MOST_ROWS if kind is SwitchGLU else gpu.MOST_PROMPT_ROWS
            routes = replace(routes, expand_from=1 + most)
        set_routes(module, replace(routes, in_blocks=kind is not Qwen3NextMLP))


@contextlib.contextmanager
def batch_invariant(model: nn.Module, dtype: mx.Dtype) -> Iterator[None]:
    """Apply `make_batch_invariant` to a model within this context; restore its routes on exit."""
    before = [(module, routes_of(module)) for module in _modules(model)]
    make_batch_invariant(model, dtype)
    try:
        yield
    finally:
        for module, routes in before:
            vars(module).pop("batch_invariant", None)
            _forget_traces(module)
            if mlx_class(module) in ROUTED:
                set_routes(module, routes)


def _forget_traces(module: nn.Module) -> None:
    """Drop the compiled passes of a trunk or a head, which were traced with other routes."""
    for name in ("_spans", "_compiled"):
        vars(module).pop(name, None)


def one_order_faults(
    model: nn.Module, dtype: mx.Dtype, in_time: Callable[[], None] = lambda: None
) -> dict[Kind, str]:
    """Returns, for each kind of products that the kernel must not serve in one order, the reason.

    The kinds are checked at the first call. `in_time` is called before each check, and can end
    them with an exception.
    """
    known: dict[Kind, str] | None = vars(model).get("one_order_faults")
    if known is None:
        known = {}
        for kind, modules in kinds_of(model, dtype).items():
            in_time()
            if (fault := _one_order_fault(modules[0], dtype)) is not None:
                known[kind] = fault
                logger.warning("Products of %s are not exact by the kernel: %s", kind, fault)
        vars(model)["one_order_faults"] = known  # not an item, which would be a parameter
    return known


def _one_order_fault(module: nn.Module, dtype: mx.Dtype) -> str | None:
    inputs = measure.inputs_of(module, 2 * ROWS[-1], dtype)
    ours, few = _in_one_order(module), [each[:ALONE] for each in inputs]
    try:
        with gpu.decode_pass():
            true = product(measure.in_float32(module), few[0].astype(mx.float32), *few[1:])
            error = mx.abs(product(ours, *few).astype(mx.float32) - true).max()
            share = float(error / mx.abs(true).max())
            if not share < TOLERANCE:
                return f"it is off by {share:.1e}"
            if not same_rows(lambda rows: [product(ours, *(each[rows] for each in inputs))]):
                return "a row depends on the others"
    except Exception as problem:
        return NOT_HERE.format(problem)
    return None


def exact_cost(model: nn.Module, dtype: mx.Dtype, rows: int) -> tuple[float, float]:
    """Returns the seconds of a step's products for `rows` rows: in one order, and as routed now.

    The MTP head's products are left out.
    """
    head = {id(module) for module in _head_modules(model)}
    kinds = kinds_of(model, dtype)
    inside = {
        id(part)
        for (kind, _), modules in kinds.items()
        if kind is Qwen3NextMLP
        for module in modules
        for part in parts_of(module)
    }
    both = [0.0, 0.0]
    for modules in kinds.values():
        own = [each for each in modules if id(each) not in head | inside]
        if not own:
            continue
        inputs = measure.inputs_of(own[0], rows, dtype)
        for number, layers in enumerate(([*map(_in_one_order, own[:_TIMED])], own[:_TIMED])):
            with gpu.decode_pass():
                launch = mx.compile(lambda *x: [product(layer, *x) for layer in layers])  # noqa: B023
                seconds = timed(lambda: launch(*inputs), _ROUNDS)[1]  # noqa: B023
            both[number] += seconds * len(own) / len(layers)
    return both[0], both[1]


def _in_one_order(module: nn.Module) -> nn.Module:
    twin = with_routes(module, _ONE_ORDER)
    if mlx_class(module) is Qwen3NextMLP:
        twin["down_proj"] = _in_one_order(module.down_proj)
    return twin


def _head_modules(model: nn.Module) -> Sequence[Any]:
    head = model.get("mtp")
    return [] if head is None else head.modules()


def _modules(model: nn.Module) -> list[Any]:
    head = {id(each) for each in _head_modules(model)} if gpu.backend() == "metal" else set()
    return [module for module in model.modules() if id(module) not in head]
