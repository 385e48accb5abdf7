"""Layers whose products of few rows, those of a decode step, run a kernel of ours.

That is `kernels.few_rows` on CUDA and `kernels.few_rows_metal` on Metal. `use_few_rows` decides
when a model is loaded, for each kind of layer (class, shapes, format) and each of the kernel's
bands of rows: the kernel must agree with float32, and must not be slower than mlx's operation by
more than a bound, for which small ones on CUDA are not timed. Where it is used the module has a
class of `REPLACED`; elsewhere it keeps mlx-lm's.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP, Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear

from mlx_mtp.kernels import gpu, skinny_gemm
from mlx_mtp.kernels.formats import Format, weight_of
from mlx_mtp.models.dequant_gemm import (
    SMALL,
    ExpandedLinear,
    GroupedExperts,
    parts_of,
    timed,
    use_many_rows,
)

logger = logging.getLogger(__name__)

Stored = tuple[tuple[tuple[int, ...], Format], ...]  # shapes of codes

# Pairs of token and expert of a prompt, if weights are not quantized: more are not measured.
_MOST_PLAIN_PAIRS = 2048
_TIMED, _ROUNDS = 8, 5  # layers of a shape, and how often
# Rows that are compared, beside those that are timed, as far as a kernel serves them: two blocks,
# the last of which is not full; and as many as Metal's experts serve at most.
_COMPARED = 13, 64
_NOT_HERE = "it does not run here: {}"
_TOLERANCE = 0.02  # of bfloat16 results, relative to the largest


def _by_kernel(name: str, base: type[Any]) -> type[Any]:
    """A subclass whose product runs the kernel for the numbers of rows that it has in `served`."""
    method = "as_linear" if hasattr(base, "as_linear") else "__call__"
    usual = getattr(base, method)

    def call(self: nn.Module, x: mx.array) -> Any:
        return project(x, self)[0] if served(x, self) else usual(self, x)

    return type(name, (base,), {method: call})


FewRowsLinear = _by_kernel("FewRowsLinear", ExpandedLinear)
FewRowsPlainLinear = _by_kernel("FewRowsPlainLinear", nn.Linear)  # not quantized
# An embedding that is lm_head too; as an embedding it is mlx's.
FewRowsEmbedding = _by_kernel("FewRowsEmbedding", nn.QuantizedEmbedding)
FewRowsPlainEmbedding = _by_kernel("FewRowsPlainEmbedding", nn.Embedding)


class FewRowsMLP(Qwen3NextMLP):
    """An MLP whose gate, up and activation are one launch."""

    def __call__(self, x: mx.array) -> mx.array:
        if not served(x, self):
            return super().__call__(x)
        inner = skinny_gemm.gate_and_up(_rows(x), *map(weight_of, (self.gate_proj, self.up_proj)))
        return self.down_proj(inner if x.ndim == 2 else inner.reshape(*x.shape[:-1], -1))


class FewRowsExperts(GroupedExperts):
    """Experts, each of which is read once for several of its tokens."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        most = skinny_gemm.kernel().MOST_PAIRS if "scales" in self.gate_proj else _MOST_PLAIN_PAIRS
        expands = x.size // x.shape[-1] >= self.least_rows
        if not (served(x, self) or (0 < indices.size <= most and not expands)):
            return super().__call__(x, indices)
        pairs = indices.reshape(-1).astype(mx.int32)
        order = mx.argsort(pairs).astype(mx.int32)
        return self.ordered(x, None, pairs[order], order).reshape(*indices.shape, -1)

    def ordered(
        self, x: mx.array, shared: nn.Module | None, chosen: mx.array, order: mx.array
    ) -> mx.array:
        """[P, H] of P pairs in this order (see `kernels.router.Routes`), with a shared expert."""

        def product(x: mx.array, *names: str) -> mx.array:
            ours = [weight_of(self[name]) for name in names]
            theirs = [] if shared is None else [weight_of(shared[name]) for name in names]
            found: mx.array = skinny_gemm.experts(x, ours, theirs, chosen, order)
            return found

        return product(product(_rows(x), "gate_proj", "up_proj"), "down_proj")


