"""Routes the matrix products of layers to operations, by the number of tokens.

There are four operations: a kernel (`kernels.skinny_gemm`); mlx's own; mlx's own in blocks of a
fixed number of rows; and dequantizing ("expanding") the weights before a dense product, which reads
them once for all rows. mlx chooses its kernel, and so the order of sums, by the number of rows. In
a block of fixed size a row has the same bits wherever it is. The last block is padded: a product
of few rows mostly reads the weights, so for unquantized weights padding costs little.

`measure.choose_routes` gives the layers of a loaded model their `Routes`, and classes of `ROUTED`,
which obey them. Layers without routes keep mlx-lm's class.
"""

import copy
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.cuda import grouped_gemm
from mlx_mtp.kernels.cuda import skinny_gemm as cuda_gemm
from mlx_mtp.kernels.cuda.dequantize import expanded
from mlx_mtp.kernels.formats import Format, Weight, weight_of
from mlx_mtp.kernels.metal import skinny_gemm as metal_gemm
from mlx_mtp.kernels.skinny_gemm import SkinnyGemm
from mlx_mtp.kernels.topk import sorted_pairs
from mlx_mtp.kernels.view import View
from mlx_mtp.models.gemm.stacks import PARTS, stacked_weight

_BLOCK = 64  # rows


@dataclass(frozen=True)
class Routes:
    """The operation for each number of tokens; by default mlx's own for all."""

    kernel: range = range(0)  # token counts of decode steps (`gpu.few`) that the kernel serves,
    gaps: tuple[range, ...] = ()  # except for these
    one_order: bool = False  # The kernel's order of sums is the same for all numbers of rows.
    in_blocks: bool = False  # Other token counts of decode steps are computed in blocks.
    expand_from: float = math.inf  # token count from which weights are expanded
    prompt: int = 0  # maximum tokens of a prompt for the kernel, where weights are not expanded

    def serves(self, rows: int) -> bool:
        """Returns whether the kernel serves a decode step of `rows` tokens."""
        return rows in self.kernel and not any(rows in gap for gap in self.gaps)

    def operation(self, rows: int) -> str:
        """Returns "kernel", "blocks", "expand" or "mlx"."""
        if gpu.few(rows):
            if self.serves(rows):
                return "kernel"
            if self.in_blocks:
                return "blocks"
        if rows >= self.expand_from:
            return "expand"
        return "kernel" if 0 < rows <= self.prompt else "mlx"


BY_MLX = Routes()


class Products(NamedTuple):
    """The products of several layers, as columns of few arrays [N, ..]."""

    arrays: list[mx.array]
    columns: list[tuple[int, int, int]]  # of each layer: its array, and its first and last columns

    def views(self, arrays: Sequence[mx.array] | None = None) -> list[View]:
        """Returns each layer's product; `arrays` take the place of `self.arrays`."""
        views = []
        for number, first, end in self.columns:
            array = (arrays or self.arrays)[number]
            shape = len(array), end - first
            views.append(View(array, shape, (array.shape[1], 1), first))
        return views


def project(x: mx.array, *layers: nn.Module) -> Products:
    """Returns the products of x [N, H]; of one launch if the layers are stacked and served."""
    weight = stacked_weight(*layers) if all(type(layer) in _SINGLE for layer in layers) else None
    if weight is None or not all(served(x, layer) for layer in layers):
        products = [layer(x) for layer in layers]
        return Products(products, [(n, 0, y.shape[1]) for n, y in enumerate(products)])
    gemm = SkinnyGemm(x, weight, one_order=routes_of(layers[0]).one_order)
    ends = itertools.accumulate((len(layer.weight) for layer in layers), initial=0)
    columns = [(0, *pair) for pair in itertools.pairwise(ends)]
    return Products([skinny_kernel().run_kernel(gemm)], columns)


