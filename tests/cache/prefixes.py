"""Prefixes with a content that follows from their tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.prefix_state import Segment, join
from mlx_mtp.cache.prefix_store import PrefixStore
from mlx_mtp.cache.prefix_tree import Fetch, Node, PrefixTree, root_key

ROOT = root_key(None)
FINGERPRINT = "f" * 64
PATIENCE = 30.0


def segment(tokens: Sequence[int], start: int = 0, width: int = 32) -> Segment:
    """KV of tokens from a place on: a row of the trunk says its token, one of the head the next."""
    rows = {"layers.0.keys": tokens[start:], "mtp.keys": tokens[max(start, 1) :]}
    arrays = {
        name: mx.array(np.tile(np.reshape(values, (1, -1, 1)), (2, 1, width))).astype(mx.bfloat16)
        for name, values in rows.items()
    }
    mx.eval(arrays)
    return Segment(start, len(tokens), arrays)


def snapshot(tokens: Sequence[int]) -> Segment:
    values = np.random.default_rng(list(tokens)).normal(size=(2, 512)).astype(np.float32)
    arrays = {"layers.1.state": mx.array(values), "hidden": mx.array(values[0, :3])}
    return Segment(len(tokens), len(tokens), arrays)


def keep(store: PrefixStore, *tokens: int, salt: str = ROOT, width: int = 32) -> None:
    store.keep(salt, tokens, [segment(tokens, 0, width)], snapshot(tokens))


def fetch(store: PrefixStore, *tokens: int, start: int = 0, salt: str = ROOT):
    """What a store has of a prefix, when it has been read."""
    done = threading.Event()
    store.on_read = done.set
    while (found := store.fetch(salt, tokens, start, lambda nbytes: True)) is Fetch.COMING:
        assert done.wait(PATIENCE)
        done.clear()
    assert not store.reading
    return found


def same(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    """Bit by bit."""

    def bits(array: mx.array) -> tuple:
        return array.dtype, array.shape, memoryview(array).tobytes()

    return {name: bits(a) for name, a in one.items()} == {n: bits(a) for n, a in other.items()}


def is_whole(found: object, *tokens: int, start: int = 0, width: int = 32) -> bool:
    """It is all of the prefix."""
    if isinstance(found, Fetch):
        return False
    *segments, states = found
    if start < len(tokens):
        got = join(segments, start)
        assert (got.start, got.end, got.bits) == (start, len(tokens), None)
        assert same(got.arrays, segment(tokens, start, width).arrays)
    return same(states.arrays, snapshot(tokens).arrays)


def nodes(tree: PrefixTree) -> list[Node]:
    """All nodes but the roots, parents first."""
    found = [tree._root]
    for node in found:
        found += node.children.values()
    return found[1:]
