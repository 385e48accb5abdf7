"""Prefixes without arrays, which know their tokens, and a disk that answers when a test lets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from mlx_mtp.cache.prefix_tree import Fetch, PrefixTree
from tests.cache.prefixes import nodes

STATE = 50


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


class FakeDisk:
    """Holds what it is given, and forgets or breaks what a test says.

    Attributes:
        entries: salts and tokens of the prefixes that are on it.
        state: what `fetch` answers; HERE: a prefix, unless it is broken.
        asked: lengths of those that were asked for, each once for each read.
    """

    def __init__(self) -> None:
        self.entries: set[tuple[str, tuple[int, ...]]] = set()
        self.state = Fetch.HERE
        self.broken = False
        self.asked: list[int] = []
        self.reading: list[SimpleNamespace] = []
        self.seconds_left = 30.0
        self.wanted: tuple | None = None

    def longest(self, salt: str, tokens: tuple[int, ...]) -> int:
        ends = (len(t) for s, t in self.entries if s == salt and tokens[: len(t)] == t)
        return max(ends, default=0)

    def keep(self, salt: str, tokens: tuple[int, ...], segments, snapshot: FakeState) -> None:
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
    return tree.insert(salt, tokens, kv, FakeState(tokens), **more)


def check_integrity(tree: PrefixTree) -> None:
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
        assert node.snapshot is not None or node.children or node in tree._pins, (
            "nothing needs this"
        )
    assert total == tree.nbytes
    assert total + tree.fetched_nbytes <= tree.limit
    assert entries == set(tree._entries)