def product(module: nn.Module, *inputs: mx.array) -> mx.array:
    """Returns a layer's product; an embedding's is that of a tied lm_head."""
    method: Callable[..., mx.array] = getattr(module, "as_linear", module)
    return method(*inputs)


def skinny_kernel() -> Any:
    """Returns the module of the skinny GEMM for this backend."""
    return metal_gemm if gpu.backend() == "metal" else cuda_gemm


def is_decode_sized(x: mx.array) -> bool:
    """Returns whether tokens x [.., H] are computed as a decode step's (see `gpu.few`)."""
    return gpu.few(x.size // x.shape[-1])


def served(x: mx.array, layer: nn.Module) -> bool:
    """Returns whether x [.., H] is computed as a decode step's, by a layer's kernel."""
    return is_decode_sized(x) and routes_of(layer).serves(x.size // x.shape[-1])


def all_served(module: nn.Module, rows: int) -> bool:
    """Returns whether a step of `rows` tokens is computed by the kernel in all layers."""
    layers = (layer for layer in module.modules() if mlx_class(layer) in ROUTED)
    return all(routes_of(layer).serves(rows) for layer in layers)


def routes_of(layer: nn.Module) -> Routes:
    """Returns the routes that `set_routes` gave a layer, else `BY_MLX`."""
    routes: Routes = getattr(layer, "routes", BY_MLX)
    return routes


def set_routes(layer: nn.Module, routes: Routes) -> None:
    """Route a layer's products."""
    layer.__class__, layer.routes = ROUTED.get(type(layer), type(layer)), routes


def with_routes(layer: nn.Module, routes: Routes) -> nn.Module:
    """Returns a copy of a layer with the same weights and other routes."""
    twin = copy.copy(layer)
    set_routes(twin, routes)
    return twin


def mlx_class(layer: nn.Module) -> type[nn.Module]:
    """Returns the class that a layer has, or had before it was routed."""
    return _MLX.get(type(layer), type(layer))


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Returns the modules with the weights: `module`, or gate, up and down of an MLP or experts."""
    names = ("gate_proj", "up_proj", "down_proj")
    return [module] if "weight" in module else [module[name] for name in names]


def digest(model: nn.Module) -> str:
    """Returns a hash of the operations that measurements have chosen for a loaded model."""
    layers = [(name, mlx_class(m).__name__, routes_of(m)) for name, m in model.named_modules()]
    choices = sorted(layers, key=str), sorted(gpu.refused), sorted(gpu.slower)
    return hashlib.sha256(str(choices).encode()).hexdigest()


def experts_in_order(
    layer: nn.Module, x: mx.array, shared: nn.Module | None, pairs: mx.array
) -> mx.array:
    """Returns outputs [P, H] of P (token, expert) pairs, computed by the kernel.

    `pairs` is `topk.ExpertChoice.pairs` or from `topk.sorted_pairs`. Outputs are in the tokens'
    order.
    """

    owners = [layer] if shared is None else [layer, shared]

    def product(x: mx.array, *names: str) -> mx.array:
        weight = stacked_weight(*(owner[name] for owner in owners for name in names))
        assert weight is not None, "the kernel serves only stacked experts"
        gemm = SkinnyGemm(x, weight, len(names), pairs, shared is not None)
        outputs: mx.array = skinny_kernel().run_kernel(gemm)
        return outputs

    return product(product(_flat_rows(x), *PARTS), "down_proj")


def _flat_rows(x: mx.array) -> mx.array:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])  # Even a view costs mlx time.


def _linear_by_kernel(self: nn.Module, x: mx.array) -> mx.array:
    *arrays, form = weight_of(self)
    return _by_kernel(form, self.routes.one_order)(x, *arrays)


@functools.cache
def _by_kernel(form: Format, one_order: bool) -> Callable[..., mx.array]:
    """Returns a compiled product: lm_head is in no compiled layer, and takes 80 Python calls."""

    def run(x: mx.array, codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        weight = Weight(codes, scales, biases, form)
        gemm = SkinnyGemm(_flat_rows(x), weight, one_order=one_order)
        y: mx.array = skinny_kernel().run_kernel(gemm)
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], -1)

    return mx.compile(run)


def _mlp_by_kernel(self: nn.Module, x: mx.array) -> mx.array:
    """Gate, up and activation are one launch."""
    weight = stacked_weight(*(self[name] for name in PARTS))
    assert weight is not None, "the kernel serves only stacked MLPs"
    gemm = SkinnyGemm(_flat_rows(x), weight, 2, one_order=self.routes.one_order)
    inner: mx.array = skinny_kernel().run_kernel(gemm)
    down: mx.array = self.down_proj(inner if x.ndim == 2 else inner.reshape(*x.shape[:-1], -1))
    return down


def _experts_by_kernel(self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
    """An expert's weights are read once for several of its tokens."""
    pairs = sorted_pairs(indices.reshape(-1))
    return experts_in_order(self, x, None, pairs).reshape(*indices.shape, -1)


def _expanded_linear(self: nn.Module, x: mx.array) -> mx.array:
    weights = self.weight, self.scales, self.biases
    y = x @ expanded(*weights, self.group_size, self.bits).T
    return y + self.bias if "bias" in self else y


def _expanded_experts(self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
    """The weights are expanded in registers."""
    weights = [weight_of(part) for part in parts_of(self)]
    pairs = indices.reshape(-1).astype(mx.int32)
    return grouped_gemm.swiglu(_flat_rows(x), weights, pairs).reshape(*indices.shape, -1)


def _in_blocks(call: Callable[..., Any], *inputs: mx.array) -> mx.array:
    """Run `call` for blocks of `_BLOCK` rows of the inputs [.., width]; the last one is padded."""
    shape = inputs[0].shape[:-1]
    rows = [_flat_rows(each) for each in inputs]
    count = len(rows[0])
    rows = [mx.pad(each, [(0, -count % _BLOCK), (0, 0)]) for each in rows]
    blocks = [call(*(a[at : at + _BLOCK] for a in rows)) for at in range(0, count, _BLOCK)]
    joined = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks)
    return joined[:count].reshape(*shape, *joined.shape[1:])


def _routed(
    base: type[Any], by_kernel: Callable[..., Any], expand: Callable[..., Any] | None = None
) -> type[Any]:
    """Returns a subclass whose product follows its `routes`; an embedding's lookup stays mlx's."""
    method = "as_linear" if hasattr(base, "as_linear") else "__call__"
    by_mlx = getattr(base, method)

    def call(self: Any, x: mx.array, *rest: mx.array) -> Any:
        operation = self.routes.operation(x.size // x.shape[-1])
        if operation == "kernel":
            return by_kernel(self, x, *rest)
        if operation == "blocks":
            return _in_blocks(functools.partial(by_mlx, self), x, *rest)
        return (expand if expand and operation == "expand" else by_mlx)(self, x, *rest)

    return type(f"Routed{base.__name__}", (base,), {method: call})


ROUTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: _routed(nn.QuantizedLinear, _linear_by_kernel, _expanded_linear),
    nn.Linear: _routed(nn.Linear, _linear_by_kernel),
    nn.QuantizedEmbedding: _routed(nn.QuantizedEmbedding, _linear_by_kernel),
    nn.Embedding: _routed(nn.Embedding, _linear_by_kernel),
    Qwen3NextMLP: _routed(Qwen3NextMLP, _mlp_by_kernel),
    SwitchGLU: _routed(SwitchGLU, _experts_by_kernel, _expanded_experts),
}
"""Routed classes by mlx's class. An embedding can be a tied lm_head."""
_MLX = {routed: base for base, routed in ROUTED.items()}
_SINGLE = [routed for base, routed in ROUTED.items() if base not in (Qwen3NextMLP, SwitchGLU)]
