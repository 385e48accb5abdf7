"""The launches of the attention kernel for a pass: which block has what, decided on the host."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

PIECE = 256  # positions; capacities of buffers are multiples of it
TILE = 8  # pairs of token and query head beside each other in a product
TILES = (1, 2, 4)  # of a block
BUFFERS = (1, 16)  # of a launch: each number is a kernel of its own


class Row(NamedTuple):
    """A row's window, and where its keys and values are."""

    buffer: int
    slot: int
    capacity: int  # of the buffer's slots
    first: int  # token
    tokens: int


class Work(NamedTuple):
    """A launch: rows of some buffers."""

    buffers: list[int]
    tiles: int  # of pairs, that a block has
    # Of each block the place in `buffers`, slot, capacity, first token, tokens, which pairs, piece.
    items: mx.array  # int32 [I, 7]
    # Of each token that, the row's first block, the blocks of a piece, and its place in the row.
    tokens: mx.array  # int32 [N, 4]


class Plan(NamedTuple):
    """The launches of a pass."""

    works: list[Work]
    order: mx.array | None  # where each token is among their outputs, if elsewhere


@functools.lru_cache(maxsize=64)  # Steps repeat.
def plan(rows: tuple[Row, ...], group: int) -> Plan:
    """The launches for windows of rows in the order of their tokens; `group` heads share KV."""
    wanted = dict.fromkeys(row.buffer for row in rows)
    buffers = list(wanted)
    works, order = [], []
    for begin in range(0, len(buffers), BUFFERS[-1]):
        own = buffers[begin : begin + BUFFERS[-1]]
        mine = [row for row in rows if row.buffer in own]
        works.append(_work(mine, own, group))
        order += [row.first + i for row in mine for i in range(row.tokens)]
    in_order = order == list(range(len(order)))
    return Plan(works, None if in_order else mx.array(np.argsort(order).astype(np.int32)))


def _work(rows: Sequence[Row], buffers: list[int], group: int) -> Work:
    most = max(row.tokens for row in rows) * group
    tiles = next((tiles for tiles in TILES if tiles * TILE >= most), TILES[-1])
    items, tokens, blocks = [], [], 0
    for row in rows:
        each, pieces = -(-row.tokens * group // (tiles * TILE)), -(-row.capacity // PIECE)
        what = np.empty((pieces * each, 7), dtype=np.int32)
        what[:, :5] = buffers.index(row.buffer), *row[1:]
        # Those that read the same keys are beside each other.
        what[:, 6], what[:, 5] = np.divmod(np.arange(len(what)), each)
        items.append(what)
        tokens += [(row.first + i, blocks, each, i) for i in range(row.tokens)]
        blocks += len(what)
    count = next(count for count in BUFFERS if count >= len(buffers))
    filled = buffers + buffers[:1] * (count - len(buffers))
    both = mx.array(np.concatenate(items)), mx.array(np.array(tokens, dtype=np.int32))
    return Work(filled, tiles, *both)
