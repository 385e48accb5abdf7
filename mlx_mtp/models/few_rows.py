"""Layers whose quantized products are those of `kernels.few_rows`, where that serves them."""

import copy
import logging
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP, Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear

from mlx_mtp.kernels import few_rows, gpu, shared_reads
from mlx_mtp.kernels.formats import Format, weight_of
from mlx_mtp.models.many_rows import (
    ExpandedLinear,
    GroupedExperts,
    sorted_pairs,
    use_many_rows,
)

logger = logging.getLogger(__name__)

Stored = tuple[tuple[tuple[int, ...], Format], ...]  # shapes of codes

_MOST_PAIRS = 1 << 15  # of token and expert: a chunk of 2,048 tokens has less
_MOST_PLAIN_PAIRS = 2048  # the same where weights are not quantized, of which more are not measured
_TIMED, _ROUNDS = 8, 5  # layers of a shape, and how often
_WORTH = 1.5  # what rows that don't depend on each other may take, over mlx's time
_TOLERANCE = 0.02  # of bfloat16 results, relative to the largest


class FewRowsLinear(ExpandedLinear):
    """A product that gives a row the same bits whatever the other rows are."""

    def __call__(self, x: mx.array) -> mx.array:
        return project(x, self)[0] if few(x) else super().__call__(x)


class FewRowsPlainLinear(nn.Linear):
    """The same, not quantized, up to the rows that the kernel is for."""

    def __call__(self, x: mx.array) -> mx.array:
        return project(x, self)[0] if _serves(x, self) else super().__call__(x)


class FewRowsEmbedding(nn.QuantizedEmbedding):
    """The same, of an embedding that is lm_head too."""

    def as_linear(self, x: mx.array) -> mx.array:
        return project(x, self)[0] if few(x) else super().as_linear(x)


class FewRowsPlainEmbedding(nn.Embedding):
    """The same, not quantized."""

    def as_linear(self, x: mx.array) -> mx.array:
        return project(x, self)[0] if _serves(x, self) else super().as_linear(x)


class SharedReadsLinear(nn.QuantizedLinear):
    """A product of two to eight rows that reads its weights once for four of them."""

    def __call__(self, x: mx.array) -> mx.array:
        return _shared(x, self) if shared_reads.serves(x) else super().__call__(x)


class SharedReadsEmbedding(nn.QuantizedEmbedding):
    """The same, of an embedding that is lm_head too."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _shared(x, self) if shared_reads.serves(x) else super().as_linear(x)


class FewRowsMLP(Qwen3NextMLP):
    """An MLP whose gate, up and activation are one launch."""

    def __call__(self, x: mx.array) -> mx.array:
        if not _serves(x, self.gate_proj):
            return super().__call__(x)
        inner = few_rows.gate_and_up(_rows(x), *map(weight_of, (self.gate_proj, self.up_proj)))
        return self.down_proj(inner if x.ndim == 2 else inner.reshape(*x.shape[:-1], -1))


class FewRowsExperts(GroupedExperts):
    """Experts, each of which is read once for up to eight of its tokens."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        most = _MOST_PAIRS if "scales" in self.gate_proj else _MOST_PLAIN_PAIRS
        expands = x.size // x.shape[-1] >= self.least_rows
        if not (few(x) or (0 < indices.size <= most and not expands)):
            return super().__call__(x, indices)
        return self.ordered(x, None, *sorted_pairs(indices)).reshape(*indices.shape, -1)

    def ordered(
        self, x: mx.array, shared: nn.Module | None, chosen: mx.array, order: mx.array
    ) -> mx.array:
        """[P, H] of P pairs in this order (see `kernels.router.Routes`), with a shared expert."""

        def product(x: mx.array, *names: str) -> mx.array:
            ours = [weight_of(self[name]) for name in names]
            theirs = [] if shared is None else [weight_of(shared[name]) for name in names]
            return few_rows.experts(x, ours, theirs, chosen, order)

        return product(product(_rows(x), "gate_proj", "up_proj"), "down_proj")


class FewRowsMixture(Qwen3NextSparseMoeBlock):
    """A mixture whose shared expert is computed with the others."""


