"""Which prefixes are kept, found and forgotten. No arrays, no model: policy alone.

A radix tree of token segments for each salt. A node holds the KV of its own tokens, so branches
share what they share. A recurrent state exists only where it was saved: some nodes have one at
their end, the snapshot, and a match ends only there.

An entry is a snapshot with the KV of the path to it. The least recently used goes first. Where
others lie beyond it, the snapshot alone goes: they need the KV.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from mlx_mtp.cache.prefix_thinning import spare

Tokens = tuple[int, ...]


class Payload(Protocol):
    """Something that takes memory."""

    @property
    def nbytes(self) -> int:
        """How much."""


class SplitPayload(Payload, Protocol):
    """What belongs to a run of tokens, and can be cut where a branch leaves it."""

    def split(self, at: int) -> tuple[SplitPayload, SplitPayload]:
        """The part of the first `at` tokens and that of the rest, sharing no memory."""


class Node:
    """A segment of tokens.

    Attributes:
        parent: the segment before; None for a root.
        start: tokens before this segment.
        tokens: its own; only a root has none.
        kv: of these tokens.
        snapshot: the states after the last of them; None where no match can end.
        lasting: its snapshot is not thinned.
        children: by their first token.
        pins: while above 0 nothing of the node is forgotten.
    """

    def __init__(self, parent: Node | None, start: int, tokens: Tokens, kv: SplitPayload | None):
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.kv = kv
        self.snapshot: Payload | None = None
        self.lasting = False
        self.children: dict[int, Node] = {}
        self.pins = 0

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.start + len(self.tokens)

    def path(self) -> list[Node]:
        """The segments from the first one to this."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.tokens:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """All prefixes.

    Args:
        limit: bytes that they may take together.

    Attributes:
        nbytes: what they take.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._roots: dict[str, Node] = {}
        self._anchor: Node | None = None
        # Nodes with a snapshot, the least recently used first.
        self._entries: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        """Entries."""
        return len(self._entries)

    def match(self, salt: str, tokens: Tokens) -> Node | None:
        """The end of the longest entry that is a prefix of the tokens, or all of them."""
        node, covered = self._walk(salt, tokens)
        if node is not None and node.end > covered:
            node = node.parent
        while node is not None and node.snapshot is None:
            node = node.parent
        return node

    def touch(self, node: Node) -> None:
        """The entry is used."""
        if node in self._entries:
            self._entries.move_to_end(node)

    def covered(self, salt: str, tokens: Tokens) -> int:
        """For how many of the first tokens there is KV."""
        return self._walk(salt, tokens)[1]

    def pin(self, node: Node) -> None:
        """Keep an entry until it is unpinned as often."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """See `pin`."""
        node.pins -= 1
        assert node.pins >= 0
        self._prune(node)

    def insert(
        self,
        salt: str,
        tokens: Tokens,
        start: int,
        kv: SplitPayload | None,
        snapshot: Payload,
        *,
        lasting: bool = False,
    ) -> bool:
        """Add an entry.

        Args:
            salt: whose it is.
            tokens: one or more.
            start: tokens whose KV should be here already.
            kv: of the tokens from there on; None when there are none.
            snapshot: the states after the last token.
            lasting: other conversations are likely to begin with it (a system prompt), so that it
                stays when its chain is thinned.

        Returns:
            False if it was not kept: it has no room, or the KV before `start` has gone.
        """
        assert tokens and (kv is None) == (start == len(tokens))
        node, covered = self._walk(salt, tokens)
        if covered < start:
            return False
        if covered == len(tokens):
            kv = None
        elif covered > start:
            assert kv is not None
            kv = kv.split(covered - start)[1]
        if node is None:
            node = self._roots[salt] = Node(None, 0, (), None)
        elif node.end > covered:
            node = self._split(node, covered)
        if kv is None and node.snapshot is not None:
            self.touch(node)
            node.lasting |= lasting
            return True
        # The KV that the entry hangs on must not make room for it; a snapshot there may.
        self._anchor = node
        fits = self._make_room(snapshot.nbytes + (0 if kv is None else kv.nbytes))
        self._anchor = None
        if not fits:
            self._prune(node)
            return False
        node = self._attach(node, tokens, kv, snapshot)
        node.lasting = lasting
        self._thin(node)
        return True

    def remove(self, node: Node) -> None:
        """Forget an entry, because it can't be used."""
        if node.snapshot is not None:
            self._forget(node)

    def clear(self) -> None:
        """Forget all entries but those that are pinned."""
        for node in [n for n in self._entries if not n.pins]:
            self._forget(node)

    def _walk(self, salt: str, tokens: Tokens) -> tuple[Node | None, int]:
        """Follow the tokens: the last node that any of them is in, and how many are in the tree.

        None for a salt that has nothing.
        """
        node, at = self._roots.get(salt), 0
        while node is not None and at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            node = child
            at += common_length(node.tokens, tokens, at)
            if at < node.end:
                break
        return node, at

    def _attach(
        self, node: Node, tokens: Tokens, kv: SplitPayload | None, snapshot: Payload
    ) -> Node:
        if kv is not None:
            rest = tokens[node.end :]
            child = node.children[rest[0]] = Node(node, node.end, rest, kv)
            self.nbytes += kv.nbytes
            node = child
        node.snapshot = snapshot
        self.nbytes += snapshot.nbytes
        self._entries[node] = None
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; it becomes the lower part, and the upper one is returned."""
        assert node.start < at < node.end and node.kv is not None and node.parent is not None
        upper_kv, lower_kv = node.kv.split(at - node.start)
        upper = Node(node.parent, node.start, node.tokens[: at - node.start], upper_kv)
        self.nbytes += upper_kv.nbytes + lower_kv.nbytes - node.kv.nbytes
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.kv = node.tokens[at - node.start :], lower_kv
        node.parent, node.start = upper, at
        upper.children[node.tokens[0]] = node
        return upper

    def _make_room(self, more: int) -> bool:
        """Forget entries until so many bytes fit."""
        if more > self.limit:
            return False
        while self.nbytes + more > self.limit:
            oldest = next((n for n in self._entries if not n.pins), None)
            if oldest is None:
                return False
            self._forget(oldest)
        return True

    def _forget(self, node: Node) -> None:
        assert node.snapshot is not None
        self.nbytes -= node.snapshot.nbytes
        node.snapshot = None
        del self._entries[node]
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Drop the KV that no entry needs any more, from a node upwards."""
        while not (node.children or node.pins or node.snapshot is not None):
            if node is self._anchor:
                return
            parent = node.parent
            if parent is None:
                self._roots = {s: root for s, root in self._roots.items() if root is not node}
                return
            assert node.kv is not None
            self.nbytes -= node.kv.nbytes
            del parent.children[node.tokens[0]]
            node = parent

    def _thin(self, node: Node) -> None:
        """Forget the snapshots that a chain can do without, now that it has grown to a node."""
        inner = [n for n in node.path()[:-1] if n.snapshot is not None]
        chain = {n.end: n for n in inner if len(n.children) == 1 and not (n.pins or n.lasting)}
        for end in spare([n.end for n in inner], node.end):
            if end in chain:
                self._forget(chain[end])

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node.tokens:
                yield node


def common_length(one: Tokens, other: Tokens, at: int = 0) -> int:
    """How many tokens `one` has in common with `other` from its place `at` on."""
    most = min(len(one), len(other) - at)
    if one[:most] == other[at : at + most]:
        return most
    return bisect_left(range(most), 1, key=lambda n: one[: n + 1] != other[at : at + n + 1])
