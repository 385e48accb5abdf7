"""The arrays of a cached prefix, by name: copied out of a batch's caches and back into them.

A segment is the KV of consecutive tokens. A snapshot is a segment without tokens: everything else
that decoding needs to continue at its place. Arrays are named by part: `layers.3.keys`, `mtp.keys`,
`layers.0.state` (float32 [Hv, Dv, Dk]), `layers.0.history` (the last inputs of the convolution,
[K-1, C]), and `hidden` [H], the target model's post-norm hidden state of the last token.

Row p of the MTP head's KV combines the hidden state at p with the token at p+1. So n tokens
determine only its rows 0 to n-2, and a segment's rows of the head begin and end one before those of
the target model. Row n-1 is written when the prefix is used, from the snapshot's hidden state and
the token that follows.
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
    """KV of the tokens `start` to `end` of a prefix, or the snapshot at `start` == `end`."""

    start: int
    end: int
    arrays: Arrays  # keys and values [heads, rows, dim], or the three parts of each, quantized
    bits: int | None = None  # of quantized arrays; None: nothing is quantized

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())

    def cut(self, start: int, end: int) -> Segment:
        """Returns a copy of the part from token `start` to `end`."""
        arrays = Arrays()
        for name, array in self.arrays.items():
            first = _row(name, self.start)
            rows = slice(_row(name, start) - first, _row(name, end) - first)
            arrays[name] = mx.contiguous(array[:, rows])
        mx.async_eval(arrays)
        return Segment(start, end, arrays, self.bits)


Entry = list[Segment]
"""The KV of a prefix in order, if any, and then the snapshot at its end."""


def join_segments(segments: Sequence[Segment], start: int) -> Segment:
    """Returns consecutive segments as one, from token `start`, in the first segment, on."""
    first, last = segments[0], segments[-1]
    assert first.start <= start < last.end
    if len(segments) == 1 and start == first.start:
        return first
    arrays = Arrays()
    for name in last.arrays:
        # The head has no row for the first token alone: that array is empty and not quantized.
        parts = [s.arrays[name] for s in segments if name in s.arrays]
        parts[0] = parts[0][:, _row(name, start) - _row(name, first.start) :]
        arrays[name] = mx.concatenate(parts, axis=1)
    return Segment(start, last.end, arrays, last.bits)


def take_segment(batch: BatchCache, row: int, start: int, end: int, bits: int | None) -> Segment:
    """Copy the KV of a row's tokens `start` to `end`, quantized to `bits` unless None."""
    arrays = Arrays()
    for name, cache in _caches(RaggedKVCache, batch):
        rows = slice(_row(name, start), _row(name, end))
        for part, whole in zip(_KV, cache.row(batch.layout.places[row])):
            # A view would keep the batch's whole buffer alive.
            copied = mx.contiguous(whole[:, rows])
            arrays.update(_stored(f"{name}.{part}", copied, bits))
    return Segment(start, end, arrays, bits)


def take_snapshot(batch: BatchCache, row: int, end: int, hidden: mx.array) -> Segment:
    """Copy a row's states after `end` tokens; `hidden` is [B, 1, H]."""
    arrays = Arrays({_HIDDEN: mx.contiguous(hidden[row, 0])})
    batch.fold()
    for name, cache in _caches(GatedDeltaCache, batch):
        state, _, history = cache.arrays
        arrays[f"{name}.state"] = mx.contiguous(state[row])
        arrays[f"{name}.history"] = mx.contiguous(history[row])
    return Segment(end, end, arrays)


def restore(batch: BatchCache, rows: Sequence[Entry]) -> mx.array:
    """Fill empty caches with a prefix per row; returns the last hidden states, [B, 1, H]."""
    batch.offset = mx.array([entry[-1].end for entry in rows], dtype=mx.int32)
    for name, cache in _caches(RaggedKVCache, batch):
        for place, entry in zip(batch.layout.places, rows, strict=True):
            for segment in entry[:-1]:
                keys, values = (_loaded(segment, f"{name}.{part}") for part in _KV)
                cache.put(place, _row(name, segment.start), keys, values)
    snapshots = [entry[-1].arrays for entry in rows]
    for name, recurrent in _caches(GatedDeltaCache, batch):
        state, history = (
            mx.stack([s[f"{name}.{part}"] for s in snapshots]) for part in ("state", "history")
        )
        recurrent.arrays = state, None, history
    return mx.stack([s[_HIDDEN] for s in snapshots])[:, None]


def _caches(kind: type[_Cache], batch: BatchCache) -> list[tuple[str, _Cache]]:
    named = [(f"layers.{index}", cache) for index, cache in enumerate(batch.layers)]
    named += [] if batch.head is None else [(_HEAD, batch.head)]
    return [(name, cache) for name, cache in named if isinstance(cache, kind)]


def _row(name: str, token: int) -> int:
    """The first row of a cache for a segment that starts at `token`."""
    return max(token - 1, 0) if name.startswith(_HEAD) else token


def _stored(name: str, array: mx.array, bits: int | None) -> Arrays:
    group = next((size for size in _GROUP_SIZES if array.shape[-1] % size == 0), None)
    if bits is None or group is None or not array.size:
        return {name: array}
    parts = mx.quantize(array, group_size=group, bits=bits)
    return {f"{name}.{part}": a for part, a in zip(_PARTS, parts, strict=True)}


def _loaded(segment: Segment, name: str) -> mx.array:
    """Stored rows, dequantized if they are quantized: [heads, rows, dim]."""
    plain = segment.arrays.get(name)
    if plain is not None:
        return plain
    packed, scales, biases = (segment.arrays[f"{name}.{part}"] for part in _PARTS)
    assert segment.bits is not None
    # A uint32 holds 32 / bits values; each group of values has a scale.
    group = packed.shape[-1] * 32 // segment.bits // scales.shape[-1]
    if not packed.shape[1]:
        return mx.zeros((packed.shape[0], 0, group * scales.shape[-1]), dtype=scales.dtype)
    return mx.dequantize(packed, scales, biases, group_size=group, bits=segment.bits)
