"""A radix tree of prefixes: which are kept in memory, found and evicted. No arrays, no model.

Each salt has a tree of token segments. A node holds the KV of its own tokens. An entry is a node
with a snapshot of the recurrent states at its end; a match can end only at an entry. The least
recently used entry is evicted first; if other entries build on it, only its snapshot is freed.
"""

from __future__ import annotations

import enum
import hashlib
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_mtp.prefix.disk import PrefixStore
    from mlx_mtp.prefix.segments import Entry, Segment

logger = logging.getLogger(__name__)

TokenIds = tuple[int, ...]

NUM_RECENT = 3  # latest snapshots of a chain, which are never thinned
_KEY_DIGITS = 40
_TOKEN_BYTES = 8
_STRIDE = 256


class Fetch(enum.Enum):
    """The state of a read from the disk."""

    HERE = enum.auto()
    COMING = enum.auto()
    GONE = enum.auto()  # It could not be read.
    NO_ROOM = enum.auto()  # in memory
    LATE = enum.auto()  # The disk hangs.


@dataclass(eq=False)
class Node:
    """A segment of tokens with their KV, which ends at token `end` of the prefix.

    The root has no tokens and no KV.
    """

    salt: str  # its `root_key`
    parent: Node | None
    tokens: TokenIds
    kv: Segment | None
    snapshot: Segment | None = None  # the states after the last token
    lasting: bool = False  # True: the snapshot is never thinned
    children: dict[tuple[str, int], Node] = field(default_factory=dict)  # by salt and first token
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = 0 if self.kv is None else self.kv.end

    @property
    def place(self) -> tuple[str, int]:
        return self.salt, self.tokens[0]

    def path(self) -> list[Node]:
        """Returns the nodes from below the root to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix(self) -> TokenIds:
        return tuple(chain.from_iterable(node.tokens for node in self.path()))

    def entry(self) -> Entry:
        assert self.snapshot is not None
        return [*(node.kv for node in self.path() if node.kv is not None), self.snapshot]


class PrefixTree:
    """The prefixes in memory, which take `nbytes` of at most `limit` bytes, and those on `disk`."""

    def __init__(self, limit: int, disk: PrefixStore | None = None) -> None:
        self.limit = limit
        self.nbytes = 0
        self.disk = disk
        self.evicted: Counter[str] = Counter()  # evicted entries by reason
        self._root = Node("", None, (), None)
        self._pins: Counter[Node] = Counter()
        self._entries: OrderedDict[Node, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def longest_prefix(self, salt: str, tokens: TokenIds) -> Node | None:
        """Returns the longest entry in memory that is a prefix of the tokens, or None."""
        last, covered = self._walk(salt, tokens)
        node: Node | None = last
        while node is not None and (node.snapshot is None or node.end > covered):
            node = node.parent
        return node

    def covered(self, salt: str, tokens: TokenIds) -> int:
        """Returns how many of the first tokens have KV in memory, with or without a snapshot."""
        return self._walk(salt, tokens)[1]

    def touch(self, node: Node) -> None:
        """Mark an entry as used now."""
        self._entries.move_to_end(node)
        if self.disk is not None:
            self.disk.touch(node.salt, node.prefix())

    def pin(self, node: Node) -> None:
        """Keep a node and its path until it has been unpinned as often as pinned."""
        self._pins[node] += 1

    def unpin(self, node: Node) -> None:
        assert self._pins[node] > 0
        self._pins -= Counter([node])
        self._prune(node)

    def insert(self, salt: str, tokens: TokenIds, entry: Entry, lasting: bool = False) -> bool:
        """Add an entry; returns False if there is no room, or if KV before the entry's is gone.

        `entry` has the KV that is not in the tree yet. A `lasting` entry is never thinned.
        """
        *kv, snapshot = entry
        node, covered = self._walk(salt, tokens)
        if covered < entry[0].start:
            return False
        rest = [segment for segment in kv if segment.end > covered]
        if rest and rest[0].start < covered:
            rest[0] = rest[0].cut(covered, rest[0].end)
        if node.end > covered:
            node = self._split(node, covered)
        if rest or node.snapshot is None:
            if not self._make_room(snapshot.nbytes + sum(s.nbytes for s in rest), node):
                return False
            for segment in rest:
                child = Node(salt, node, tokens[segment.start : segment.end], segment)
                node.children[child.place] = child
                node = child
            node.snapshot = snapshot
            self.nbytes += sum(segment.nbytes for segment in (*rest, snapshot))
        self._entries[node] = None
        self._entries.move_to_end(node)
        node.lasting |= lasting
        if self.disk is not None:
            self.disk.keep(salt, tokens, node.entry())
        self._thin(node)
        return True

    def remove(self, node: Node, reason: str = "could not be restored") -> None:
        if self.disk is not None:
            self.disk.drop_snapshot(node.salt, node.prefix())
        if node.snapshot is not None:
            self._evict(node, reason)

    def clear(self) -> None:
        """Evict all entries that are not pinned; those on the disk stay there."""
        if self.disk is not None:
            self.disk.forget()
        for node in [n for n in self._entries if n not in self._pins]:
            self._evict(node, "memory ran out")

    @property
    def fetched_nbytes(self) -> int:
        """Bytes of files that are being read, or have been read but are not in the tree yet."""
        return 0 if self.disk is None else sum(file.nbytes for file in self.disk.reading)

    def fetch(self, salt: str, tokens: TokenIds, lasting: bool = False) -> Fetch:
        """Insert an entry from disk, or start reading it; call again while it is COMING."""
        assert self.disk is not None
        node, covered = self._walk(salt, tokens)
        self.pin(node)
        try:
            entry = self.disk.fetch(salt, tokens, covered, self._make_room)
            if isinstance(entry, Fetch):
                state = entry
            else:
                state = Fetch.HERE if self.insert(salt, tokens, entry, lasting) else Fetch.GONE
        except Exception:
            logger.exception("A prefix could not be read; its tokens are computed instead")
            state = Fetch.GONE
        self.unpin(node)
        if state is Fetch.GONE:
            self.disk.drop_snapshot(salt, tokens)
        return state

    def _walk(self, salt: str, tokens: TokenIds) -> tuple[Node, int]:
        """The last node on the tokens' path, and how many of the tokens are in nodes."""
        node, at = self._root, 0
        while at == node.end < len(tokens) and (salt, tokens[at]) in node.children:
            node = node.children[salt, tokens[at]]
            at += common_length(node.tokens, tokens, at)
        return node, at

    def _split(self, node: Node, at: int) -> Node:
        """Split a node, which becomes the lower part; returns the upper part."""
        assert node.parent is not None and node.kv is not None
        start = node.kv.start
        # If there is no memory for the copies, the tree stays as it was.
        above, below = node.kv.cut(start, at), node.kv.cut(at, node.end)
        self.nbytes += above.nbytes + below.nbytes - node.kv.nbytes
        upper = Node(node.salt, node.parent, node.tokens[: at - start], above)
        node.parent.children[node.place] = upper
        node.parent, node.kv, node.tokens = upper, below, node.tokens[at - start :]
        upper.children[node.place] = node
        return upper

    def _make_room(self, more: int, anchor: Node | None = None) -> bool:
        """Evict entries until `more` bytes fit, but not KV up to `anchor`.

        Returns False, and evicts nothing, if the bytes can't fit.
        """
        room = self.limit - self.fetched_nbytes - more
        ends = [*self._pins, anchor] if anchor else [*self._pins]
        needed = {node for end in ends for node in end.path()}
        pinned = sum(node.kv.nbytes for node in needed if node.kv is not None)
        pinned += sum(node.snapshot.nbytes for node in self._pins if node.snapshot is not None)
        if pinned > room:
            return False
        for node in list(self._entries):
            if self.nbytes > room and node not in self._pins:
                self._evict(node, "least recently used", anchor)
        return True

    def _evict(self, node: Node, reason: str, anchor: Node | None = None) -> None:
        assert node.snapshot is not None
        self.evicted[reason] += 1
        self.nbytes -= node.snapshot.nbytes
        node.snapshot = None
        del self._entries[node]
        self._prune(node, anchor)

    def _prune(self, node: Node, anchor: Node | None = None) -> None:
        needed = {*self._pins, anchor}
        while node.parent and not (node.snapshot or node.children or node in needed):
            assert node.kv is not None
            self.nbytes -= node.kv.nbytes
            del node.parent.children[node.place]
            node = node.parent

    def _thin(self, node: Node) -> None:
        """Remove dispensable snapshots of the chain that ends with `node`."""
        inner = [n for n in node.path()[:-1] if n.snapshot is not None]
        ends = spare([n.end for n in inner], node.end)
        for each in inner:
            branches = len(each.children) > 1
            if each.end in ends and not (branches or each in self._pins or each.lasting):
                self.remove(each, "thinned: others of its chain are near")


