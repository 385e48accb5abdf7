"""Which prefixes are kept in memory, found and evicted. No arrays, no model: policy alone.

A radix tree of token segments for each salt. A node holds the KV of its own tokens, so branches
share what they share. A recurrent state exists only where it was saved: some nodes have one at
their end, the snapshot, and a match ends only there.

An entry is a snapshot with the KV of the path to it. The least recently used is evicted first;
where others lie beyond it, the snapshot alone goes, for they need the KV. With a disk an entry is
written when it enters the tree, and what was evicted is read back from there.
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_mtp.cache.prefix_state import Segment, Snapshot
    from mlx_mtp.cache.prefix_store import PrefixStore

logger = logging.getLogger(__name__)

Tokens = tuple[int, ...]

NUM_RECENT = 3
"""So many snapshots at the end of a chain are not thinned."""


class Fetch(enum.Enum):
    """How far a prefix has come from the disk."""

    HERE = enum.auto()
    COMING = enum.auto()
    # It could not be read.
    GONE = enum.auto()
    # There is no room for it in memory, or the disk hangs.
    NEVER = enum.auto()


@dataclass(eq=False)
class Node:
    """A segment of tokens, and of KV from `start` to `end` of the prefix.

    Args:
        salt: `root_key` of the tree's salt.
        parent: the segment before; None for a root, which has no tokens and no KV.
        tokens, kv: its own.
        snapshot: the states after the last token, or None.
        lasting: its snapshot is not thinned.
        children: by their first token.
        pins: while above 0 nothing of the node is evicted.
    """

    salt: str
    parent: Node | None
    tokens: Tokens
    kv: Segment | None
    snapshot: Snapshot | None = None
    lasting: bool = False
    children: dict[int, Node] = field(default_factory=dict)
    pins: int = 0

    def __post_init__(self) -> None:
        self.start = 0 if self.parent is None else self.parent.end

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> list[Node]:
        """The segments from the first one to this."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.tokens:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix(self) -> Tokens:
        return tuple(chain.from_iterable(node.tokens for node in self.path()))

    def entry(self) -> tuple[list[Segment], Snapshot]:
        """The KV of its path, and its snapshot, which it must have."""
        assert self.snapshot is not None
        return [node.kv for node in self.path() if node.kv is not None], self.snapshot


