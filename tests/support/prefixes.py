"""Prefixes whose content is derived from their tokens, and a fake disk that tests control."""

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
    """Returns KV from `start` on: a trunk's row holds its token, a head's row the next token."""
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
    """Returns a store's result for a prefix, after it has been read."""
    done = threading.Event()
    store.on_read = done.set
    while (found := store.fetch(salt, tokens, start, lambda nbytes: True)) is Fetch.COMING:
        assert done.wait(PATIENCE)
        done.clear()
    assert not store.reading
    return found


def same(one: Segment, other: Segment) -> bool:
    """Returns True if two segments are equal, bit by bit."""

    def bits(array: mx.array) -> tuple:
        return array.dtype, array.shape, memoryview(array).tobytes()

    contents = [{name: bits(a) for name, a in each.arrays.items()} for each in (one, other)]
    places = [(each.start, each.end, each.bits) for each in (one, other)]
    return contents[0] == contents[1] and places[0] == places[1]


def is_whole(found: object, *tokens: int, start: int = 0) -> bool:
    """Returns True if a store's result is the whole prefix."""
    if isinstance(found, Fetch):
        return False
    *segments, states = found
    rest = start == len(tokens) or same(join_segments(segments, start), segment(tokens, start))
    return rest and same(states, snapshot(tokens))


def nodes(tree: PrefixTree) -> list[Node]:
    """Returns all nodes except the root, parents first."""
    found = [tree._root]
    for node in found:
        found += node.children.values()
    return found[1:]


@dataclass(frozen=True)
class FakeKV:
    """KV of one byte per token."""

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
    """Holds saved prefixes, and forgets or breaks them when a test says so."""

    def __init__(self) -> None:
        self.entries: set[tuple[str, tuple[int, ...]]] = set()  # salts and tokens of prefixes
        self.state = Fetch.HERE  # result of `fetch`; HERE: the prefix, unless it is broken
        self.broken = False
        self.asked: list[int] = []  # length of the requested prefix, once per read
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
        # In two parts, as of two files; the first can begin before `start`.
        middle, before = (start + len(tokens)) // 2, max(start - 1, 0)
        parts = [FakeKV(before, tokens[before:middle]), FakeKV(middle, tokens[middle:])]
        return [*(p for p in parts if p.tokens and p.end > start), FakeState(tokens)]

    def forget(self) -> None:
        self.wanted, self.reading = None, []


def put(tree: PrefixTree, tokens, salt: str = "", start: int | None = None, **more: bool) -> bool:
    """Insert an entry, with its KV from `start` on (None: the KV that the tree lacks)."""
    tokens = tuple(tokens)
    start = tree.covered(salt, tokens) if start is None else start
    kv = [FakeKV(start, tokens[start:])] if start < len(tokens) else []
    return tree.insert(salt, tokens, [*kv, FakeState(tokens)], **more)


def check_tree(tree: PrefixTree) -> None:
    """Check that each byte is counted once, and that each node is needed and has its place's KV."""
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
    """Wait until a store's thread has nothing left to do; returns False after `PATIENCE`."""
    with store._lock:
        return store._lock.wait_for(lambda: not (store._began or store._tasks), PATIENCE)
