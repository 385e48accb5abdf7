"""All layers' caches of one batch, advanced together."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.cache.kv import RaggedKVCache

LayerCache = RaggedKVCache | GatedDeltaCache


class BatchCache:
    """The layers' caches of B rows of `offset` tokens; a pass is `begin`, the model, `commit`."""

    def __init__(self, layers: list[LayerCache], batch_size: int) -> None:
        self.layers = layers
        self.offset = mx.zeros(batch_size, dtype=mx.int32)

    def begin(self, limit: int, lengths: mx.array | None = None) -> None:
        """Prepare for a window; `limit` is at least every row's length plus the window's.

        `lengths`, int32 [B], is how much of it each row will keep; None for a verify window.
        """
        for cache in self.layers:
            if isinstance(cache, RaggedKVCache):
                cache.reserve(limit)
            else:
                cache.coming = lengths

    def reserve_more(self, more: int) -> None:
        """Make room for padding positions after the window, which are never kept."""
        for cache in self.layers:
            if isinstance(cache, RaggedKVCache):
                cache.reserve(cache.limit + more)

    def commit(self, num_kept: mx.array) -> None:
        """Keep the first `num_kept[b]` positions of the window that just ran (int32 [B])."""
        self.offset = self.offset + num_kept
        for cache in self.layers:
            if isinstance(cache, RaggedKVCache):
                cache.offset = self.offset
            elif cache.coming is None:
                cache.num_kept = num_kept

    def select(self, rows: mx.array) -> BatchCache:
        selected = BatchCache([cache.select(rows) for cache in self.layers], rows.shape[0])
        selected.offset = self.offset[rows]
        return selected

    def extend(self, other: BatchCache) -> None:
        self.offset = mx.concatenate([self.offset, other.offset])
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            assert type(mine) is type(theirs)
            mine.extend(theirs)  # type: ignore[arg-type]

    def arrays(self) -> Iterator[mx.array]:
        yield self.offset
        for cache in self.layers:
            yield from cache.arrays()

    def __getitem__(self, index: int) -> LayerCache:
        return self.layers[index]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)
