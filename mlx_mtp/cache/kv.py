"""Attention KV of one layer, for rows of different lengths, in the buffers of a `Layout`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from mlx_mtp.cache.layout import Buffer, Layout, Moves, Place, most_slots
from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels import attention, cpu
from mlx_mtp.kernels.gpu import LONGEST_WINDOW, backend


class RaggedKVCache:
    """Keys and values of rows; a row's entries begin at the start of its slot.

    A window overwrites the entries after a row's valid ones, so rejecting drafts costs nothing.
    """

    def __init__(self) -> None:
        # Keys, then values, as lines [2 * slots * heads * capacity, dim]; made at the first write.
        # With lines a write is one launch with one index; mlx is slower with an index per axis.
        self.buffers: dict[Buffer, mx.array] = {}

    def write(self, packing: Packing, entries: mx.array) -> None:
        """Write the keys and values of a pass, `entries` [N, 2, heads, dim]."""
        arrays = self._arrays(packing, entries)
        lines = packing.kv_lines(entries.shape[2])
        write: Callable[..., list[mx.array]] = _write
        if backend() is not None and packing.longest <= LONGEST_WINDOW:
            write = _compiled(_write, *(each.shape for each in (*arrays, *lines)))
        written = write(entries[packing.by_part], lines, arrays)
        self.buffers |= dict(zip(packing.buffers, written, strict=True))

    def attend(
        self, packing: Packing, queries: mx.array, scale: float, exact: bool = False
    ) -> mx.array:
        """Returns the attention of each token to its row's entries up to its own, [N, heads, dim].

        `queries` are [N, heads, dim]. If `exact`, a decode step's token gets the same bits in every
        pass, where there is a kernel for that.
        """
        arrays = [self.buffers[part.buffer] for part in packing.parts]
        kv_heads, rows = _heads(packing.parts[0].buffer, arrays[0]), packing.window_slots
        given = queries, packing.positions, arrays, kv_heads, rows, packing.longest, scale, exact
        if (attended := attention.attend_windows(*given)) is not None:
            return attended
        outputs = []
        for part, array in zip(packing.parts, arrays, strict=True):
            outputs.append(
                attention.attend_rectangle(
                    part.rect(queries),
                    _by_axis(part.buffer, array),
                    part.positions,
                    functools.partial(getattr, part, "mask"),
                    part.limit,
                    part.least_position,
                    part.end,
                    scale,
                )
            )
        return packing.join(outputs)

    def attend_on_cpu(self, packing: Packing, queries: mx.array) -> mx.array:
        """`attend` of windows of up to `LONGEST_WINDOW` tokens, for a small model on a CPU.

        Takes scaled queries, and returns the attention: both [N, heads, dim].
        """
        outputs = []
        for part in packing.parts:
            kv = _by_axis(part.buffer, self.buffers[part.buffer])
            bias = part.bias(queries.shape[1] // kv.shape[2])
            outputs.append(cpu.attend(part.rect(queries), kv, bias))
        return packing.join(outputs)

    def write_and_attend(
        self,
        packing: Packing,
        entries: mx.array,
        queries: mx.array,
        scale: float,
        exact: bool = False,
    ) -> mx.array:
        """`write`, then `attend`. A decode step's are one compiled call if a kernel runs them."""
        arrays = self._arrays(packing, entries)
        kind = queries.shape, entries.shape, scale
        if kind not in packing.calls:  # The layers of a model are mostly of one kind.
            packing.calls[kind] = _window_call(packing, queries, entries, arrays, scale)
        call = packing.calls[kind]
        if call is None:
            self.write(packing, entries)
            return self.attend(packing, queries, scale, exact)
        attended, written = call(queries, entries, arrays)
        self.buffers.update(zip(packing.buffers, written))
        return attended

    def put(self, place: Place, start: int, keys: mx.array, values: mx.array) -> None:
        """Write a row's entries from position `start` on; keys and values are [heads, T, dim]."""
        (buffer, slot), (heads, count, dim) = place, keys.shape
        array = _by_axis(buffer, self._array(buffer, heads, dim, keys.dtype))
        for which, new in enumerate((keys, values)):
            array[which, slot, :, start : start + count] = new
        self.buffers[buffer] = array.reshape(-1, dim)

    def row(self, place: Place) -> mx.array:
        """Returns a view of a row's keys and values, [2, heads, capacity, dim]."""
        buffer, slot = place
        return _by_axis(buffer, self.buffers[buffer])[:, slot]

    def rearrange(self, layout: Layout, moves: Moves) -> None:
        """Move rows to their places in `layout`, and drop buffers that it doesn't have."""
        moved = [(self.row(old), new) for old, new in moves if old[0] in self.buffers]
        self.buffers = {b: self.buffers[b] for b in layout.buffers if b in self.buffers}
        for (keys, values), place in moved:
            self.put(place, 0, keys, values)
        # Evaluate long rows now, so that the old and new arrays of only one layer exist at a time.
        long = {buffer for _, (buffer, _) in moved if most_slots(buffer.capacity) == 1}
        mx.eval([self.buffers[buffer] for buffer in long])

    def select(self, copies: Mapping[Buffer, Buffer]) -> RaggedKVCache:
        """Returns a cache with copies (new to old) of buffers; data is copied at the next write."""
        selected = RaggedKVCache()
        pairs = copies.items()
        selected.buffers = {b: self.buffers[old] for b, old in pairs if old in self.buffers}
        return selected

    def extend(self, other: RaggedKVCache) -> None:
        self.buffers = self.buffers | other.buffers

    @property
    def arrays(self) -> list[mx.array]:
        return list(self.buffers.values())

    def _arrays(self, packing: Packing, entries: mx.array) -> list[mx.array]:
        """The arrays of a pass's buffers, for entries [N, 2, heads, dim]."""
        try:
            return [self.buffers[buffer] for buffer in packing.buffers]
        except KeyError:
            _, _, heads, dim = entries.shape
            return [self._array(buffer, heads, dim, entries.dtype) for buffer in packing.buffers]

    def _array(self, buffer: Buffer, heads: int, dim: int, dtype: mx.Dtype) -> mx.array:
        if buffer not in self.buffers:
            lines = 2 * buffer.slots * heads * buffer.capacity
            self.buffers[buffer] = mx.zeros((lines, dim), dtype=dtype)
        return self.buffers[buffer]