# What each takes the place of.
REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    FewRowsLinear: nn.QuantizedLinear,
    FewRowsPlainLinear: nn.Linear,
    FewRowsEmbedding: nn.QuantizedEmbedding,
    FewRowsPlainEmbedding: nn.Embedding,
    SharedReadsLinear: nn.QuantizedLinear,
    SharedReadsEmbedding: nn.QuantizedEmbedding,
    FewRowsMLP: Qwen3NextMLP,
    FewRowsExperts: SwitchGLU,
}
_ALONE = (FewRowsLinear, FewRowsPlainLinear, FewRowsEmbedding, FewRowsPlainEmbedding)
_SHARED = (SharedReadsLinear, SharedReadsEmbedding)
_EMBEDDINGS = nn.QuantizedEmbedding, nn.Embedding
_STORING = nn.QuantizedLinear, nn.Linear, *_EMBEDDINGS, QuantizedSwitchLinear, SwitchLinear


def project(x: mx.array, *layers: nn.Module) -> list[mx.array]:
    """Several products of one input, in one launch where the kernel serves all of them."""
    forms = {weight_of(layer).form if type(layer) in _ALONE else None for layer in layers}
    if len(forms) > 1 or None in forms or not _serves(x, layers[0]):
        return [layer(x) for layer in layers]
    found = few_rows.products(_rows(x), [weight_of(layer) for layer in layers])
    return found if x.ndim == 2 else [each.reshape(*x.shape[:-1], -1) for each in found]


def use_few_rows(model: nn.Module, dtype: mx.Dtype) -> bool:
    """Let products use a kernel, each shape where it agrees with mlx; whether any does."""
    tied = not any(name.endswith("lm_head") for name, _ in model.named_modules())
    kinds: dict[tuple[type[nn.Module], Stored], list[nn.Module]] = {}
    for module in model.modules():
        if (tied or type(module) not in _EMBEDDINGS) and (ours := _class_for(module, dtype)):
            weights = map(weight_of, _parts(module))
            stored = tuple((weight.codes.shape, weight.form) for weight in weights)
            kinds.setdefault((ours, stored), []).append(module)
    used = False
    # An MLP is compared with what its own last product will be.
    for (ours, stored), modules in sorted(kinds.items(), key=lambda kind: len(kind[0][1])):
        if problem := _problem(modules[0], ours, dtype):
            logger.warning("The few-rows kernel is not used for %s: %s", stored, problem)
            continue
        if not _is_worth_it(modules[:_TIMED], ours, dtype):
            logger.info("The few-rows kernel is not used for %s: mlx's is faster", stored)
            continue
        used = True
        for module in modules:
            module.__class__ = ours
    for module in model.modules():
        if type(module) is Qwen3NextSparseMoeBlock and _joins(module, dtype):
            module.__class__ = FewRowsMixture
    use_many_rows(model, dtype)
    return used


def serves(model: nn.Module, dtype: mx.Dtype) -> bool:
    """Whether the kernel is made for all quantized weights of a model. None is read."""
    quantized = (nn.QuantizedLinear, QuantizedSwitchLinear)
    parts = (module for module in model.modules() if isinstance(module, quantized))
    return all(few_rows.fits(weight_of(part), dtype) for part in parts)


def _class_for(module: nn.Module, dtype: mx.Dtype) -> type[nn.Module] | None:
    """What takes its place, if the kernel is made for all of its weights."""
    if type(module) is SwitchGLU and type(module.activation) is not SwiGLU:
        return None
    for ours, theirs in REPLACED.items():
        fits = shared_reads.fits if ours in _SHARED else few_rows.fits
        if type(module) is theirs and all(
            type(part) in _STORING and "bias" not in part and fits(weight_of(part), dtype)
            for part in _parts(module)
        ):
            first, *others = (weight_of(part).form for part in _parts(module))
            return ours if not others or first == others[0] else None
    return None


def _parts(module: nn.Module) -> list[nn.Module]:
    names = ("gate_proj", "up_proj", "down_proj")
    return [module] if "weight" in module else [module[name] for name in names]


def apply(module: nn.Module, *inputs: mx.array) -> mx.array:
    """A layer's product, that of an embedding too."""
    product: Callable[..., mx.array] = getattr(module, "as_linear", module)
    return product(*inputs)


def few(x: mx.array) -> bool:
    """Whether these tokens [.., H] are a decode step's, not a prompt's."""
    return gpu.few(x.size // x.shape[-1])


def _serves(x: mx.array, layer: nn.Module) -> bool:
    plain = weight_of(layer).form.bits == 16
    return few(x) and (not plain or x.size // x.shape[-1] <= few_rows.MOST_PLAIN_ROWS)


def _rows(x: mx.array) -> mx.array:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])  # No operation of mlx is free.


def _shared(x: mx.array, layer: nn.Module) -> mx.array:
    return shared_reads.product(_rows(x), weight_of(layer)).reshape(*x.shape[:-1], -1)