class FewRowsMixture(Qwen3NextSparseMoeBlock):
    """A mixture whose shared expert is computed with the others."""


# What each takes the place of.
REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    FewRowsLinear: nn.QuantizedLinear,
    FewRowsPlainLinear: nn.Linear,
    FewRowsEmbedding: nn.QuantizedEmbedding,
    FewRowsPlainEmbedding: nn.Embedding,
    FewRowsMLP: Qwen3NextMLP,
    FewRowsExperts: SwitchGLU,
}
_OURS = {theirs: ours for ours, theirs in REPLACED.items()}
_SINGLE = FewRowsLinear, FewRowsPlainLinear, FewRowsEmbedding, FewRowsPlainEmbedding
_EMBEDDINGS = nn.QuantizedEmbedding, nn.Embedding
_STORING = nn.QuantizedLinear, nn.Linear, *_EMBEDDINGS, QuantizedSwitchLinear, SwitchLinear


def project(x: mx.array, *layers: nn.Module) -> list[mx.array]:
    """Several products of one input, in one launch where the kernel serves all of them."""
    forms = {weight_of(layer).form if type(layer) in _SINGLE else None for layer in layers}
    if len(forms) > 1 or None in forms or not all(served(x, layer) for layer in layers):
        return [layer(x) for layer in layers]
    found = skinny_gemm.products(_rows(x), [weight_of(layer) for layer in layers])
    return found if x.ndim == 2 else [each.reshape(*x.shape[:-1], -1) for each in found]


def use_few_rows(model: nn.Module, dtype: mx.Dtype) -> bool:
    """Let products use a kernel, each shape where it agrees with mlx; whether any does."""
    for module in model.modules():
        if "switch_mlp" in module:
            module.switch_mlp.top_k = module.top_k  # which its kernel is compiled for
    tied = not any(name.endswith("lm_head") for name, _ in model.named_modules())
    kinds: dict[tuple[type[nn.Module], Stored], list[nn.Module]] = {}
    for module in model.modules():
        if (tied or type(module) not in _EMBEDDINGS) and (ours := _class_for(module, dtype)):
            weights = map(weight_of, parts_of(module))
            stored = tuple((weight.codes.shape, weight.form) for weight in weights)
            kinds.setdefault((ours, stored), []).append(module)
    used = False
    # An MLP is compared with what its own last product will be.
    for (ours, stored), modules in sorted(kinds.items(), key=lambda kind: len(kind[0][1])):
        first, found = modules[0], range(0)
        for rows, band in _bands(first).items():
            if ours is FewRowsMLP and rows not in first.down_proj.served:
                continue  # Its rows would depend on one another all the same.
            what = f"{stored}, {band.start} rows and more"
            problem, is_worth_it = _problem(first, ours, dtype, band, rows), False
            if problem is None:
                try:
                    is_worth_it = _is_worth_it(modules[:_TIMED], ours, dtype, rows)
                except Exception as fault:
                    problem = _NOT_HERE.format(fault)
            if problem is not None:
                logger.warning("The few-rows kernel is not used for %s: %s", what, problem)
                gpu.refused.add("few_rows")
            elif not is_worth_it:
                logger.info("The few-rows kernel is not used for %s: mlx's is faster", what)
            else:
                found = range(found.start or band.start, band.stop)
        for module in modules:
            module.served = found
            if found:
                used, module.__class__ = True, ours
    for module in model.modules():
        if type(module) is Qwen3NextSparseMoeBlock and _joins(module, dtype):
            module.__class__ = FewRowsMixture
    use_many_rows(model, dtype)
    return used


