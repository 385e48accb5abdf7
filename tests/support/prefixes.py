"""Prefixes with a content that follows from their tokens, and a disk that answers when it may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.prefix.radix_tree import Fetch, Node, PrefixTree, root_key
from mlx_mtp.prefix.segments import Segment, join_segments

ROOT = root_key(None)
FINGERPRINT = "f" * 64
PATIENCE = 30.0
STATE = 50


def segment(tokens: Sequence[int], start: int = 0) -> Segment:
    """KV of tokens from a place on: a row of the trunk says its token, one of the head the next."""
    rows = {"layers.0.keys": tokens[start:], "mtp.keys": tokens[max(start, 1) :]}
    arrays = {
        name: mx.array(np.tile(np.reshape(values, (1, -1, 1)), (2, 1, 32))).astype(mx.bfloat16)
        for name, values in rows.items()
    }
    mx.eval(arrays)
    return Segment(start, len(tokens), arrays)


def snapshot(tokens: Sequence[int]) -> Segment:
    values = np.random.default_rng(list(tokens)).normal(size=(2, 512)).astype(np.float32)
    arrays = {"layers.1.state": mx.array(values), "hidden": mx.array(values[0, :3])}
    return Segment(len(tokens), len(tokens), arrays)


def keep(store: PrefixStore, *tokens: int, salt: str = ROOT) -> None:
    store.keep(salt, tokens, [segment(tokens), snapshot(tokens)])


def fetch(store: PrefixStore, *tokens: int, start: int = 0, salt: str = ROOT):
    """What a store has of a prefix, when it has been read."""
    done = threading.Event()
    store.on_read = done.set
    while (found := store.fetch(salt, tokens, start, lambda nbytes: True)) is Fetch.COMING:
        assert done.wait(PATIENCE)
        done.clear()
    assert not store.reading
    return found


def same(one: Segment, other: Segment) -> bool:
    """Bit by bit."""

    def bits(array: mx.array) -> tuple:
        return array.dtype, array.shape, memoryview(array).tobytes()

    contents = [{name: bits(a) for name, a in each.arrays.items()} for each in (one, other)]
    places = [(each.start, each.end, each.bits) for each in (one, other)]
    return contents[0] == contents[1] and places[0] == places[1]


def is_whole(found: object, *tokens: int, start: int = 0) -> bool:
    """It is all of the prefix."""
    if isinstance(found, Fetch):
        return False
    *segments, states = found
    rest = start == len(tokens) or same(join_segments(segments, start), segment(tokens, start))
    return rest and same(states, snapshot(tokens))


def nodes(tree: PrefixTree) -> list[Node]:
    """All nodes but the root, parents first."""
    found = [tree._root]
    for node in found:
        found += node.children.values()
    return found[1:]


@dataclass(frozen=True)
class FakeKV:
    """One byte a token."""

    start: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        return len(self.tokens)

    def cut(self, start: int, end: int) -> FakeKV:
        assert self.start <= start < end <= self.end
        return FakeKV(start, self.tokens[start - self.start : end - self.start])


@dataclass(frozen=True)
class FakeState:
    tokens: tuple[int, ...]
    nbytes: int = STATE

    @property
    def start(self) -> int:
        return len(self.tokens)


class FakeDisk:
    """Holds what it is given, and forgets or breaks what a test says."""

    def __init__(self) -> None:
        self.entries: set[tuple[str, tuple[int, ...]]] = set()  # salts and tokens of prefixes
        self.state = Fetch.HERE  # what `fetch` answers; HERE: a prefix, unless it is broken
        self.broken = False
        self.asked: list[int] = []  # lengths of what was asked for, each once for each read
        self.reading: list[SimpleNamespace] = []
        self.seconds_left = 30.0
        self.wanted: tuple | None = None

    def longest(self, salt: str, tokens: tuple[int, ...]) -> int:
        ends = (len(t) for s, t in self.entries if s == salt and tokens[: len(t)] == t)
        return max(ends, default=0)

    def keep(self, salt: str, tokens: tuple[int, ...], entry: list) -> None:
        *segments, snapshot = entry
        assert tuple(t for segment in segments for t in segment.tokens) == tokens
        assert snapshot.tokens == tokens
        self.entries.add((salt, tokens))

    def touch(self, salt: str, tokens: tuple[int, ...]) -> None:
        pass

    def drop_snapshot(self, salt: str, tokens: tuple[int, ...]) -> None:
        self.entries.discard((salt, tokens))

    def fetch(
        self, salt: str, tokens: tuple[int, ...], start: int, make_room: Callable[[int], bool]
    ) -> Fetch | list:
        if self.state is Fetch.LATE:
            return Fetch.LATE
        if self.wanted != (salt, tokens, start):
            self.forget()
            size = len(tokens) - start + STATE
            if not make_room(size):
                return Fetch.NO_ROOM
            self.wanted, self.reading = (salt, tokens, start), [SimpleNamespace(nbytes=size)]
            self.asked.append(len(tokens))
        if self.state is Fetch.COMING:
            return Fetch.COMING
        self.forget()
        if self.broken or (salt, tokens) not in self.entries:
            return Fetch.GONE
        # In two files, one of which may begin before.
        middle, before = (start + len(tokens)) // 2, max(start - 1, 0)
        parts = [FakeKV(before, tokens[before:middle]), FakeKV(middle, tokens[middle:])]
        return [*(p for p in parts if p.tokens and p.end > start), FakeState(tokens)]

    def forget(self) -> None:
        self.wanted, self.reading = None, []


def put(tree: PrefixTree, tokens, salt: str = "", start: int | None = None, **more: bool) -> bool:
    """Insert an entry, with the KV that is missing or from a place on."""
    tokens = tuple(tokens)
    start = tree.covered(salt, tokens) if start is None else start
    kv = [FakeKV(start, tokens[start:])] if start < len(tokens) else []
    return tree.insert(salt, tokens, [*kv, FakeState(tokens)], **more)


def check_tree(tree: PrefixTree) -> None:
    """Every byte is counted once, every node is needed, and holds what its place says."""
    total, entries = 0, set()
    for node in nodes(tree):
        prefix = node.prefix()
        assert node.end == len(prefix)
        assert node.parent.children[node.place] is node
        assert node.kv == FakeKV(node.end - len(node.tokens), node.tokens)
        total += node.kv.nbytes
        if node.snapshot is not None:
            assert node.snapshot.tokens == prefix
            total += node.snapshot.nbytes
            entries.add(node)
        assert node.snapshot or node.children or node in tree._pins, "nothing needs this"
    assert total == tree.nbytes
    assert total + tree.fetched_nbytes <= tree.limit
    assert entries == set(tree._entries)


def flush(store: PrefixStore) -> bool:
    """Wait until its thread has nothing left to do; False if that takes too long."""
    with store._lock:
        return store._lock.wait_for(lambda: not (store._began or store._tasks), PATIENCE)
