"""The layers that mlx-lm's model is patched with; they run on this package's caches.

The host takes longer to build a layer's graph than a GPU takes to run it in a step of few tokens,
and a third of the GPU's time for a prompt's chunk. So on a GPU mlx compiles the parts of layers
before and after attention's cache, which depend on their arguments alone (see `spans`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from mlx_mtp.cache.gated_delta import CacheArrays, GatedDeltaCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.packing import KeptCounts, Packing, Pass, Rectangle
from mlx_mtp.distributed import all_reduce
from mlx_mtp.kernels import norms, residual
from mlx_mtp.kernels.gdn_types import GDNProjections, ShortConvWeights
from mlx_mtp.kernels.gpu import backend
from mlx_mtp.kernels.view import Operand, View, column_view, to_array
from mlx_mtp.models.gemm.routes import project
from mlx_mtp.models.joined import JoinedLayer, can_be_joined
from mlx_mtp.models.moe import add_mlp


@dataclass(frozen=True)
class Sections:
    """M-RoPE: how many frequencies rotate by an image token's row, and how many by its column.

    They are interleaved (time, row, column, time, ..); the remaining ones rotate by time.
    """

    rows: int
    columns: int

    def axes(self, rotated: int, dim: int) -> list[int]:
        """Returns what each of `dim` dimensions rotates by: 0 for time, 1 for row, 2 for column.

        RoPE rotates only the first `rotated` dimensions; the others have 0.
        """
        ends = 0, 3 * self.rows, 3 * self.columns
        half = [i % 3 if i < ends[i % 3] else 0 for i in range(rotated // 2)]
        return [*half, *half, *[0] * (dim - rotated)]


class RaggedAttention(Qwen3NextAttention):
    """Attention of the windows of all rows on a `RaggedKVCache`. `__call__` is still mlx-lm's."""

    sections: Sections  # set only if the model takes images
    queries_apart = False  # True in the MTP head, which computes queries later than keys and values
    batch_invariant = False  # True in exact mode (see `gemm.exact.make_batch_invariant`)

    @property
    def stacked(self) -> tuple[str, ...]:
        """Names of the layers that `gemm.stacks` stacks."""
        return ("q_proj", "k_proj", "v_proj")[self.queries_apart :]

    def before(self, x: mx.array, positions: mx.array) -> tuple[mx.array, ...]:
        """Returns queries [N, heads, D], `doubled` and the KV entries of tokens x [N, H].

        `positions` is int32 [N], or [N, 3] with images: time, row and column. Each projection is
        one product over the tokens of all rows.
        """
        products = project(x, self.q_proj, self.k_proj, self.v_proj)
        doubled, keys, values = products.views()
        queries, entries = self._rotated(positions, self.halves(doubled)[0], keys, values)
        return queries, doubled.array, entries

    def mix(
        self,
        inputs: tuple[mx.array, ...],
        packings: Sequence[Packing],
        caches: Sequence[RaggedKVCache],
    ) -> tuple[mx.array, mx.array]:
        """Write the entries to the caches; returns the attention [N, heads, D] and `doubled`."""
        queries, doubled, entries = inputs
        exact = self.batch_invariant
        if len(caches) == 1:  # The host has no time to spare in the usual pass.
            given = packings[0], entries, queries, self.scale, exact
            return caches[0].write_and_attend(*given), doubled
        own = _split([queries, entries], [packing.num_tokens for packing in packings])
        outputs = []
        for cache, packing, (mine, new) in zip(caches, packings, own, strict=True):
            given = packing, new, mine, self.scale, exact
            outputs.append([cache.write_and_attend(*given)])
        (attended,) = _joined(outputs)
        return attended, doubled

    def after(self, attended: mx.array, doubled: mx.array) -> mx.array:
        """Returns the output projection of the gated attention, [N, H]."""
        _, heads, dim = attended.shape
        shape = norms.NormShape(dim, self.q_norm.eps, heads)
        return all_reduce(self.o_proj(norms.GATE(shape, attended, self.halves(doubled)[1])[0]))

    def entries(self, x: mx.array, positions: mx.array) -> mx.array:
        """Returns the keys and values to cache of tokens x [N, H], [N, 2, KV heads, D]."""
        products = project(x, self.k_proj, self.v_proj)
        entries: mx.array = self._rotated(positions, None, *products.views())[1]
        return entries

    def queries(self, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Returns only the queries and `doubled` of `before`."""
        doubled = self.q_proj(x)
        return self._rotated(positions, self.halves(doubled)[0])[0], doubled

    def halves(self, doubled: Operand) -> tuple[View, View]:
        """Returns queries and gate, each [N, heads, D].

        They are the first columns of `doubled`, the output of `q_proj` or of its stack.
        """
        rows, dim = doubled.shape[:1], self.head_dim
        shape = self.num_attention_heads, dim
        queries, gate = (column_view(doubled, rows, first, 2 * dim, shape) for first in (0, dim))
        return queries, gate

    def _rotated(
        self, positions: mx.array, queries: Operand | None, *projected: Operand
    ) -> list[Any]:
        """Returns queries [N, heads, D] and KV entries; queries and keys are normed and rotated.

        This is one launch if the kernel `norms.ROTATE` works here.
        """
        if positions.ndim == 2:
            # Once for each of the three axes, so that text tokens get the bits that they have in
            # passes without images.
            turned = [self._rotated(positions[:, a], queries, *projected) for a in range(3)]
            axis = mx.array(self.sections.axes(self.rope.dims, self.head_dim))
            return [
                None
                if time is None
                else mx.where(axis == 0, time, mx.where(axis == 1, row, column))
                for time, row, column in zip(*turned)
            ]
        heads = self.num_attention_heads, self.num_key_value_heads
        dim = self.head_dim
        entries = [column_view(x, x.shape[:1], 0, dim, (heads[1], dim)) for x in projected]
        rope = self.rope
        if type(rope) is nn.RoPE and not rope.traditional:
            angles = rope.dims, rope.base, rope.scale
            shape = norms.NormShape(self.head_dim, self.q_norm.eps, *heads, *angles)
            weights = self.q_norm.weight, self.k_norm.weight
            if norms.ROTATE.works(shape, weights[0].dtype):
                return norms.rotate(shape, queries, entries, *weights, positions)
        if queries is not None:
            queries = self._turned(self.q_norm(to_array(queries)), positions)
        if not entries:
            return [queries, None]
        keys, values = map(to_array, entries)
        return [queries, mx.stack([self._turned(self.k_norm(keys), positions), values], axis=1)]

    def _turned(self, x: mx.array, positions: mx.array) -> mx.array:
        """Returns x [N, heads, D] rotated by mlx's RoPE."""
        most = len(x)
        if backend() == "cuda" and getattr(self.rope, "dims", 32) < 32:
            most = min(64, 256 // x.shape[1])  # With more tokens a launch fails.
        parts = [slice(at, at + most) for at in range(0, len(x), most)]
        turned = [self.rope(x[part, :, None], offset=positions[part]) for part in parts]
        return (turned[0] if len(turned) == 1 else mx.concatenate(turned)).squeeze(2)


class WindowedGatedDeltaNet(nn.Module):
    """Mixin over an mlx-lm GatedDeltaNet class that runs windows on a `GatedDeltaCache`."""

    stacked: tuple[str, ...]  # names of the input projections

    def unpack_projections(
        self, parts: Sequence[Operand], order: Rectangle
    ) -> tuple[GDNProjections, View]:
        """Returns q, k, v, a and b, all [B, T, ..], and the gate of the layer's output,
        z [B * T, Hk, R, Dv], from the projections' outputs `parts`, [B * T, ..].
        """
        raise NotImplementedError

    def mix(
        self,
        x: mx.array,
        orders: Sequence[Rectangle],
        kept: Sequence[KeptCounts],
        caches: Sequence[GatedDeltaCache],
    ) -> mx.array:
        """Run the recurrences of all caches; returns the normed and gated outputs [N, Hv * Dv]."""
        convolution = ShortConvWeights(self.conv1d.weight, self.A_log, self.dt_bias)
        products = project(x, *(self[name] for name in self.stacked))
        parts = _split(products.arrays, [order.num_tokens for order in orders])
        outputs = []
        for own, order, counts, cache in zip(parts, orders, kept, caches, strict=True):
            columns = products.views([order.padded(each) for each in own])
            arranged, z = self.unpack_projections(columns, order)
            gate = z, self.norm.weight, self.norm.eps
            gated = cache.run_gated(arranged, convolution, counts, *gate)
            outputs.append([order.unpadded(gated)])
        (gated,) = _joined(outputs)
        return gated

    def after(self, gated: mx.array) -> mx.array:
        """Returns the output projection, [N, H]."""
        return all_reduce(self.out_proj(gated))


class SplitLayer(nn.Module):
    """Mixin over an mlx-lm decoder layer; its `forward` runs tokens on this package's caches.

    The tokens of several batches, each with its own cache, are concatenated. `forward` takes the
    residual stream x, [N, H], and x after this layer's first norm; it returns the new x, and the
    new x after the next layer's first norm. So a sum and the norm that follows it are one launch.
    """

    def forward(
        self,
        x: mx.array,
        normed: mx.array,
        next_norm: mx.array,
        where: Pass,
        caches: Sequence[Any],
    ) -> Sequence[mx.array]:
        """Returns the layer's output [N, H], and the output normed with the weight `next_norm`.

        This is the reference of `spans`, and runs all layers on a CPU.
        """
        if backend() is None and self._joined is not None:
            return self._joined.forward(x, normed, next_norm, where, caches)
        if self.is_linear:
            held = [cache.arrays for cache in caches]
            x, normed, now = self.recur(x, normed, next_norm, where.orders, where.kept, held)
            for cache, each in zip(caches, now, strict=True):
                cache.arrays = each
            return x, normed
        inputs = self.self_attn.before(normed, where.positions)
        return self.after(x, next_norm, *self.self_attn.mix(inputs, where.packings, caches))

    def recur(
        self,
        x: mx.array,
        normed: mx.array,
        next_norm: mx.array,
        orders: Sequence[Rectangle],
        kept: Sequence[KeptCounts],
        held: Sequence[CacheArrays],
    ) -> tuple[mx.array, mx.array, tuple[CacheArrays, ...]]:
        """`forward` of a layer with a recurrence; also returns the new arrays of its caches."""
        caches = [GatedDeltaCache.of(each) for each in held]
        gated = self.linear_attn.mix(normed, orders, kept, caches)
        x, normed = self.after(x, next_norm, gated)
        return x, normed, tuple(cache.arrays for cache in caches)

    def after(self, x: mx.array, next_norm: mx.array, *mixed: mx.array) -> list[mx.array]:
        """Run the part of the layer after its cache, the MLP included."""
        norm = self.post_attention_layernorm
        width = norms.NormShape(x.shape[-1], norm.eps)
        attended = (self.linear_attn if self.is_linear else self.self_attn).after(*mixed)
        (normed,) = residual.SUM_NORM(width, x, attended, norm.weight)
        return add_mlp(x, attended, normed, self.mlp, next_norm, norm.eps)

    @cached_property
    def _joined(self) -> JoinedLayer | None:
        return JoinedLayer(self) if can_be_joined(self) else None


def _split(arrays: Sequence[mx.array], counts: Sequence[int]) -> Iterator[Sequence[mx.array]]:
    """Yields the slices of arrays [N, ..] of each batch, by the batches' numbers of tokens."""
    first = 0
    for count in counts:
        yield arrays if len(counts) == 1 else [a[first : first + count] for a in arrays]
        first += count


def _joined(parts: Sequence[Sequence[mx.array]]) -> Sequence[mx.array]:
    """Concatenate the batches' arrays to [N, ..]."""
    return parts[0] if len(parts) == 1 else [mx.concatenate([*own]) for own in zip(*parts)]