def _heads(buffer: Buffer, array: mx.array) -> int:
    return len(array) // (2 * buffer.slots * buffer.capacity)


def _by_axis(buffer: Buffer, array: mx.array) -> mx.array:
    """A view of a buffer, [2, slots, heads, capacity, dim]."""
    axes = 2, buffer.slots, _heads(buffer, array), buffer.capacity, array.shape[1]
    return array.reshape(axes)


def _write(
    entries: mx.array,  # [N, 2, heads, dim]
    lines: list[mx.array],  # see `Packing.kv_lines`
    arrays: list[mx.array],  # of all buffers
) -> list[mx.array]:
    arrays = [copy.copy(each) for each in arrays]  # Another batch may share them.
    new, first = entries.reshape(-1, entries.shape[-1]), 0
    for index, array in zip(lines, arrays, strict=True):
        array[index] = new[first : first + len(index)]
        first += len(index)
    return arrays


def _window_call(
    packing: Packing, queries: mx.array, entries: mx.array, arrays: list[mx.array], scale: float
) -> Callable[..., Any] | None:
    """Returns `_write_and_attend` of a pass's windows, compiled; None if no kernel runs them."""
    kv_heads = entries.shape[2]
    kind = queries, arrays[0], kv_heads, packing.longest, scale
    plan = attention.plan_windows(*kind, packing.window_slots)
    if plan is None:
        return None
    lines, by_part = packing.kv_lines(kv_heads), packing.by_part
    order = None if isinstance(by_part, slice) else by_part
    launches, among = plan
    shapes: list[Any] = [a.shape for a in (queries, *arrays, *lines)]
    shapes += [None if index is None else index.shape for index in (order, among)]
    for launch in launches:
        shapes += [launch.tiles, *launch.buffers, launch.items.shape, launch.tokens.shape]
    call = _compiled(_write_and_attend, *shapes)
    return functools.partial(call, packing.positions, lines, order, plan)


def _write_and_attend(
    positions: mx.array,
    lines: list[mx.array],
    order: mx.array | None,  # see `Packing.by_part`
    plan: Any,  # see `attention.plan_windows`
    queries: mx.array,
    entries: mx.array,
    arrays: list[mx.array],
) -> tuple[mx.array, list[mx.array]]:
    arrays = _write(entries if order is None else entries[order], lines, arrays)
    return attention.attend_planned(queries, positions, arrays, entries.shape[2], plan), arrays


# With many buffers half of a step's launches are writes, and mlx launches compiled ones faster. The
# shapes are in the key because a compiled function keeps an entry per shape as long as it lives.
@functools.lru_cache(maxsize=1024)
def _compiled(function: Callable[..., Any], *_shapes: Any) -> Callable[..., Any]:
    return mx.compile(lambda *inputs: function(*inputs))
