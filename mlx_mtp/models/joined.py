"""Layers of a small model on a CPU, in a second form of fewer and larger operations.

There a step of few tokens takes as long as mlx needs for its operations, whatever they compute
(`kernels.cpu`). So products of one input are joined. Joined weights are copies: a large layer has
none, as its weights take longer to read than its operations take.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.activations import swiglu
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock

from mlx_mtp.cache.packing import Rectangle
from mlx_mtp.distributed import world
from mlx_mtp.kernels import cpu
from mlx_mtp.kernels.gdn_types import GDNProjections, GDNShape, ShortConvWeights
from mlx_mtp.kernels.gpu import backend

_MOST_BYTES = 1 << 23  # of a layer


def joined(layer: nn.Module) -> "JoinedLayer | None":
    """The joined form of a small layer of float32 weights, on a CPU; else None."""
    arrays = tree_flatten(layer.parameters())
    plain = not any("scales" in module or "bias" in module for module in layer.modules())
    plain = plain and all(a.dtype == mx.float32 for name, a in arrays if not name.endswith("A_log"))
    small = sum(array.nbytes for _, array in arrays) <= _MOST_BYTES
    alone = backend() is None and world().size == 1
    return JoinedLayer(layer) if plain and small and alone else None


class JoinedLayer:
    """What `SplitLayer.forward` computes; the two agree but for the order of sums."""

    def __init__(self, layer: Any) -> None:
        mixer = layer.linear_attn if layer.is_linear else layer.self_attn
        self._mixer = _Recurrence(mixer) if layer.is_linear else _Attention(mixer)
        self._mlp: _Mixture | _MLP
        self._mlp = (_Mixture if type(layer.mlp) is Qwen3NextSparseMoeBlock else _MLP)(layer.mlp)
        self._norm = layer.post_attention_layernorm

    def forward(
        self,
        x: mx.array,
        normed: mx.array,
        next_norm: mx.array,
        positions: mx.array,
        caches: Sequence[Any],
    ) -> tuple[mx.array, mx.array]:
        x = self._mixer.add(x, normed, positions, caches)
        return self.after(x, next_norm)

    def after(self, x: mx.array, next_norm: mx.array) -> tuple[mx.array, mx.array]:
        x = self._mlp.add(x, cpu.rms_norm(x, self._norm.weight, self._norm.eps))
        return x, cpu.rms_norm(x, next_norm, self._norm.eps)


class _Product:
    """One product for several, whose weights are these, each [inputs, outputs]."""

    def __init__(self, *weights: mx.array) -> None:
        self._weight = _by_input(mx.concatenate([w.T for w in weights]))
        self._ends = [*accumulate(weight.shape[1] for weight in weights[:-1])]

    def __call__(self, x: mx.array) -> list[mx.array]:
        joined: mx.array = x @ self._weight
        return list(mx.split(joined, self._ends, axis=-1))


def _by_input(weight: mx.array) -> mx.array:
    """A copy of [.., outputs, inputs] as [.., inputs, outputs].

    No step has to transpose it, and OpenBLAS multiplies few rows up to three times as fast by it.
    """
    copy = mx.contiguous(weight.swapaxes(-1, -2))
    mx.eval(copy)
    return copy


class _Recurrence:
    def __init__(self, mixer: Any) -> None:
        self._shape = GDNShape(
            mixer.num_k_heads,
            mixer.head_k_dim,
            mixer.num_v_heads,
            mixer.head_v_dim,
            mixer.conv_kernel_size,
        )
        weights = [mixer[name].weight.T for name in mixer.projections]
        inputs = len(weights[0])
        # What a projection gives for a token it gives for each row of its weights.
        order = Rectangle(inputs, inputs, 1, None, None)
        (q, k, v, a, b), z = mixer.unpack_projections(weights, order)
        heads = [each.reshape(inputs, -1) for each in (q, k, v, z, a, b)]
        self._project = _Product(mx.concatenate(heads[:3], axis=1), *heads[3:])
        self._convolution = ShortConvWeights(mixer.conv1d.weight, mixer.A_log, mixer.dt_bias)
        self._weights = cpu.TokenWeights.of(self._shape, self._convolution)
        self._norm, self._out = mixer.norm, _by_input(mixer.out_proj.weight)

    def add(self, x: mx.array, normed: mx.array, _: mx.array, caches: Sequence[Any]) -> mx.array:
        qkv, z, *gates = self._project(normed)
        first, outputs = 0, []
        for cache in caches:
            order = cache.packing.rectangle
            tokens = slice(first, first := first + order.num_tokens)
            own = (each if len(caches) == 1 else each[tokens] for each in (qkv, *gates))
            rectangles = [order.fill(each, -1) for each in own]
            y = cache.run_few(*rectangles, self._weights)
            if y is None:
                y = cache.run_window(self._apart(*rectangles), self._convolution)
            outputs.append(order.flat(y))
        y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        y = cpu.gated_norm(y, z.reshape(y.shape), self._norm.weight, self._norm.eps)
        return mx.addmm(x, y.flatten(1), self._out)

    def _apart(self, qkv: mx.array, a: mx.array, b: mx.array) -> GDNProjections:
        hk, dk, hv, dv, _ = self._shape
        rows, length, _ = qkv.shape
        q, k, v = mx.split(qkv, [hk * dk, 2 * hk * dk], axis=-1)
        sizes = (hk, dk), (hk, dk), (hk, hv // hk, dv), (hk, hv // hk), (hk, hv // hk)
        parts = zip((q, k, v, a, b), sizes, strict=True)
        return GDNProjections(*(part.reshape(rows, length, *size) for part, size in parts))


class _Attention:
    def __init__(self, mixer: Any) -> None:
        self._mixer, self._out = mixer, _by_input(mixer.o_proj.weight)
        self._heads, self._kv_heads = mixer.num_attention_heads, mixer.num_key_value_heads
        doubled, k, v = (mixer[name].weight.T for name in ("q_proj", "k_proj", "v_proj"))
        inputs = len(k)
        q, gate = (each.reshape(inputs, -1) for each in mixer.halves(doubled))
        self._project = _Product(mx.concatenate([q, k], axis=1), v, gate)
        of_queries = mx.repeat(mixer.q_norm.weight[None] * mixer.scale, self._heads, axis=0)
        of_keys = mx.repeat(mixer.k_norm.weight[None], self._kv_heads, axis=0)
        weights = mx.concatenate([of_queries, of_keys])
        mx.eval(weights)
        rope = mixer.rope
        self._norms: cpu.HeadNorms | None = None
        if type(rope) is nn.RoPE and not rope.traditional:
            angles = rope.dims, rope.base, rope.scale
            self._norms = cpu.HeadNorms(weights, mixer.q_norm.eps, *angles)

    def add(
        self, x: mx.array, normed: mx.array, positions: mx.array, caches: Sequence[Any]
    ) -> mx.array:
        if self._norms is None or positions.ndim > 1 or len(caches) > 1:
            attended, gate = self._mixer.mix(self._mixer.before(normed, positions), caches)
            return mx.addmm(x, cpu.gated(attended, gate).flatten(1), self._out)
        both, v, gate = self._project(normed)
        (cache,), count = caches, len(x)
        heads = both.reshape(count, self._heads + self._kv_heads, -1)
        heads = cpu.turned_heads(heads, self._norms, positions)
        queries, keys = mx.split(heads, [self._heads], axis=1)
        cache.write(cache.packing, mx.stack([keys, v.reshape(keys.shape)], axis=1))
        attended = cache.attend_token(cache.packing, queries)
        if attended is None:
            attended = cache.attend(cache.packing, queries, 1.0).flatten(1)
        return mx.addmm(x, cpu.gated(attended, gate), self._out)


class _MLP:
    def __init__(self, mlp: Any) -> None:
        self._project = _Product(mlp.gate_proj.weight.T, mlp.up_proj.weight.T)
        self._down = _by_input(mlp.down_proj.weight)

    def add(self, x: mx.array, normed: mx.array) -> mx.array:
        return mx.addmm(x, swiglu(*self._project(normed)), self._down)


class _Mixture:
    def __init__(self, mlp: Any) -> None:
        shared, experts = mlp.shared_expert, mlp.switch_mlp
        layers = mlp.gate, mlp.shared_expert_gate, shared.gate_proj, shared.up_proj
        self._project = _Product(*(layer.weight.T for layer in layers))
        pair = [experts.gate_proj.weight, experts.up_proj.weight]
        self._experts = _by_input(mx.concatenate(pair, axis=1)), _by_input(experts.down_proj.weight)
        self._down = _by_input(shared.down_proj.weight)
        self._router = cpu.Router(mlp.top_k, mlp.norm_topk_prob)

    def add(self, x: mx.array, normed: mx.array) -> mx.array:
        parts = self._project(normed)
        return cpu.add_mixture(x, normed, parts, self._experts, self._down, self._router)