def spare(ends: Sequence[int], last: int) -> list[int]:
    """Returns the `ends` of a chain's snapshots to remove, so that distances from `last` double.

    The first snapshot and the latest `NUM_RECENT` stay. Another one is removed if the snapshot
    before it is at most twice as far from the end as the one after it.
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


def common_length(one: TokenIds, other: TokenIds, at: int = 0) -> int:
    """Returns the length of the common prefix of `one` and `other[at:]`."""
    end = min(len(one), len(other) - at)
    for start in range(0, end, _STRIDE):  # Comparing slices is faster than comparing tokens.
        stop = min(start + _STRIDE, end)
        if one[start:stop] != other[at + start : at + stop]:
            return next(i for i in range(start, stop) if one[i] != other[at + i])
    return end


def root_key(salt: str | None, *, optimistic: bool = False) -> str:
    """Returns the key of the empty prefix, 40 hexadecimal digits; None is not the empty salt."""
    text = b"mlx-mtp prefix\0" + (b"optimistic\0" if optimistic else b"")
    text += b"" if salt is None else b"salt\0" + salt.encode()
    return hashlib.sha256(text).hexdigest()[:_KEY_DIGITS]


def prefix_keys(root: str, tokens: Sequence[int], ends: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yields lengths and keys of the prefixes of a prompt that end at `ends`, which ascend.

    A key is a hash of the salt's `root_key` and the tokens, however these are split into files.
    """
    data = memoryview(array("Q", tokens).tobytes())
    digest, done = hashlib.sha256(bytes.fromhex(root)), 0
    for end in ends:
        digest.update(data[done * _TOKEN_BYTES : end * _TOKEN_BYTES])
        done = end
        yield end, digest.hexdigest()[:_KEY_DIGITS]
