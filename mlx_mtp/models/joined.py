"""A second form of a small model's layers, with fewer and larger operations, for the CPU.

On a CPU a step of few tokens takes as long as mlx's overhead for its operations, whatever they
compute (`kernels.cpu`). So products of one input are joined. Joined weights are copies: large
layers are not joined, as reading their weights takes longer than this overhead.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.packing import Packing, Pass, Rectangle
from mlx_mtp.distributed import world
from mlx_mtp.kernels import cpu
from mlx_mtp.kernels.activations import sigmoid_times, silu_times
from mlx_mtp.kernels.gdn_types import GDNProjections, GDNShape, ShortConvWeights
from mlx_mtp.kernels.gpu import LONGEST_WINDOW, backend
from mlx_mtp.kernels.topk import Router
from mlx_mtp.kernels.view import to_array, to_arrays


def can_be_joined(module: nn.Module) -> bool:
    """Returns whether a layer or an MTP head is small, has float32 weights, and runs on one CPU."""
    arrays, parts = tree_flatten(module.parameters()), module.modules()
    ropes = [part.rope for part in parts if "rope" in part]
    plain = all(type(rope) is nn.RoPE and not rope.traditional for rope in ropes)
    plain = plain and not any("scales" in part or "bias" in part for part in parts)
    plain = plain and all(a.dtype == mx.float32 for name, a in arrays if not name.endswith("A_log"))
    small = sum(array.nbytes for _, array in arrays) <= cpu.MOST_BYTES
    return plain and small and backend() is None and world().size == 1


class JoinedLayer:
    """Computes what `SplitLayer.forward` does; the results differ only by the order of sums."""

    def __init__(self, layer: Any) -> None:
        mixer = layer.linear_attn if layer.is_linear else layer.self_attn
        self.mixer: Any = _RecurrentMixer(mixer) if layer.is_linear else _AttentionMixer(mixer)
        is_mixture = type(layer.mlp) is Qwen3NextSparseMoeBlock
        self._mlp: Any = _Mixture(layer.mlp) if is_mixture else _DenseMLP(layer.mlp)
        self._norm = layer.post_attention_layernorm

    def forward(
        self,
        x: mx.array,
        normed: mx.array,
        next_norm: mx.array,
        where: Pass,
        caches: Sequence[Any],
    ) -> tuple[mx.array, mx.array]:
        x = self.mixer.add(x, normed, where, caches)
        return self.after(x, next_norm)

    def after(self, x: mx.array, next_norm: mx.array) -> tuple[mx.array, mx.array]:
        x = self._mlp.add(x, cpu.rms_norm(x, self._norm.weight, self._norm.eps))
        return x, cpu.rms_norm(x, next_norm, self._norm.eps)


class JoinedHead:
    """Computes what `MTPHead.write` and `MTPHead.run_layer` do."""

    def __init__(self, head: Any) -> None:
        (layer,) = head.layers
        self._layer = JoinedLayer(layer)
        self._first_norm, self._last_norm = layer.input_layernorm, head.norm
        self._norms = head.pre_fc_norm_embedding, head.pre_fc_norm_hidden
        self._fc = _by_input(head.fc.weight)

    def write(
        self, embeddings: mx.array, hidden: mx.array, cache: RaggedKVCache, packing: Packing
    ) -> mx.array:
        pairs = zip((embeddings, hidden), self._norms, strict=True)
        parts = [cpu.rms_norm(x, norm.weight, norm.eps) for x, norm in pairs]
        z: mx.array = mx.concatenate(parts, axis=-1) @ self._fc
        cache.write(packing, self._layer.mixer.entries(self._normed(z), packing.rope_positions))
        return z

    def run_layer(self, z: mx.array, cache: RaggedKVCache, packing: Packing) -> mx.array:
        mixer = self._layer.mixer
        queries, gate = mixer.queries(self._normed(z), packing.rope_positions)
        x = mixer.output(z, mixer.attend(queries, cache, packing), gate)
        return self._layer.after(x, self._last_norm.weight)[1]

    def _normed(self, z: mx.array) -> mx.array:
        return cpu.rms_norm(z, self._first_norm.weight, self._first_norm.eps)


class _Product:
    """Several products of one input, computed as one; each weight is [inputs, outputs]."""

    def __init__(self, *weights: mx.array) -> None:
        self._weight = _by_input(mx.concatenate([w.T for w in weights]))
        self._ends = [*accumulate(weight.shape[1] for weight in weights[:-1])]

    def __call__(self, x: mx.array) -> list[mx.array]:
        joined: mx.array = x @ self._weight
        return list(mx.split(joined, self._ends, axis=-1))


def _by_input(weight: mx.array) -> mx.array:
    """Returns a copy of a weight [.., outputs, inputs] as [.., inputs, outputs].

    Steps need not transpose the copy, and OpenBLAS multiplies few rows by it up to three times as
    fast.
    """
    copy = mx.contiguous(weight.swapaxes(-1, -2))
    mx.eval(copy)
    return copy


class _RecurrentMixer:
    def __init__(self, mixer: Any) -> None:
        self._shape = GDNShape(
            mixer.num_k_heads,
            mixer.head_k_dim,
            mixer.num_v_heads,
            mixer.head_v_dim,
            mixer.conv_kernel_size,
        )
        weights = [mixer[name].weight.T for name in mixer.stacked]
        inputs = len(weights[0])
        # `unpack_projections` only selects and reshapes outputs, so it also splits the transposed
        # weights: each input feature takes the place of a token.
        order = Rectangle(inputs, inputs, 1, None, None)
        projected, z = mixer.unpack_projections(weights, order)
        q, k, v, a, b = to_arrays(projected)
        heads = [each.reshape(inputs, -1) for each in (q, k, v, to_array(z), a, b)]
        self._project = _Product(mx.concatenate(heads[:3], axis=1), *heads[3:])
        self._convolution = ShortConvWeights(mixer.conv1d.weight, mixer.A_log, mixer.dt_bias)
        self._weights = cpu.TokenWeights.of(self._shape, self._convolution)
        self._norm, self._out = mixer.norm, _by_input(mixer.out_proj.weight)

    def add(self, x: mx.array, normed: mx.array, where: Pass, caches: Sequence[Any]) -> mx.array:
        qkv, z, *gates = self._project(normed)
        first, outputs = 0, []
        for cache, order, kept in zip(caches, where.orders, where.kept, strict=True):
            tokens = slice(first, first := first + order.num_tokens)
            own = (each if len(caches) == 1 else each[tokens] for each in (qkv, *gates))
            rectangles = [order.fill(each) for each in own]
            y = cache.run_few(*rectangles, self._weights, kept)
            if y is None:
                y = cache.run_window(self._apart(*rectangles), self._convolution, kept)
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


class _AttentionMixer:
    def __init__(self, mixer: Any) -> None:
        self._mixer, self._out = mixer, _by_input(mixer.o_proj.weight)
        self._num_heads = mixer.num_attention_heads
        doubled, k, v = (mixer[name].weight.T for name in ("q_proj", "k_proj", "v_proj"))
        q, gate = (to_array(each).reshape(len(k), -1) for each in mixer.halves(doubled))
        # The weights of the queries' norm also include the scale of the scores.
        of_q, of_k = (
            mx.repeat(weight[None], count, axis=0)
            for weight, count in (
                (mixer.q_norm.weight * mixer.scale, mixer.num_attention_heads),
                (mixer.k_norm.weight, mixer.num_key_value_heads),
            )
        )
        both = mx.concatenate([of_q, of_k]), mx.concatenate([q, k], axis=1)
        self._all = self._part(*both, v, gate)
        self._queries, self._entries = self._part(of_q, q, gate), self._part(of_k, k, v)

    def _part(self, norms: mx.array, *weights: mx.array) -> tuple["_Product", cpu.HeadNorms]:
        """Returns a joined product, and the norms of the heads that its first result consists of.

        `norms` are the weights of these norms, [heads, D].
        """
        mx.eval(norms)
        rope = self._mixer.rope
        turn = rope.dims, rope.base, rope.scale
        return _Product(*weights), cpu.HeadNorms(norms, self._mixer.q_norm.eps, *turn)

    def add(self, x: mx.array, normed: mx.array, where: Pass, caches: Sequence[Any]) -> mx.array:
        positions, packings = where.positions, where.packings
        if positions.ndim > 1 or len(caches) > 1:
            inputs = self._mixer.before(normed, positions)
            attended, doubled = self._mixer.mix(inputs, packings, caches)
            gate = to_array(self._mixer.halves(doubled)[1])
            return self.output(x, attended.flatten(1), gate.flatten(1))
        heads, v, gate = _heads(self._all, normed, positions)
        queries, keys = mx.split(heads, [self._num_heads], axis=1)
        (cache,), (packing,) = caches, packings
        cache.write(packing, _stacked(keys, v))
        return self.output(x, self.attend(queries, cache, packing), gate)

    def entries(self, normed: mx.array, positions: mx.array) -> mx.array:
        return _stacked(*_heads(self._entries, normed, positions))

    def queries(self, normed: mx.array, positions: mx.array) -> list[mx.array]:
        return _heads(self._queries, normed, positions)

    def attend(self, queries: mx.array, cache: RaggedKVCache, packing: Packing) -> mx.array:
        """Returns the attention outputs, [N, heads * D]."""
        if packing.longest <= LONGEST_WINDOW:
            attended = cache.attend_on_cpu(packing, queries)
        else:  # All scores at once would need much memory.
            attended = cache.attend(packing, queries, 1.0)
        return attended.flatten(1)

    def output(self, x: mx.array, attended: mx.array, gate: mx.array) -> mx.array:
        return mx.addmm(x, sigmoid_times(gate, attended), self._out)


def _heads(
    part: tuple["_Product", cpu.HeadNorms], x: mx.array, positions: mx.array
) -> list[mx.array]:
    product, norms = part
    heads, *others = product(x)
    heads = heads.reshape(len(x), *norms.weights.shape)
    return [cpu.turned_heads(heads, norms, positions), *others]


def _stacked(keys: mx.array, values: mx.array) -> mx.array:
    return mx.stack([keys, values.reshape(keys.shape)], axis=1)


class _DenseMLP:
    def __init__(self, mlp: Any) -> None:
        self._project = _Product(mlp.gate_proj.weight.T, mlp.up_proj.weight.T)
        self._down = _by_input(mlp.down_proj.weight)

    def add(self, x: mx.array, normed: mx.array) -> mx.array:
        return mx.addmm(x, silu_times(*self._project(normed)), self._down)


class _Mixture:
    def __init__(self, mlp: Any) -> None:
        shared, experts = mlp.shared_expert, mlp.switch_mlp
        layers = mlp.gate, mlp.shared_expert_gate, shared.gate_proj, shared.up_proj
        self._project = _Product(*(layer.weight.T for layer in layers))
        pair = [experts.gate_proj.weight, experts.up_proj.weight]
        self._experts = _by_input(mx.concatenate(pair, axis=1)), _by_input(experts.down_proj.weight)
        self._down = _by_input(shared.down_proj.weight)
        self._router = Router(mlp.num_experts, mlp.top_k, mlp.norm_topk_prob)

    def add(self, x: mx.array, normed: mx.array) -> mx.array:
        parts = self._project(normed)
        return cpu.add_mixture(x, normed, parts, self._experts, self._down, self._router)
