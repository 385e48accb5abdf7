"""Layers whose quantized products are those of `kernels.few_rows`, where that serves them."""

import copy
import logging
import time
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP, Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU

from mlx_mtp.kernels import shared_reads
from mlx_mtp.kernels.few_rows import Quantized, experts, fits, gate_and_up, products
from mlx_mtp.kernels.gpu import MOST_ROWS
from mlx_mtp.models.many_rows import ExpandedLinear, use_expanded

logger = logging.getLogger(__name__)

Shapes = tuple[tuple[int, ...], ...]

_MOST_PAIRS = 2048  # of token and expert; more are a prompt's
_TIMED, _ROUNDS = 8, 5  # layers of a shape, and how often
_TOLERANCE = 0.02  # of bfloat16 results, relative to the largest


class FewRowsLinear(ExpandedLinear):
    """A product that gives a row the same bits whatever the other rows are, up to MOST_ROWS."""

    def __call__(self, x: mx.array) -> mx.array:
        return project(x, self)[0] if few(x) else super().__call__(x)


class SharedReadsLinear(nn.QuantizedLinear):
    """A product of two to eight rows that reads its weights once for four of them."""

    def __call__(self, x: mx.array) -> mx.array:
        if not 2 <= x.size // x.shape[-1] <= shared_reads.MOST_ROWS:
            return super().__call__(x)
        return shared_reads.product(_rows(x), _weights(self)).reshape(*x.shape[:-1], -1)


class FewRowsMLP(Qwen3NextMLP):
    """An MLP whose gate, up and activation are one launch."""

    def __call__(self, x: mx.array) -> mx.array:
        if not few(x):
            return super().__call__(x)
        inner = gate_and_up(_rows(x), _weights(self.gate_proj), _weights(self.up_proj))
        return self.down_proj(inner.reshape(*x.shape[:-1], -1))