class PrefixTree:
    """The prefixes in memory, which take `nbytes` of `limit` bytes, and on the disk behind it.

    Without a disk what is evicted is lost.
    """

    def __init__(self, limit: int, disk: PrefixStore | None = None) -> None:
        self.limit = limit
        self.nbytes = 0
        self._disk = disk
        self._roots: dict[str, Node] = {}
        self._pinned: set[Node] = set()
        # Nodes with a snapshot, the least recently used first.
        self._entries: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, salt: str, tokens: Tokens) -> Node | None:
        """The end of the longest entry in memory that is a prefix of the tokens, or all of them."""
        found, covered = self._walk(salt, tokens)
        node: Node | None = found
        while node is not None and (node.snapshot is None or node.end > covered):
            node = node.parent
        return node

    def covered(self, salt: str, tokens: Tokens) -> int:
        """How many of the tokens have their KV in memory, with or without an entry there."""
        return self._walk(salt, tokens)[1]

    def touch(self, node: Node) -> None:
        """An entry was used."""
        self._entries.move_to_end(node)
        if self._disk is not None:
            self._disk.touch(node.salt, node.prefix())

    def pin(self, node: Node) -> None:
        """Keep a node and its path until it is unpinned as often."""
        node.pins += 1
        self._pinned.add(node)

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        assert node.pins >= 0
        if not node.pins:
            self._pinned.discard(node)
        self._prune(node)

    def insert(
        self,
        salt: str,
        tokens: Tokens,
        segments: Sequence[Segment],
        snapshot: Snapshot,
        *,
        lasting: bool = False,
    ) -> bool:
        """Add an entry; False: it has no room, or the KV before its segments is not here any more.

        Args:
            salt, tokens: its `root_key`, and one or more tokens.
            segments: its KV behind what should be here already, up to the last token.
            snapshot: the states after that.
            lasting: other conversations are likely to begin with it (a system prompt), so that it
                stays when its chain is thinned.
        """
        node, covered = self._walk(salt, tokens)
        if covered < (segments[0].start if segments else len(tokens)):
            return False
        rest = [s for s in segments if s.end > covered]
        if rest and rest[0].start < covered:
            rest[0] = rest[0].cut(covered, rest[0].end)
        if node.end > covered:
            node = self._split(node, covered)
        if rest or node.snapshot is None:
            if not self._make_room(snapshot.nbytes + sum(s.nbytes for s in rest), node):
                return False
            if rest and node.parent is None:
                self._roots[salt] = node
            for kv in rest:
                child = Node(salt, node, tokens[kv.start : kv.end], kv)
                node.children[child.tokens[0]] = child
                node = child
                self.nbytes += kv.nbytes
            node.snapshot = snapshot
            self.nbytes += snapshot.nbytes
        self._entries[node] = None
        self._entries.move_to_end(node)
        node.lasting |= lasting
        if self._disk is not None:
            self._disk.keep(salt, tokens, *node.entry())
        self._thin(node)
        return True

    def remove(self, node: Node) -> None:
        """Forget an entry, on the disk too."""
        if self._disk is not None:
            self._disk.drop_snapshot(node.salt, node.prefix())
        if node.snapshot is not None:
            self._evict(node)

    def clear(self) -> None:
        """Evict all entries but those that are pinned; what is on the disk stays there."""
        self.forget_fetched()
        for node in [n for n in self._entries if not n.pins]:
            self._evict(node)

    @property
    def fetched_nbytes(self) -> int:
        """Bytes of what is being read from the disk, or has been and is not in the tree."""
        return 0 if self._disk is None else self._disk.reader.nbytes

    def on_disk(self, salt: str, tokens: Tokens) -> int:
        """Length of the longest entry on the disk that is a prefix of the tokens, or 0."""
        return 0 if self._disk is None else self._disk.longest(salt, tokens)

    def fetch(self, salt: str, tokens: Tokens, *, lasting: bool = False) -> Fetch:
        """Take in an entry from the disk, or have what is not in memory of it read.

        To be asked again while it is COMING: nothing is pinned meanwhile. If it is GONE, it is not
        found again.
        """
        assert self._disk is not None
        node, covered = self._walk(salt, tokens)
        self.pin(node)
        try:
            found = self._disk.fetch(salt, tokens, covered, self._make_room)
            if not isinstance(found, Fetch):
                kept = self.insert(salt, tokens, *found, lasting=lasting)
                found = Fetch.HERE if kept else Fetch.GONE
        except Exception:
            logger.exception("A prefix could not be read; its tokens are computed instead")
            found = Fetch.GONE
        self.unpin(node)
        if found is Fetch.GONE:
            self._disk.drop_snapshot(salt, tokens)
        return found

    def forget_fetched(self) -> None:
        """What is being read, or has been and is not in the tree, is not wanted any more."""
        if self._disk is not None:
            self._disk.forget()

    def _walk(self, salt: str, tokens: Tokens) -> tuple[Node, int]:
        """The last node that any of the tokens is in, and how many of them are in nodes."""
        node, at = self._roots.get(salt) or Node(salt, None, (), None), 0
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            node = child
            at += common_length(node.tokens, tokens, at)
            if at < node.end:
                break
        return node, at

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; it becomes the lower part, and the upper one is returned."""
        assert node.start < at < node.end and node.parent is not None and node.kv is not None
        # Should there be no memory for that, the tree is as it was.
        above, below = node.kv.cut(node.start, at), node.kv.cut(at, node.end)
        self.nbytes += above.nbytes + below.nbytes - node.kv.nbytes
        upper = Node(node.salt, node.parent, node.tokens[: at - node.start], above)
        node.parent.children[node.tokens[0]] = upper
        node.parent, node.kv, node.tokens = upper, below, node.tokens[at - node.start :]
        node.start = at
        upper.children[node.tokens[0]] = node
        return upper

    def _make_room(self, more: int, anchor: Node | None = None) -> bool:
        """Evict entries until so many bytes fit; none if they can't.

        The KV up to the anchor, where an entry is to be added, must stay; its snapshot need not.
        """
        room = self.limit - self.fetched_nbytes - more
        if self.nbytes <= room:
            return True
        ends = self._pinned if anchor is None else {*self._pinned, anchor}
        needed = {node for end in ends for node in end.path()}
        kept = sum(node.kv.nbytes for node in needed if node.kv is not None)
        kept += sum(node.snapshot.nbytes for node in self._pinned if node.snapshot is not None)
        if kept > room:
            return False
        for node in list(self._entries):
            if self.nbytes > room and not node.pins:
                self._evict(node, anchor)
        return True

    def _evict(self, node: Node, anchor: Node | None = None) -> None:
        """Drop an entry's snapshot, and the KV that no other needs."""
        assert node.snapshot is not None
        self.nbytes -= node.snapshot.nbytes
        node.snapshot = None
        del self._entries[node]
        self._prune(node, anchor)

    def _prune(self, node: Node, anchor: Node | None = None) -> None:
        """Drop the KV that no entry needs any more, from a node upwards."""
        while not (node.pins or node.snapshot is not None or node.children or node is anchor):
            parent = node.parent
            if parent is None or node.kv is None:
                if self._roots.get(node.salt) is node:
                    del self._roots[node.salt]
                return
            self.nbytes -= node.kv.nbytes
            del parent.children[node.tokens[0]]
            node = parent

    def _thin(self, node: Node) -> None:
        """Remove the snapshots that a chain can do without, now that it has grown to a node."""
        inner = [n for n in node.path()[:-1] if n.snapshot is not None]
        ends = spare([n.end for n in inner], node.end)
        for each in inner:
            branches = len(each.children) > 1
            if each.end in ends and not (branches or each.pins or each.lasting):
                self.remove(each)


def spare(ends: Sequence[int], last: int) -> list[int]:
    """Which snapshots of a chain to remove, so that their distances from its end about double.

    The first and the latest stay. Of the others one goes if the next before it is at most twice as
    far from the end as the next behind it. The ends are those before the last, ascending.
    """
    dropped: list[int] = []
    older = list(ends[:-NUM_RECENT])
    kept = ends[-NUM_RECENT] if older else last
    while len(older) > 1:
        end = older.pop()
        if last - older[-1] <= 2 * (last - kept):
            dropped.append(end)
        else:
            kept = end
    return dropped


def common_length(one: Tokens, other: Tokens, at: int = 0) -> int:
    """How many tokens `one` has in common with `other` from its place `at` on."""
    same, end = 0, min(len(one), len(other) - at)
    # Slices are compared much faster than their tokens one by one; most often all are the same.
    middle = end
    while same < end:
        if one[same:middle] == other[at + same : at + middle]:
            same = middle
        else:
            end = middle - 1
        middle = (same + end + 1) // 2
    return same
