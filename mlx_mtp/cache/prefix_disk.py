"""Between the tree of prefixes and its files: which node is which file, and what is in it.

A node has up to two files: one of its KV, and behind that, as a leaf of its own, one of its
snapshot. So the disk forgets as memory does, the snapshot alone where others lie beyond it, and no
snapshot is read that isn't wanted.

A file's KV may begin before its node does: when a node is cut in two while it is not in memory, its
file stays as it is, and the lower part reads the rows that are its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlx_mtp.cache.prefix_arrays import to_mlx
from mlx_mtp.cache.prefix_file import StoredNode
from mlx_mtp.cache.prefix_keys import extend_key
from mlx_mtp.cache.prefix_node import Fetch, Node
from mlx_mtp.cache.prefix_state import Segment, Snapshot
from mlx_mtp.cache.prefix_store import PrefixStore
from mlx_mtp.cache.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)

_SNAPSHOT = 2**32 - 1
"""No token has this id: behind a node's key it makes that of its snapshot."""


class PrefixDisk:
    """Keeps a tree's nodes in a store (see `prefix_node.Disk`). For the engine's thread.

    Args:
        store: open; whoever opened it closes it.
    """

    def __init__(self, store: PrefixStore) -> None:
        self._store = store

    def fill(self, tree: PrefixTree) -> None:
        """Hang what was in the store at its start into a tree; no array is read."""
        nodes: dict[str, Node] = {}
        for header in self._store.found:
            outer = header.parent == header.root
            parent = tree.root(header.root) if outer else nodes.get(header.parent)
            if parent is None:
                continue
            if not header.num_tokens:
                parent.lasting = "lasting" in header.extra
                continue
            node = nodes[header.key] = tree.graft(parent, header.tokens)
            node.key = header.key
        self._store.found.clear()

    def holds(self, node: Node) -> bool:
        """See `Disk`."""
        return self._store.holds(_key(node))

    def holds_snapshot(self, node: Node) -> bool:
        """See `Disk`."""
        return self._store.holds(_snapshot_key(node))

    @property
    def fetched_nbytes(self) -> int:
        """See `Disk`."""
        return self._store.reader.nbytes

    def cost(self, nodes: Sequence[Node], entry: Node) -> int:
        """See `Disk`."""
        keys = (key for key in _keys(nodes, entry) if not self._store.reader.asked(key))
        return sum(map(self._store.size, keys))

    def fetch(self, nodes: Sequence[Node], entry: Node) -> Fetch:
        """See `Disk`."""
        reader = self._store.reader
        if reader.hangs:
            return Fetch.NEVER
        for key in _keys(nodes, entry):
            reader.ask(key, self._store.size(key))
        return Fetch.HERE if reader.done else Fetch.COMING

    def forget(self) -> None:
        """See `Disk`."""
        self._store.reader.forget()

    def read(self, node: Node) -> Segment | None:
        """See `Disk`."""
        try:
            found = self._store.reader.take(_key(node))
            if found is None:
                return None
            start, bits = int(found.header.extra["start"]), int(found.header.extra["bits"])
            end = start + found.header.num_tokens
            segment = Segment(start, end, _to_mlx(found), bits or None)
            if start < node.start < end:
                segment = segment.split(node.start - start)[1]
            mx.eval(segment.arrays)
        except Exception:
            logger.exception("A prefix could not be read; what builds on it is computed instead")
            return None
        return segment if (segment.start, segment.end) == (node.start, node.end) else None

    def read_snapshot(self, node: Node) -> Snapshot | None:
        """See `Disk`."""
        try:
            found = self._store.reader.take(_snapshot_key(node))
            if found is None:
                return None
            snapshot = Snapshot(_to_mlx(found))
            mx.eval(snapshot.arrays)
        except Exception:
            logger.exception("A prefix's states could not be read")
            return None
        return snapshot

    def keep(self, node: Node) -> None:
        """See `Disk`."""
        if all(self.holds(each) or self._put(each) for each in node.path()):
            assert isinstance(node.snapshot, Snapshot)
            key, extra = _snapshot_key(node), {"lasting": "1"} if node.lasting else {}
            self._write(key, _key(node), _root(node), (), node.snapshot.arrays, extra)

    def split(self, upper: Node, lower: Node) -> None:
        """See `Disk`."""
        if self.holds(lower) and self._put(upper):
            self._put(lower, replace=True)

    def touch(self, node: Node) -> None:
        """See `Disk`."""
        self._store.touch(_snapshot_key(node))

    def drop(self, node: Node) -> None:
        """See `Disk`."""
        self._store.remove_under(_key(node))

    def drop_snapshot(self, node: Node) -> None:
        """See `Disk`."""
        if self.holds_snapshot(node):
            self._store.remove(_snapshot_key(node))

    def _put(self, node: Node, *, replace: bool = False) -> bool:
        assert node.parent is not None and isinstance(node.kv, Segment)
        extra = {"start": str(node.start), "bits": str(node.kv.bits or 0)}
        key, parent = _key(node), _key(node.parent)
        return self._write(
            key, parent, _root(node), node.tokens, node.kv.arrays, extra, replace=replace
        )

    def _write(
        self,
        key: str,
        parent: str,
        root: str,
        tokens: tuple[int, ...],
        arrays: Mapping[str, mx.array],
        extra: Mapping[str, str],
        *,
        replace: bool = False,
    ) -> bool:
        try:
            mx.eval(arrays)
            return self._store.put(key, parent, root, tokens, arrays, extra=extra, replace=replace)
        except Exception:
            logger.exception("A prefix could not be given to the disk")
            return False


def _key(node: Node) -> str:
    """A node's; those before it get theirs on the way."""
    if not node.key:
        unnamed = [node]
        while (parent := unnamed[-1].parent) is not None and not parent.key:
            unnamed.append(parent)
        for each in reversed(unnamed):
            assert each.parent is not None
            each.key = extend_key(each.parent.key, each.tokens)
    return node.key


def _keys(nodes: Sequence[Node], entry: Node) -> list[str]:
    """Of nodes' KV and of one's snapshot."""
    return [*map(_key, nodes), _snapshot_key(entry)]


def _to_mlx(node: StoredNode) -> dict[str, mx.array]:
    return {name: to_mlx(array) for name, array in node.arrays.items()}


def _snapshot_key(node: Node) -> str:
    return extend_key(_key(node), (_SNAPSHOT,))


def _root(node: Node) -> str:
    while node.parent is not None:
        node = node.parent
    return node.key