def serves(model: nn.Module, dtype: mx.Dtype) -> bool:
    """Whether the kernel is made for all quantized weights of a model. None is read."""
    quantized = (nn.QuantizedLinear, QuantizedSwitchLinear)
    parts = (module for module in model.modules() if isinstance(module, quantized))
    return all(skinny_gemm.applies(weight_of(part), dtype) for part in parts)


def with_kernel(module: nn.Module, dtype: mx.Dtype) -> nn.Module | None:
    """A copy of a layer that runs the kernel wherever that is made for, unchecked."""
    twin = _by_mlx(module)
    if (ours := _class_for(twin, dtype)) is None:
        return None
    bands = [*_bands(twin).values()]
    twin.__class__, twin.served = ours, range(bands[0].start, bands[-1].stop)
    return twin


def problem(module: nn.Module, dtype: mx.Dtype) -> str | None:
    """What is wrong with a layer that `with_kernel` has made."""
    ours, plain = type(module), _by_mlx(module)
    found = (_problem(plain, ours, dtype, band, rows) for rows, band in _bands(plain).items())
    return next((each for each in found if each), None)


def _by_mlx(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin.__class__ = REPLACED.get(type(module), type(module))
    return twin


def _bands(module: nn.Module) -> dict[int, range]:
    return skinny_gemm.bands(weight_of(parts_of(module)[0]))


def _class_for(module: nn.Module, dtype: mx.Dtype) -> type[nn.Module] | None:
    """What takes its place, if the kernel is made for all of its weights."""
    ours = _OURS.get(type(module))
    if ours is None or (ours is FewRowsExperts and type(module.activation) is not SwiGLU):
        return None
    parts = parts_of(module)
    if any(type(part) not in _STORING or "bias" in part for part in parts):
        return None
    weights = [weight_of(part) for part in parts]
    fits = all(skinny_gemm.applies(weight, dtype) for weight in weights)
    return ours if fits and len({weight.form for weight in weights[:2]}) == 1 else None


def apply(module: nn.Module, *inputs: mx.array) -> mx.array:
    """A layer's product, that of an embedding too."""
    product: Callable[..., mx.array] = getattr(module, "as_linear", module)
    return product(*inputs)


def few(x: mx.array) -> bool:
    """Whether these tokens [.., H] are a decode step's, not a prompt's."""
    return gpu.few(x.size // x.shape[-1])


def served(x: mx.array, layer: nn.Module) -> bool:
    """Whether a layer of ours runs the kernel for these tokens [.., H]."""
    return few(x) and x.size // x.shape[-1] in layer.served


def _rows(x: mx.array) -> mx.array:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])  # No operation of mlx is free.


def _inputs(
    module: nn.Module,
    rows: int,
    dtype: mx.Dtype,
    experts: Callable[[mx.array], mx.array] = lambda pair: pair,  # of each pair, by its number
) -> tuple[mx.array, ...]:
    """Some rows, and of a mixture the experts of all of them."""
    weight = weight_of(parts_of(module)[0])
    x = mx.random.normal((rows, weight.inputs), key=mx.random.key(0)).astype(dtype)
    if type(module) is not SwitchGLU:
        return (x,)
    pairs = mx.arange(rows * getattr(module, "top_k", 2))  # Those of a model have their block's.
    return x, (experts(pairs) % weight.codes.shape[0]).reshape(rows, -1)


