"""Spans of layers: on a GPU the host builds the graph of each span by one compiled call.

Only where an attention layer uses its KV cache does a pass depend on more than arrays. So a span
has the rest of one attention layer, the recurrent layers that follow, and the beginning of the next
attention layer.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.cache.gated_delta import CacheArrays
from mlx_mtp.cache.packing import KeptCounts, Pass, Rectangle
from mlx_mtp.models.compiled import compiled


class Span(nn.Module):
    """Consecutive `SplitLayer`s: `attended` from its `after` on, and `attention` up to its cache.

    `norms` are the norms after `attended` and after each recurrent layer.
    """

    def __init__(
        self,
        attended: nn.Module | None,
        recurrent: Sequence[nn.Module],
        attention: nn.Module | None,
        norms: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        self.attended, self.attention, self.num_recurrent = attended, attention, len(recurrent)
        self.num_caches = len(recurrent) + (attention is not None)
        for kind, modules in (("layer", recurrent), ("norm", norms)):
            for number, module in enumerate(modules):
                self[f"{kind}{number}"] = module

    def forward(
        self,
        x: mx.array,
        normed: mx.array,
        mixed: Sequence[mx.array],
        where: Pass,
        caches: Sequence[Sequence[Any]],
    ) -> tuple[mx.array, mx.array, Sequence[mx.array]]:
        """Returns x and x normed, both [N, H], and `RaggedAttention.mix` of the attention.

        Takes these results of the span before, and the caches, by layer and batch, of the recurrent
        layers and of the attention.
        """
        held = [[cache.arrays for cache in own] for own in caches[: self.num_recurrent]]
        positions, _, *windows = where
        x, normed, inputs, now = self._run(x, normed, mixed, positions, *windows, held)
        for own, arrays in zip(caches, now):
            for cache, each in zip(own, arrays):
                cache.arrays = each
        if inputs:
            mixed = self["attention"].mix(inputs, where.packings, caches[-1])
        return x, normed, mixed

    def run(
        self,
        x: mx.array,
        normed: mx.array,
        mixed: Sequence[mx.array],
        positions: mx.array,
        orders: Sequence[Rectangle],
        kept: Sequence[KeptCounts],
        held: Sequence[Sequence[CacheArrays]],
    ) -> tuple[mx.array, mx.array, tuple[mx.array, ...], list[tuple[CacheArrays, ...]]]:
        """The part of `forward` that depends on arrays alone.

        Returns x, x normed, the inputs of the attention, and the new arrays of the caches.
        """
        norms = (self[f"norm{number}"].weight for number in itertools.count())
        if self.attended is not None:
            x, normed = self.attended.after(x, next(norms), *mixed)
        now = []
        for number, arrays in enumerate(held):
            layer = self[f"layer{number}"]
            x, normed, each = layer.recur(x, normed, next(norms), orders, kept, arrays)
            now.append(each)
        inputs = () if self.attention is None else self.attention.before(normed, positions)
        return x, normed, inputs, now

    @cached_property
    def _run(self) -> Any:
        return compiled(self, "run")


def spans_of(layers: Sequence[nn.Module], norms_after: Sequence[nn.Module]) -> Iterator[Span]:
    """Yields the spans of a model's layers; `norms_after` are the norms that follow each layer."""
    attended, recurrent, norms = None, list[nn.Module](), list[nn.Module]()
    for layer, norm in zip(layers, norms_after, strict=True):
        if layer.is_linear:
            recurrent.append(layer)
        else:
            yield Span(attended, recurrent, layer.self_attn, norms)
            attended, recurrent, norms = layer, [], []
        norms.append(norm)
    yield Span(attended, recurrent, None, norms)
