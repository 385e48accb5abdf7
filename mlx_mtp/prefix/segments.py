"""What a cached prefix holds, as named arrays: copied out of a batch's caches and back into them.

A segment is the KV of a run of tokens. A snapshot is a segment without tokens: all else that
decoding needs after those before it. Names are those of the parts: `layers.3.keys`, `mtp.keys`,
`layers.0.state` (float32 [Hv, Dv, Dk]), `layers.0.history` (the last inputs of the convolution,
[K-1, C]), and `hidden` [H], the trunk's post-norm hidden state of the last token.

The head's row p joins the hidden state at p with the token at p+1, so n tokens determine its rows
0 to n-2: the head's KV of a segment lies one row before the trunk's. Row n-1 is written when the
prefix is used, from the snapshot's hidden state and the token that follows then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.cache.kv import RaggedKVCache

Arrays = dict[str, mx.array]
_Cache = TypeVar("_Cache", RaggedKVCache, GatedDeltaCache)

_HEAD = "mtp"
_HIDDEN = "hidden"
_KV = ("keys", "values")
_GROUP_SIZES = (64, 32)
_PARTS = ("packed", "scales", "biases")


@dataclass(frozen=True, slots=True)
class Segment:
    """KV of the tokens `start` to `end` of a prefix, or the snapshot there."""

    start: int
    end: int
    arrays: Arrays  # keys and values, each [heads, rows, dim], or the three quantized parts of it
    bits: int | None = None  # of what is quantized; None: nothing is

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())

    def cut(self, start: int, end: int) -> Segment:
        arrays = Arrays()
        for name, array in self.arrays.items():
            first = _row(name, self.start)
            rows = slice(_row(name, start) - first, _row(name, end) - first)
            arrays[name] = mx.contiguous(array[:, rows])
        mx.async_eval(arrays)
        return Segment(start, end, arrays, self.bits)


Entry = list[Segment]
"""The KV of a prefix in its order, if any, and the snapshot at its end."""


def join_segments(segments: Sequence[Segment], start: int) -> Segment:
    """The rows of consecutive segments from the token `start` of the first on, as one segment."""
    first, last = segments[0], segments[-1]
    assert first.start <= start < last.end
    if len(segments) == 1 and start == first.start:
        return first
    arrays = Arrays()
    for name in last.arrays:
        # Of the first token alone the head has no row yet: that array is empty, and not quantized.
        parts = [s.arrays[name] for s in segments if name in s.arrays]
        parts[0] = parts[0][:, _row(name, start) - _row(name, first.start) :]
        arrays[name] = mx.concatenate(parts, axis=1)
    return Segment(start, last.end, arrays, last.bits)


def take_segment(batch: BatchCache, row: int, start: int, end: int, bits: int | None) -> Segment:
    """Copy the KV of a row's tokens `start` to `end`, in `bits`; the head's is one row behind."""
    arrays = Arrays()
    for name, cache in _caches(RaggedKVCache, batch):
        rows = slice(_row(name, start), _row(name, end))
        for part, whole in zip(_KV, cache.row(batch.layout.places[row])):
            # Contiguous, so that the batch's whole buffer isn't kept alive.
            copied = mx.contiguous(whole[:, rows])
            arrays.update(_stored(f"{name}.{part}", copied, bits))
    return Segment(start, end, arrays, bits)


def take_snapshot(batch: BatchCache, row: int, end: int, hidden: mx.array) -> Segment:
    """Copy a row's states as they are after its token `end`; `hidden` is [B, 1, H]."""
    arrays = Arrays({_HIDDEN: mx.contiguous(hidden[row, 0])})
    for name, cache in _caches(GatedDeltaCache, batch):
        cache.fold()
        arrays[f"{name}.state"] = mx.contiguous(cache.state[row])
        arrays[f"{name}.history"] = mx.contiguous(cache.history[row])
    return Segment(end, end, arrays)


def restore(batch: BatchCache, rows: Sequence[Entry]) -> mx.array:
    """Fill empty caches with a prefix for each row; returns the last hidden states, [B, 1, H]."""
    batch.offset = mx.array([entry[-1].end for entry in rows], dtype=mx.int32)
    for name, cache in _caches(RaggedKVCache, batch):
        for place, entry in zip(batch.layout.places, rows, strict=True):
            for segment in entry[:-1]:
                keys, values = (_loaded(segment, f"{name}.{part}") for part in _KV)
                cache.put(place, _row(name, segment.start), keys, values)
    snapshots = [entry[-1].arrays for entry in rows]
    for name, recurrent in _caches(GatedDeltaCache, batch):
        recurrent.state = mx.stack([s[f"{name}.state"] for s in snapshots])
        recurrent.history = mx.stack([s[f"{name}.history"] for s in snapshots])
    return mx.stack([s[_HIDDEN] for s in snapshots])[:, None]


def _caches(kind: type[_Cache], batch: BatchCache) -> list[tuple[str, _Cache]]:
    named = [(f"layers.{index}", cache) for index, cache in enumerate(batch.layers)]
    named += [] if batch.head is None else [(_HEAD, batch.head)]
    return [(name, cache) for name, cache in named if isinstance(cache, kind)]


def _row(name: str, token: int) -> int:
    """The first row of a cache that a segment from this token on holds."""
    return max(token - 1, 0) if name.startswith(_HEAD) else token


def _stored(name: str, array: mx.array, bits: int | None) -> Arrays:
    group = next((size for size in _GROUP_SIZES if array.shape[-1] % size == 0), None)
    if bits is None or group is None or not array.size:
        return {name: array}
    parts = mx.quantize(array, group_size=group, bits=bits)
    return {f"{name}.{part}": a for part, a in zip(_PARTS, parts, strict=True)}


def _loaded(segment: Segment, name: str) -> mx.array:
    """Rows as they were before they were stored, but for rounding: [heads, rows, dim]."""
    plain = segment.arrays.get(name)
    if plain is not None:
        return plain
    packed, scales, biases = (segment.arrays[f"{name}.{part}"] for part in _PARTS)
    assert segment.bits is not None
    # A uint32 holds 32 / bits values, and each scale is that of a group of them.
    group = packed.shape[-1] * 32 // segment.bits // scales.shape[-1]
    if not packed.shape[1]:
        return mx.zeros((packed.shape[0], 0, group * scales.shape[-1]), dtype=scales.dtype)
    return mx.dequantize(packed, scales, biases, group_size=group, bits=segment.bits)
