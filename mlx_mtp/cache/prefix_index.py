"""Which nodes a prefix store holds, and which goes first when it is full. No files, no arrays."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

_LEAST_HEAP = 64


@dataclass(slots=True)
class Entry:
    """A node that is on disk.

    Args:
        key, parent, root: as `NodeHeader` has them.
        nbytes: of its file.
        used: when it was used last, in nanoseconds.
    """

    key: str
    parent: str
    root: str
    nbytes: int
    used: int


class PrefixIndex:
    """Nodes by key. A node is of use only while its ancestors are here.

    Attributes:
        nbytes: of all files.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._children: dict[str, set[str]] = {}
        # (used, key) of every leaf, and of some that were one or were used since.
        self._oldest: list[tuple[int, str]] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: str) -> Entry | None:
        """The entry, or None."""
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        """Take a node in; one with the same key is replaced and keeps its children."""
        self.remove(entry.key)
        self._entries[entry.key] = entry
        self._children.setdefault(entry.parent, set()).add(entry.key)
        self.nbytes += entry.nbytes
        self._note_leaf(entry)

    def remove(self, key: str) -> Entry | None:
        """Forget one node; its children, if any, are orphans until it is back."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.nbytes -= entry.nbytes
        siblings = self._children[entry.parent]
        siblings.discard(key)
        if not siblings:
            del self._children[entry.parent]
            parent = self._entries.get(entry.parent)
            if parent is not None:
                self._note_leaf(parent)
        return entry

    def under(self, key: str) -> list[str]:
        """The node, if it is here, and all that build on it, deepest last."""
        found, at = [key], 0
        while at < len(found):
            found += self._children.get(found[at], ())
            at += 1
        return [k for k in found if k in self._entries]

    def touch(self, key: str, now: int) -> list[str]:
        """The node and its ancestors were used; returns those of them that are here."""
        touched = []
        entry = self._entries.get(key)
        while entry is not None and entry.used != now:
            entry.used = now
            touched.append(entry.key)
            self._note_leaf(entry)
            entry = self._entries.get(entry.parent)
        return touched

    def oldest_leaf(self, spared: frozenset[str] = frozenset()) -> Entry | None:
        """The node on which none builds that has been unused for longest."""
        passed: list[tuple[int, str]] = []
        found = None
        while self._oldest:
            used, key = self._oldest[0]
            entry = self._entries.get(key)
            if entry is not None and entry.used == used and key not in self._children:
                if key not in spared:
                    found = entry
                    break
                passed.append((used, key))
            heapq.heappop(self._oldest)
        for each in passed:
            heapq.heappush(self._oldest, each)
        return found

    def lineage(self, key: str) -> frozenset[str]:
        """The node and its ancestors, as far as they are here."""
        found = set()
        entry = self._entries.get(key)
        while entry is not None and entry.key not in found:
            found.add(entry.key)
            entry = self._entries.get(entry.parent)
        return frozenset(found)

    def orphans(self) -> list[str]:
        """Nodes that lack an ancestor, and all that build on them."""
        lost: dict[str, None] = {}
        for entry in self._entries.values():
            if entry.parent != entry.root and entry.parent not in self._entries:
                lost.update(dict.fromkeys(self.under(entry.key)))
        return list(lost)

    def _note_leaf(self, entry: Entry) -> None:
        if entry.key in self._children:
            return
        heapq.heappush(self._oldest, (entry.used, entry.key))
        if len(self._oldest) > _LEAST_HEAP + 2 * len(self._entries):
            leaves = (e for e in self._entries.values() if e.key not in self._children)
            self._oldest = [(e.used, e.key) for e in leaves]
            heapq.heapify(self._oldest)