def _problem(
    module: nn.Module, ours: type[nn.Module], dtype: mx.Dtype, band: range, timed: int
) -> str | None:
    """Why it must not be of our class: it computes something else, or not each row by itself."""
    theirs, least, last = type(module), band.start, band.stop - 1
    sizes = sorted({min(rows, last) for rows in (*_COMPARED, timed)})
    # The first expert has more rows than a block, others few, and they are in no order.
    x, *rest = _inputs(module, sizes[-1], dtype, lambda pair: mx.where(pair % 3 > 0, 0, -1 - pair))
    try:
        # For more rows mlx compiles another kernel, which may take it half a minute a format.
        twin, asked = _in_float32(module), (x.astype(mx.float32), *rest)
        fours = [[each[at : at + 4] for each in asked] for at in range(0, len(x), 4)]
        true = mx.concatenate([apply(twin, *each) for each in fours])
        module.__class__, module.served = ours, band
        alone = apply(module, x[:least], *(each[:least] for each in rest))
        for rows in sizes:
            found = apply(module, x[:rows], *(each[:rows] for each in rest))
            wanted = true[:rows]
            error = float(mx.abs(found.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())
            if not error < _TOLERANCE:
                return f"it is off by {error:.1e} at {rows} rows"
            if not mx.array_equal(found[:least], alone).item():
                return f"a row depends on the others at {rows} rows"
        return None
    except Exception as problem:
        return _NOT_HERE.format(problem)
    finally:
        module.__class__ = theirs


def _joins(block: nn.Module, dtype: mx.Dtype) -> bool:
    """Whether the shared expert gives the same as one of the others."""
    routed, shared = block.switch_mlp, block.shared_expert
    if (type(routed), type(shared)) != (FewRowsExperts, FewRowsMLP):
        return False
    if 2 not in routed.served or 2 not in shared.served:
        return False
    both = ([weight_of(part) for part in parts_of(each)] for each in (routed, shared))
    if any(a.form != b.form or a.codes.shape[1:] != b.codes.shape for a, b in zip(*both)):
        return False
    rows, last = min(routed.served.stop - 1, _COMPARED[-1]) // 2 * 2, block.num_experts
    (x,) = _inputs(shared, rows, dtype)
    chosen = mx.arange(rows * block.top_k).reshape(rows, -1) % last
    pairs = mx.pad(chosen, [(0, 0), (0, 1)], constant_values=last).flatten().astype(mx.int32)
    order = mx.argsort(pairs).astype(mx.int32)
    fault = "it gives other results"
    try:
        found = routed.ordered(x, shared, pairs[order], order).reshape(rows, block.top_k + 1, -1)
        # By itself it may serve fewer rows than with the others.
        own = mx.concatenate([shared(x[at : at + 2]) for at in range(0, rows, 2)])
        true = mx.concatenate([routed(x, chosen), own[:, None]], axis=1)
        if mx.array_equal(found, true).item():
            return True
    except Exception as problem:
        fault = _NOT_HERE.format(problem)
    logger.warning("The few-rows kernel is not used for shared experts: %s", fault)
    return False


def _is_worth_it(
    modules: Sequence[nn.Module], ours: type[nn.Module], dtype: mx.Dtype, rows: int
) -> bool:
    """Whether so many rows of some layers are worth it, beside mlx's operations."""
    nbytes = sum(weight_of(part).codes.nbytes for part in parts_of(modules[0]))
    if gpu.backend() == "cuda" and nbytes < SMALL:
        return True
    theirs, times = type(modules[0]), []
    inputs = _inputs(modules[0], rows, dtype)
    try:
        for kind in (ours, theirs):
            for module in modules:
                module.__class__, module.served = kind, range(rows, rows + 1)
            # As layers are: else the host's time would be all that is seen.
            launch = mx.compile(lambda *inputs: [apply(module, *inputs) for module in modules])
            times.append(timed(lambda: launch(*inputs), _ROUNDS)[1])  # noqa: B023
    finally:
        for module in modules:
            module.__class__ = theirs
    return bool(times[0] < times[1] * skinny_gemm.kernel().WORTH)


def _in_float32(module: nn.Module) -> nn.Module:
    """A module of the same codes that multiplies and adds in float32."""
    twin = _by_mlx(module)
    for name, value in module.items():
        if isinstance(value, nn.Module) and "weight" in value:
            twin[name] = _in_float32(value)
        elif isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
            twin[name] = value.astype(mx.float32)
    return twin