def _inputs(
    module: nn.Module, rows: int, dtype: mx.Dtype, experts: mx.array
) -> tuple[mx.array, ...]:
    """Some rows, and of a mixture the experts of all of them."""
    weight = weight_of(_parts(module)[0])
    x = mx.random.normal((rows, weight.inputs), key=mx.random.key(0)).astype(dtype)
    chosen = (experts % weight.codes.shape[0]).reshape(rows, -1)
    return (x, chosen) if type(module) is SwitchGLU else (x,)


def _problem(module: nn.Module, ours: type[nn.Module], dtype: mx.Dtype) -> str | None:
    """Why it must not be of our class: it computes something else, or not each row by itself."""
    theirs = type(module)
    least, most = (2, 7) if ours in _SHARED else (1, 9)
    if ours in (FewRowsPlainLinear, FewRowsPlainEmbedding, FewRowsMLP):
        most = few_rows.MOST_PLAIN_ROWS  # Of unquantized weights the kernel serves no more.
    # Of experts some have one row, and some more than one block has.
    x, *rest = _inputs(module, most, dtype, mx.arange(2 * most) // 9)
    try:
        # For more rows mlx compiles another kernel, which may take it half a minute a format.
        twin, asked = _in_float32(module), (x.astype(mx.float32), *rest)
        fours = [[each[at : at + 4] for each in asked] for at in range(0, most, 4)]
        true = mx.concatenate([apply(twin, *each) for each in fours])
        module.__class__ = ours
        found = apply(module, x, *rest)
        alone = apply(module, x[:least], *(each[:least] for each in rest))
        error = float(mx.abs(found.astype(mx.float32) - true).max() / mx.abs(true).max())
        if not error < _TOLERANCE:
            return f"it is off by {error:.1e}"
        same = mx.array_equal(found[:least], alone).item()
        return None if same else "a row depends on the others"
    except Exception as problem:
        return f"it does not run here: {problem}"
    finally:
        module.__class__ = theirs


def _joins(block: nn.Module, dtype: mx.Dtype) -> bool:
    """Whether the shared expert gives the same as one of the others."""
    routed, shared = block.switch_mlp, block.shared_expert
    if (type(routed), type(shared)) != (FewRowsExperts, FewRowsMLP):
        return False
    both = ([weight_of(part) for part in _parts(each)] for each in (routed, shared))
    if any(a.form != b.form or a.codes.shape[1:] != b.codes.shape for a, b in zip(*both)):
        return False
    (x,) = _inputs(shared, 2, dtype, mx.arange(2))
    last = block.num_experts
    order = mx.array([0, 3, 1, 4, 2, 5], dtype=mx.int32)
    chosen = mx.array([0, 0, 1, 1, last, last], dtype=mx.int32)
    fault = "it gives other results"
    try:
        found = routed.ordered(x, shared, chosen, order).reshape(2, 3, -1)
        true = mx.concatenate([routed(x, mx.array([[0, 1]] * 2)), shared(x)[:, None]], axis=1)
        if mx.array_equal(found, true).item():
            return True
    except Exception as problem:
        fault = f"it does not run here: {problem}"
    logger.warning("The few-rows kernel is not used for shared experts: %s", fault)
    return False


def _is_worth_it(modules: Sequence[nn.Module], ours: type[nn.Module], dtype: mx.Dtype) -> bool:
    """Whether four rows of some layers are worth it, beside mlx's operations."""
    theirs, times = type(modules[0]), []
    inputs = _inputs(modules[0], 4, dtype, mx.arange(32))
    for kind in (ours, theirs):
        for module in modules:
            module.__class__ = kind
        # As layers are: else the host's time would be all that is seen.
        launch = mx.compile(lambda *inputs: [apply(module, *inputs) for module in modules])
        mx.eval(launch(*inputs))
        rounds = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            mx.eval(launch(*inputs))
            rounds.append(time.perf_counter() - began)
        times.append(min(rounds))
    return times[0] < times[1] * (1 if ours in _SHARED else _WORTH)


def _in_float32(module: nn.Module) -> nn.Module:
    """A module of the same codes that multiplies and adds in float32."""
    twin = copy.copy(module)
    twin.__class__ = REPLACED.get(type(twin), type(twin))
    for name, value in module.items():
        if isinstance(value, nn.Module) and "weight" in value:
            twin[name] = _in_float32(value)
        elif isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
            twin[name] = value.astype(mx.float32)
    return twin
