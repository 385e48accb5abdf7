"""What the prefix cache's tree is made of: nodes, and what others bring to them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

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
        kv: of these tokens; None in a root, and where it is on the disk alone. Then nothing beyond
            the node is in memory either.
        snapshot: the states after the last of them, in memory.
        lasting: its snapshot is not thinned.
        children: by their first token.
        pins: while above 0 nothing of the node is forgotten.
        key: its prefix's name on the disk (`prefix_keys`), once it has been needed.
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
        self.key = ""

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

    def under(self) -> list[Node]:
        """This one and all that hang on it, parents first."""
        found, at = [self], 0
        while at < len(found):
            found += found[at].children.values()
            at += 1
        return found

    def walk(self, tokens: Tokens) -> tuple[Node, int]:
        """Follow tokens from its end: the last node that any is in, and how many are in nodes."""
        node, at = self, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            node = child
            common = common_length(node.tokens, tokens, at)
            at += common
            if common < len(node.tokens):
                break
        return node, at

    def last_in_memory(self) -> Node:
        """The nearest node up the path whose KV is in memory, or the root."""
        node = self
        while node.kv is None and node.parent is not None:
            node = node.parent
        return node

    def more_in_memory(self) -> bool:
        """The KV of a child is, and needs this node's."""
        return any(child.kv is not None for child in self.children.values())

    def cut_off(self) -> None:
        """Take it out of its tree, with what hangs on it; nothing of that is in memory."""
        if self.parent is not None and self.parent.children.get(self.tokens[0]) is self:
            del self.parent.children[self.tokens[0]]


class Fetch(enum.Enum):
    """How far an entry on the disk has come."""

    HERE = enum.auto()
    COMING = enum.auto()
    NEVER = enum.auto()


class Disk(Protocol):
    """Keeps nodes' KV and snapshots beyond memory. Nothing that goes wrong there is raised here.

    What is to be read is asked for first (`fetch`) and taken when it is here (`read`,
    `read_snapshot`), so that none of these takes long.
    """

    @property
    def fetched_nbytes(self) -> int:
        """Of all that was asked for and has not been read yet."""

    def holds(self, node: Node) -> bool:
        """The node's KV is there, or on its way."""

    def holds_snapshot(self, node: Node) -> bool:
        """Its snapshot is."""

    def cost(self, nodes: Sequence[Node], entry: Node) -> int:
        """At least what `fetch` would add to `fetched_nbytes`."""

    def fetch(self, nodes: Sequence[Node], entry: Node) -> Fetch:
        """Ask for the KV of nodes and the snapshot of one, or ask again how far they have come.

        Returns:
            HERE: what can be had of them is here. NEVER: the disk hangs.
        """

    def forget(self) -> None:
        """What was asked for is not wanted any more."""

    def read(self, node: Node) -> SplitPayload | None:
        """The KV of exactly the node's tokens; None if it can't be had, or was not asked for."""

    def read_snapshot(self, node: Node) -> Payload | None:
        """The snapshot; as `read`."""

    def keep(self, node: Node) -> None:
        """Write what is not there yet of a node and of the path to it, which are in memory."""

    def split(self, upper: Node, lower: Node) -> None:
        """A node was cut in two, and is in memory."""

    def touch(self, node: Node) -> None:
        """The node's snapshot was used."""

    def drop(self, node: Node) -> None:
        """The KV is of no use any more, nor is what builds on it."""

    def drop_snapshot(self, node: Node) -> None:
        """The snapshot is not wanted any more."""


def common_length(one: Tokens, other: Tokens, at: int = 0) -> int:
    """How many tokens `one` has in common with `other` from its place `at` on."""
    most = min(len(one), len(other) - at)
    if one[:most] == other[at : at + most]:
        return most
    # Slices are compared much faster than their tokens one by one, and here each but about twice.
    same, end = 0, most
    while end - same > 1:
        middle = (same + end) // 2
        if one[same:middle] == other[at + same : at + middle]:
            same = middle
        else:
            end = middle
    return same
