"""Which nodes a prefix store holds, and which goes first when it is full. No files, no arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
            entry = self._entries.get(entry.parent)
        return touched

    def oldest_leaf(self, spared: frozenset[str] = frozenset()) -> Entry | None:
        """The node on which none builds that has been unused for longest."""
        leaves = (
            e for e in self._entries.values() if e.key not in self._children and e.key not in spared
        )
        return min(leaves, key=lambda e: e.used, default=None)

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
