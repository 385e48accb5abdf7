"""Which prefixes are kept, found and forgotten. No arrays, no model: policy alone.

A radix tree of token segments for each salt. A node holds the KV of its own tokens, so branches
share what they share. A recurrent state exists only where it was saved: some nodes have one at
their end, the snapshot, and a match ends only there.

An entry is a snapshot with the KV of the path to it. The least recently used goes first. Where
others lie beyond it, the snapshot alone goes: they need the KV.

With a disk, what goes from memory stays in the tree while the disk has it, and is fetched when it
is wanted. Memory and disk each forget what they have used least.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from mlx_mtp.cache.prefix_node import Disk, Fetch, Node, Payload, SplitPayload, Tokens
from mlx_mtp.cache.prefix_thinning import spare


class PrefixTree:
    """All prefixes.

    Args:
        limit: bytes that they may take together, in memory.
        disk: keeps them beyond memory; None: what is forgotten is lost.

    Attributes:
        nbytes: what they take in memory.
    """

    def __init__(self, limit: int, disk: Disk | None = None) -> None:
        self.limit = limit
        self.nbytes = 0
        self._disk = disk
        self._roots: dict[str, Node] = {}
        self._anchor: Node | None = None
        self._pinned: set[Node] = set()
        # Nodes with a snapshot in memory, the least recently used first.
        self._entries: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        """Entries in memory."""
        return len(self._entries)

    def match(self, salt: str, tokens: Tokens, *, in_memory: bool = False) -> Node | None:
        """The end of the longest entry that is a prefix of the tokens, or all of them.

        Args:
            salt: whose.
            tokens: of a prompt.
            in_memory: leave out what would have to be loaded.
        """
        node, covered = self._find(salt, tokens)
        if node is not None and node.end > covered:
            node = node.parent
        while node is not None and node.snapshot is None:
            if not in_memory and self._on_disk(node):
                break
            node = node.parent
        return node

    @property
    def fetched_nbytes(self) -> int:
        """Of what is on its way from the disk, or here and not taken in; beside `nbytes`."""
        return 0 if self._disk is None else self._disk.fetched_nbytes

    def fetch(self, node: Node) -> Fetch:
        """Have an entry read that is on the disk alone, and the path to it.

        To be asked again, with what then matches: nothing of the path is kept here meanwhile.

        Returns:
            HERE: `load` takes it in. NEVER: it has no room in memory now, or the disk hangs.
        """
        assert self._disk is not None and node.snapshot is None
        path = node.path()
        absent = [n for n in path if n.kv is None]
        for each in path:
            self.pin(each)
        fits = self._make_room(self._disk.cost(absent, node))
        for each in reversed(path):
            self.unpin(each)
        return self._disk.fetch(absent, node) if fits else Fetch.NEVER

    def load(self, node: Node) -> bool:
        """Take in an entry that has been fetched.

        Returns:
            False if it couldn't be read: then it is gone from the tree, with all that lies beyond
            what is missing.
        """
        path = node.path()
        for each in path:
            self.pin(each)
        try:
            return self._read(node, [n for n in path if n.kv is None])
        finally:
            for each in reversed(path):
                self.unpin(each)

    def forget_fetched(self) -> None:
        """What was fetched and not loaded is not wanted any more."""
        if self._disk is not None:
            self._disk.forget()

    def touch(self, node: Node) -> None:
        """The entry is used."""
        if node in self._entries:
            self._entries.move_to_end(node)
        if self._disk is not None:
            self._disk.touch(node)

    def covered(self, salt: str, tokens: Tokens) -> int:
        """For how many of the first tokens there is KV in memory."""
        return self._covered(*self._find(salt, tokens))

    def pin(self, node: Node) -> None:
        """Keep an entry until it is unpinned as often."""
        node.pins += 1
        self._pinned.add(node)

    def unpin(self, node: Node) -> None:
        """See `pin`."""
        node.pins -= 1
        assert node.pins >= 0
        if not node.pins:
            self._pinned.discard(node)
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
        node, at = self._find(salt, tokens)
        held = self._covered(node, at)
        if held < start:
            return False
        if held == len(tokens):
            kv = None
        elif held > start:
            assert kv is not None
            kv = kv.split(held - start)[1]
        if node is None:
            node = self.root(salt)
        elif node.end > at:
            node = self._split(node, at)
        if kv is None and node.snapshot is not None:
            self.touch(node)
            node.lasting |= lasting
            if self._disk is not None:
                self._disk.keep(node)
            return True
        # The KV that the entry hangs on must not make room for it; a snapshot there may.
        self._anchor = anchor = node.last_in_memory()
        fits = self._make_room(snapshot.nbytes + (0 if kv is None else kv.nbytes))
        self._anchor = None
        if not fits:
            self._prune(anchor)
            return False
        node = self._attach(node, tokens, kv, snapshot)
        node.lasting |= lasting
        if self._disk is not None:
            self._disk.keep(node)
        self._thin(node)
        return True

    def root(self, salt: str) -> Node:
        """The empty prefix of a salt."""
        if salt not in self._roots:
            self._roots[salt] = Node(None, 0, (), None)
            self._roots[salt].key = salt
        return self._roots[salt]

    def graft(self, parent: Node, tokens: Tokens) -> Node:
        """The node that so many tokens after another lead to; what is new of it is on the disk."""
        node, at = parent.walk(tokens)
        end = parent.end + at
        if node.end > end:
            node = self._split(node, end)
        if at < len(tokens):
            child = node.children[tokens[at]] = Node(node, end, tokens[at:], None)
            node = child
        return node

    def sweep(self) -> None:
        """Forget the nodes that were on the disk alone and have gone from there."""
        for node in list(self.nodes()):
            if node.kv is None and not self._kept(node):
                node.cut_off()
        self._roots = {salt: root for salt, root in self._roots.items() if root.children}

    def remove(self, node: Node) -> None:
        """Forget an entry, because it can't be used."""
        if self._disk is not None:
            self._disk.drop_snapshot(node)
        if node.snapshot is not None:
            self._forget(node)

    def clear(self) -> None:
        """Forget all entries but those that are pinned; what is on the disk stays there."""
        self.forget_fetched()
        for node in [n for n in self._entries if not n.pins]:
            self._forget(node)

    def _find(self, salt: str, tokens: Tokens) -> tuple[Node | None, int]:
        """As `Node.walk` from a salt's root; None for a salt that has nothing."""
        root = self._roots.get(salt)
        return (None, 0) if root is None else root.walk(tokens)

    @staticmethod
    def _covered(node: Node | None, at: int) -> int:
        """How many of the tokens that a walk found are in memory."""
        return 0 if node is None else min(node.last_in_memory().end, at)

    def _on_disk(self, node: Node) -> bool:
        return self._disk is not None and bool(node.tokens) and self._disk.holds_snapshot(node)

    def _kept(self, node: Node) -> bool:
        return self._disk is not None and self._disk.holds(node)

    def _read(self, node: Node, absent: Sequence[Node]) -> bool:
        """Fill the nodes of a path whose KV is not in memory, and the snapshot of the last."""
        assert self._disk is not None
        for each in absent:
            each.kv = self._disk.read(each)
            if each.kv is None:
                for lost in each.under():
                    self._disk.drop(lost)
                each.cut_off()
                return False
            self.nbytes += each.kv.nbytes
        node.snapshot = self._disk.read_snapshot(node)
        if node.snapshot is None:
            self._disk.drop_snapshot(node)
            return False
        self.nbytes += node.snapshot.nbytes
        self._entries[node] = None
        return True

    def _attach(
        self, node: Node, tokens: Tokens, kv: SplitPayload | None, snapshot: Payload
    ) -> Node:
        """Hang an entry on a node; nodes before it that were on the disk alone get their KV too."""
        absent = [n for n in node.path() if n.kv is None]
        if node.end < len(tokens):
            rest = tokens[node.end :]
            child = node.children[rest[0]] = Node(node, node.end, rest, None)
            absent.append(child)
            node = child
        for each in absent:
            assert kv is not None
            if each is node:
                each.kv = kv
            else:
                each.kv, kv = kv.split(len(each.tokens))
            self.nbytes += each.kv.nbytes
        node.snapshot = snapshot
        self.nbytes += snapshot.nbytes
        self._entries[node] = None
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; it becomes the lower part, and the upper one is returned."""
        assert node.start < at < node.end and node.parent is not None
        upper = Node(node.parent, node.start, node.tokens[: at - node.start], None)
        if node.kv is not None:
            # Should there be no memory for that, the tree is as it was.
            before = node.kv.nbytes
            upper.kv, node.kv = node.kv.split(at - node.start)
            self.nbytes += upper.kv.nbytes + node.kv.nbytes - before
        node.parent.children[node.tokens[0]] = upper
        node.tokens = node.tokens[at - node.start :]
        node.parent, node.start = upper, at
        upper.children[node.tokens[0]] = node
        if self._disk is not None and node.kv is not None:
            self._disk.split(upper, node)
        return upper

    def _make_room(self, more: int) -> bool:
        """Forget entries until so many bytes fit; none if they can't."""
        room = self.limit - self.fetched_nbytes - more
        if self.nbytes <= room:
            return True
        if self._kept_nbytes() > room:
            return False
        while self.nbytes > room:
            oldest = next((n for n in self._entries if not n.pins), None)
            if oldest is None:
                return False
            self._forget(oldest)
        return True

    def _kept_nbytes(self) -> int:
        """What would be left if all entries were forgotten that may be."""
        ends = self._pinned if self._anchor is None else {*self._pinned, self._anchor}
        nodes = {node for end in ends for node in end.path()}
        snapshots = (n.snapshot for n in self._pinned)
        return sum(p.nbytes for p in (*snapshots, *(n.kv for n in nodes)) if p is not None)

    def _forget(self, node: Node) -> None:
        assert node.snapshot is not None
        self.nbytes -= node.snapshot.nbytes
        node.snapshot = None
        del self._entries[node]
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Drop the KV that no entry in memory needs any more, from a node upwards."""
        while not (node.pins or node.snapshot is not None or node.more_in_memory()):
            if node is self._anchor:
                return
            parent = node.parent
            if parent is None:
                if not node.children and self._roots.get(node.key) is node:
                    del self._roots[node.key]
                return
            if node.kv is not None:
                self.nbytes -= node.kv.nbytes
                node.kv = None
            if not self._kept(node):
                node.cut_off()
            node = parent

    def _thin(self, node: Node) -> None:
        """Forget the snapshots that a chain can do without, now that it has grown to a node."""
        inner = [n for n in node.path()[:-1] if n.snapshot is not None or self._on_disk(n)]
        chain = {n.end: n for n in inner if len(n.children) == 1 and not (n.pins or n.lasting)}
        for end in spare([n.end for n in inner], node.end):
            if end in chain:
                self.remove(chain[end])

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node.tokens:
                yield node
