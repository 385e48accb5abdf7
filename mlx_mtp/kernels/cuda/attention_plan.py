"""Plans the launches of `decode_attention.py` for a pass: the host decides each block's work."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

PIECE = 256  # positions; capacities of buffers are multiples of it
TILE = 8  # pairs of token and query head in a tile of a product
TILES = (1, 2, 4)  # possible numbers of tiles of a block
BUFFERS = (1, 16)  # possible numbers of KV buffers of a launch; each number has its kernel


class WindowSlot(NamedTuple):
    """A row's window, and where its keys and values are."""

    buffer: int
    slot: int
    capacity: int  # tokens of a slot of the buffer
    first: int  # index of the window's first token in the pass
    tokens: int  # length of the window


class AttentionLaunch(NamedTuple):
    """A launch for the rows of some buffers."""

    buffers: list[int]
    tiles: int  # tiles of pairs in a block
    # Of each block: index in `buffers`, slot, capacity, first token, tokens, run of pairs, piece.
    items: mx.array  # int32 [I, 7]
    # Of each token: its number, the row's first block, blocks per piece, and its place in the row.
    tokens: mx.array  # int32 [N, 4]


@functools.lru_cache(maxsize=64)  # Steps repeat.
def plan_launches(
    rows: tuple[tuple[int, ...], ...], group: int
) -> tuple[list[AttentionLaunch], mx.array | None]:
    """Returns the launches for windows of rows, given as `WindowSlot`; `group` heads share KV.

    Also returns each token's index among the outputs, int32 [N], or None if they are in order.
    """
    slots = [WindowSlot(*row) for row in rows]
    buffers = [*dict.fromkeys(slot.buffer for slot in slots)]
    launches, order = [], []
    for begin in range(0, len(buffers), BUFFERS[-1]):
        some = buffers[begin : begin + BUFFERS[-1]]
        mine = [slot for slot in slots if slot.buffer in some]
        launches.append(_launch_of(mine, some, group))
        order += [slot.first + i for slot in mine for i in range(slot.tokens)]
    in_order = order == list(range(len(order)))
    return launches, None if in_order else mx.array(np.argsort(order).astype(np.int32))


def _launch_of(slots: Sequence[WindowSlot], buffers: list[int], group: int) -> AttentionLaunch:
    most = max(slot.tokens for slot in slots) * group
    tiles = next((tiles for tiles in TILES if tiles * TILE >= most), TILES[-1])
    items, tokens, blocks = [], [], 0
    for slot in slots:
        each, pieces = -(-slot.tokens * group // (tiles * TILE)), -(-slot.capacity // PIECE)
        rows = np.empty((pieces * each, 7), dtype=np.int32)
        rows[:, :5] = buffers.index(slot.buffer), *slot[1:]
        # Blocks that read the same keys are consecutive.
        rows[:, 6], rows[:, 5] = np.divmod(np.arange(len(rows)), each)
        items.append(rows)
        tokens += [(slot.first + i, blocks, each, i) for i in range(slot.tokens)]
        blocks += len(rows)
    count = next(count for count in BUFFERS if count >= len(buffers))
    filled = buffers + buffers[:1] * (count - len(buffers))
    both = mx.array(np.concatenate(items)), mx.array(np.array(tokens, dtype=np.int32))
    return AttentionLaunch(filled, tiles, *both)
