"""The caches of all layers of one batch, which advance together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.layout import Layout
from mlx_mtp.cache.packing import KeptCounts, Packing
from mlx_mtp.cache.specs import AttentionSpec, LayerSpec

LayerCache = RaggedKVCache | GatedDeltaCache


class BatchCache:
    """The caches of all layers for B rows; row b holds `offset[b]` tokens (int32 [B]).

    A forward pass is `reserve`, `begin_window`, the model, `commit`.
    """

    window: Packing  # of the current pass

    def __init__(self, layers: Sequence[LayerCache], num_rows: int) -> None:
        self.layers: list[LayerCache] = list(layers)
        self.head: RaggedKVCache | None = None  # KV of the MTP head, in the same layout
        self.layout = Layout(num_rows)
        self.offset = mx.zeros(num_rows, dtype=mx.int32)
        # int32 [B], positions of the last window that each row keeps; None: nothing is pending.
        self.num_kept: mx.array | None = None
        # int32 [B], what is added to an index in a row's KV to get the RoPE position after the
        # row's images; None if no row has images.
        self.shift: mx.array | None = None

    @classmethod
    def of(cls, specs: Sequence[LayerSpec], num_rows: int, dtype: mx.Dtype) -> BatchCache:
        """Returns empty caches for the layers `specs`."""
        layers: list[LayerCache] = [
            RaggedKVCache()
            if isinstance(spec, AttentionSpec)
            else GatedDeltaCache(num_rows, spec.shape, dtype)
            for spec in specs
        ]
        return cls(layers, num_rows)

    def reserve(self, limits: Sequence[int], rooms: Sequence[int] | None = None) -> None:
        """Make room for the tokens that each row will hold. Call before every pass.

        Otherwise writes could reach into the next row. `limits` are upper bounds of the rows'
        lengths after the pass; `rooms` are the lengths to allocate, if larger.
        """
        if moves := self.layout.arrange(limits, rooms or limits):
            for cache in self.kv_caches():
                cache.rearrange(self.layout, moves)

    def begin_window(
        self,
        lengths: Sequence[int],
        kept: mx.array | None = None,
        ends: Sequence[int] | None = None,
    ) -> Packing:
        """Prepare for a window of `lengths[b]` reserved tokens per row; returns its packing.

        `kept`, int32 [B], is the number of tokens that each row will keep; None if verification
        decides it. `ends` are the rows' lengths after the window, if the host knows them.
        """
        self.window = self.packing(self.offset, lengths)
        self.window.ends, self.window.kept = ends, KeptCounts(self.num_kept, kept)
        return self.window

    def packing(self, start: mx.array, lengths: Sequence[int]) -> Packing:
        """Returns a packing of `lengths[b]` tokens per row, from position `start[b]` on."""
        return Packing(self.layout, start, lengths, self.shift)

    def commit(self, num_kept: mx.array) -> None:
        """Keep the first `num_kept[b]` positions of the last window; int32 [B]."""
        self.offset = self.offset + num_kept
        dropped = self.window.kept.drops_history(self.window.longest)
        self.num_kept = None if dropped else num_kept
        del self.window  # Its masks are large.

    def fold(self) -> None:
        """Fold what is kept of the last window into the recurrent states."""
        for cache in self.layers:
            if isinstance(cache, GatedDeltaCache):
                cache.fold(self.num_kept)
        self.num_kept = None

    def select(self, rows: list[int]) -> BatchCache:
        """Returns the caches of these rows; their KV is not copied until it is written."""
        where = mx.array(rows, dtype=mx.int32)
        self.fold()
        selected = copy.copy(self)
        selected.layout, copies = self.layout.select(rows)
        selected.offset = self.offset[where]
        selected.shift = None if self.shift is None else self.shift[where]
        selected.layers = [
            c.select(where) if isinstance(c, GatedDeltaCache) else c.select(copies)
            for c in self.layers
        ]
        selected.head = self.head and self.head.select(copies)
        return selected

    def extend(self, other: BatchCache) -> None:
        self.fold()  # Their windows may differ in length.
        other.fold()
        if self.shift is not None or other.shift is not None:
            shifts = [
                mx.zeros_like(c.offset) if c.shift is None else c.shift for c in (self, other)
            ]
            self.shift = mx.concatenate(shifts)
        self.offset = mx.concatenate([self.offset, other.offset])
        self.layout.extend(other.layout)
        pairs = [*zip(self.layers, other.layers, strict=True), (self.head, other.head)]
        for mine, theirs in pairs:
            assert type(mine) is type(theirs)
            if mine is not None:
                mine.extend(theirs)  # type: ignore[arg-type]

    def arrays(self) -> list[Any]:
        """Returns all arrays, in a tree: a flat list would take the host longer to make."""
        rows = [self.offset, self.shift, self.num_kept]
        layers = [*self.layers, self.head] if self.head is not None else self.layers
        return [rows, [cache.arrays for cache in layers]]

    def kv_caches(self) -> list[RaggedKVCache]:
        """Returns the KV caches of all layers and of the head."""
        return [c for c in (*self.layers, self.head) if isinstance(c, RaggedKVCache)]