class FewRowsExperts(SwitchGLU):
    """Experts, each of which is read once for up to eight of its tokens."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if not 0 < indices.size <= _MOST_PAIRS:
            return super().__call__(x, indices)
        pairs = indices.reshape(-1).astype(mx.int32)
        order = mx.argsort(pairs).astype(mx.int32)
        return self.ordered(x, None, pairs[order], order).reshape(*indices.shape, -1)

    def ordered(
        self, x: mx.array, shared: nn.Module | None, chosen: mx.array, order: mx.array
    ) -> mx.array:
        """[P, H] of P pairs in this order (see `kernels.router.Routes`), with a shared expert."""

        def product(x: mx.array, *names: str) -> mx.array:
            ours = [_weights(self[name]) for name in names]
            theirs = [] if shared is None else [_weights(shared[name]) for name in names]
            return experts(x, ours, theirs, chosen, order)

        return product(product(_rows(x), "gate_proj", "up_proj"), "down_proj")


class FewRowsMixture(Qwen3NextSparseMoeBlock):
    """A mixture whose shared expert is computed with the others."""


# What each takes the place of.
REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    FewRowsLinear: nn.QuantizedLinear,
    SharedReadsLinear: nn.QuantizedLinear,
    FewRowsMLP: Qwen3NextMLP,
    FewRowsExperts: SwitchGLU,
}


def project(x: mx.array, *layers: nn.Module) -> list[mx.array]:
    """Several products of one input, in one launch where the kernel serves all of them."""
    bits = {layer.bits if type(layer) is FewRowsLinear else None for layer in layers}
    if not few(x) or len(bits) > 1 or None in bits:
        return [layer(x) for layer in layers]
    found = products(_rows(x), [_weights(layer) for layer in layers])
    return [each.reshape(*x.shape[:-1], -1) for each in found]


def use_few_rows(model: nn.Module, dtype: mx.Dtype) -> bool:
    """Let products use a kernel, each shape where it agrees with mlx; whether any does."""
    kinds: dict[tuple[type[nn.Module], Shapes], list[nn.Module]] = {}
    for module in model.modules():
        if ours := _class_for(module, dtype):
            shapes = tuple(tuple(layer.weight.shape) for layer in _quantized(module))
            kinds.setdefault((ours, shapes), []).append(module)
    used = False
    # An MLP is compared with what its own last product will be.
    for (ours, shapes), modules in sorted(kinds.items(), key=lambda kind: len(kind[0][1])):
        if problem := _problem(modules[0], ours, dtype):
            logger.warning("The few-rows kernel is not used for %s: %s", shapes, problem)
            continue
        if ours is SharedReadsLinear and not _is_faster(modules[:_TIMED], dtype):
            logger.info("The few-rows kernel is not used for %s: mlx's is as fast", shapes)
            continue
        used = True
        for module in modules:
            module.__class__ = ours
    for module in model.modules():
        if type(module) is Qwen3NextSparseMoeBlock and _joins(module, dtype):
            module.__class__ = FewRowsMixture
    use_expanded(model, dtype)
    return used


def _class_for(module: nn.Module, dtype: mx.Dtype) -> type[nn.Module] | None:
    """What takes its place, if the kernel is made for all of its weights."""
    if type(module) is nn.QuantizedLinear and _fits_shared(module, dtype):
        return SharedReadsLinear
    if type(module) is nn.QuantizedLinear:
        ours, leaf = FewRowsLinear, nn.QuantizedLinear
    elif type(module) is Qwen3NextMLP:
        ours, leaf = FewRowsMLP, nn.QuantizedLinear
    elif type(module) is SwitchGLU and type(module.activation) is SwiGLU:
        ours, leaf = FewRowsExperts, QuantizedSwitchLinear
    else:
        return None
    layers = _quantized(module)
    fit = all(type(each) is leaf and _fits(each, dtype) for each in layers)
    return ours if fit and layers[0].bits == layers[len(layers) // 2].bits else None


def _quantized(module: nn.Module) -> list[nn.Module]:
    names = ("gate_proj", "up_proj", "down_proj")
    return [module] if "scales" in module else [module[name] for name in names]


def _fits(layer: nn.Module, dtype: mx.Dtype) -> bool:
    sizes = _inputs(layer), layer.bits, layer.group_size
    return _is_plain(layer, dtype) and fits(*sizes, dtype)


def _fits_shared(layer: nn.Module, dtype: mx.Dtype) -> bool:
    sizes = layer.bits, layer.group_size
    return _is_plain(layer, dtype) and shared_reads.fits(_inputs(layer), *sizes)


def _is_plain(layer: nn.Module, dtype: mx.Dtype) -> bool:
    return layer.mode == "affine" and "bias" not in layer and layer.scales.dtype == dtype


def _inputs(layer: nn.Module) -> int:
    inputs: int = layer.scales.shape[-1] * layer.group_size
    return inputs


def few(x: mx.array) -> bool:
    """Whether these tokens [.., H] are a decode step's, not a prompt's."""
    return 0 < x.size // x.shape[-1] <= MOST_ROWS


def _rows(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])


def _weights(layer: nn.Module) -> Quantized:
    return layer.weight, layer.scales, layer.biases


def _problem(module: nn.Module, ours: type[nn.Module], dtype: mx.Dtype) -> str | None:
    """Why it must not be of our class: it computes something else, or not each row by itself."""
    first, theirs = _quantized(module)[0], type(module)
    least, most = (2, 7) if ours is SharedReadsLinear else (1, 9)
    x = mx.random.normal((most, _inputs(first)), key=mx.random.key(0)).astype(dtype)
    # The experts are chosen for rows in a way that some have one row, and some more than one block.
    rest = (mx.arange(18).reshape(9, 2) // 9,) if ours is FewRowsExperts else ()
    try:
        true = _in_float32(module)(x.astype(mx.float32), *rest)
        module.__class__ = ours
        found, alone = module(x, *rest), module(x[:least], *(each[:least] for each in rest))
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
    pairs = list(zip(_quantized(routed), _quantized(shared)))
    if any(a.bits != b.bits or a.weight.shape[1:] != b.weight.shape for a, b in pairs):
        return False
    x = mx.random.normal((2, _inputs(pairs[0][0])), key=mx.random.key(0)).astype(dtype)
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


def _is_faster(layers: Sequence[nn.Module], dtype: mx.Dtype) -> bool:
    """Whether the weights of some layers are read faster for four rows than by mlx."""
    x = mx.random.normal((4, _inputs(layers[0])), key=mx.random.key(0)).astype(dtype)
    times = []
    for call in (SharedReadsLinear.__call__, nn.QuantizedLinear.__call__):
        rounds = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            mx.eval([call(layer, x) for layer in layers])
            rounds.append(time.perf_counter() - began)
        times.append(min(rounds))
    return times[0] < times[1]


def _in_float32(module: nn.Module) -> nn.Module:
    """A module of the same codes that multiplies and adds in float32."""
    twin = copy.copy(module)
    if "scales" in module:
        twin.__class__ = REPLACED.get(type(twin), type(twin))
        twin.scales, twin.biases = (each.astype(mx.float32) for each in _weights(module)[1:])
    else:
        for name in ("gate_proj", "up_proj", "down_proj"):
            twin[name] = _in_float32(module[name])
    return twin
