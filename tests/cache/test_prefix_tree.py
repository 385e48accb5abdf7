"""The prefix cache's policy, with no arrays: what is found, shared, pinned and forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_mtp.cache.prefix_node import Fetch, Node, common_length
from mlx_mtp.cache.prefix_thinning import NUM_RECENT, spare
from mlx_mtp.cache.prefix_tree import PrefixTree

STATE = 50


@dataclass(frozen=True)
class FakeKV:
    """One byte a token; knows which tokens it is of."""

    tokens: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return len(self.tokens)

    def split(self, at: int) -> tuple[FakeKV, FakeKV]:
        assert 0 < at < len(self.tokens)
        return FakeKV(self.tokens[:at]), FakeKV(self.tokens[at:])


@dataclass(frozen=True)
class FakeState:
    """Knows which prefix it is the state of."""

    tokens: tuple[int, ...]
    nbytes: int = STATE


def put(tree: PrefixTree, tokens, salt: str = "", start: int | None = None) -> bool:
    tokens = tuple(tokens)
    start = tree.covered(salt, tokens) if start is None else start
    kv = FakeKV(tokens[start:]) if start < len(tokens) else None
    return tree.insert(salt, tokens, start, kv, FakeState(tokens))


def found(tree: PrefixTree, tokens, salt: str = "") -> int:
    node = tree.match(salt, tuple(tokens))
    return 0 if node is None else node.end


def check_integrity(tree: PrefixTree, disk: FakeDisk | None = None) -> None:
    """Every byte is counted once, every node is needed, and holds what its place says."""
    nodes = list(tree.nodes())
    total = 0
    for node in nodes:
        whole = tuple(t for n in node.path() for t in n.tokens)
        assert node.end == len(whole)
        assert node.parent.children[node.tokens[0]] is node
        if disk is not None and node.kv is None:
            assert node.snapshot is None
            assert not any(child.kv is not None for child in node.children.values())
            continue
        assert node.kv.tokens == node.tokens
        total += node.kv.nbytes
        if node.snapshot is not None:
            assert node.snapshot.tokens == whole
            total += node.snapshot.nbytes
        needed = any(child.kv is not None for child in node.children.values())
        assert node.snapshot is not None or needed or node.pins, "nobody needs this"
    assert total == tree.nbytes
    assert total + tree.fetched_nbytes <= tree.limit
    assert len(tree) == sum(n.snapshot is not None for n in nodes)
    if not nodes and disk is None:
        assert not tree._roots


def test_the_longest_prefix_wins_and_ends_only_at_a_snapshot():
    tree = PrefixTree(10_000)
    assert found(tree, [1, 2, 3]) == 0
    for length in (4, 9):
        assert put(tree, range(length))
    assert found(tree, range(3)) == 0
    assert found(tree, range(4)) == 4
    assert found(tree, range(8)) == 4
    assert found(tree, range(9)) == 9
    assert found(tree, range(20)) == 9
    assert found(tree, [0, 1, 2, 3, 7]) == 4
    assert found(tree, [0, 1, 9]) == 0


def test_branches_share_their_kv():
    tree = PrefixTree(10_000)
    put(tree, range(100))
    put(tree, [*range(60), *range(200, 240)])
    assert tree.nbytes == 100 + 40 + 2 * STATE
    # The place where they part has KV only: nothing ends there until it is saved.
    assert found(tree, range(60)) == 0
    put(tree, range(60))
    assert tree.nbytes == 140 + 3 * STATE
    assert found(tree, [*range(60), 5]) == 60
    check_integrity(tree)


def test_salts_share_nothing():
    tree = PrefixTree(10_000)
    put(tree, range(10), salt="a")
    assert found(tree, range(10), salt="b") == found(tree, range(10)) == 0
    assert tree.covered("b", tuple(range(10))) == 0
    put(tree, range(10), salt="b")
    assert tree.nbytes == 2 * (10 + STATE)


def test_the_least_recently_used_goes_first():
    tree = PrefixTree(3 * (10 + STATE))
    for start in (0, 100, 200):
        put(tree, range(start, start + 10))
    tree.touch(tree.match("", tuple(range(10))))
    put(tree, range(300, 310))
    assert [found(tree, range(s, s + 10)) for s in (0, 100, 200, 300)] == [10, 0, 10, 10]
    check_integrity(tree)


def test_kv_that_others_need_stays_and_what_nobody_needs_goes():
    tree = PrefixTree(30 + 2 * STATE + 5)
    put(tree, range(10))
    put(tree, range(30))
    put(tree, [*range(10), 77])  # room for its state must come from the first entry's
    assert found(tree, range(10)) == 0
    assert found(tree, range(30)) == 30
    assert found(tree, [*range(10), 77]) == 11
    check_integrity(tree)
    tree.remove(tree.match("", tuple(range(30))))
    assert tree.nbytes == 11 + STATE
    tree.clear()
    assert tree.nbytes == 0
    check_integrity(tree)


def test_what_is_too_big_is_not_kept_and_costs_nobody_his_place():
    tree = PrefixTree(100)
    assert put(tree, range(20))
    assert not put(tree, range(200, 300))
    assert not put(tree, range(90))
    assert found(tree, range(20)) == 20
    check_integrity(tree)


def test_a_conversation_that_outgrows_the_limit_costs_nobody_his_place_and_keeps_its_own():
    tree = PrefixTree(500)
    assert put(tree, range(1000, 1010))
    assert put(tree, range(200))
    before = tree.nbytes
    assert not put(tree, range(500))
    assert tree.nbytes == before
    assert found(tree, range(500)) == 200
    assert found(tree, range(1000, 1010)) == 10
    check_integrity(tree)


def test_nothing_is_forgotten_for_what_pinned_entries_leave_no_room_for():
    tree = PrefixTree(500)
    put(tree, range(200))
    pinned = tree.match("", tuple(range(200)))
    tree.pin(pinned)
    put(tree, range(1000, 1010))
    assert not put(tree, range(2000, 2250))
    assert found(tree, range(1000, 1010)) == 10
    tree.unpin(pinned)
    assert put(tree, range(2000, 2250))
    assert found(tree, range(200)) == 0
    check_integrity(tree)


def test_a_split_that_fails_leaves_the_tree_as_it_was(monkeypatch: pytest.MonkeyPatch):
    def broken(self: FakeKV, at: int) -> None:
        raise RuntimeError("no memory")

    tree = PrefixTree(10_000)
    put(tree, range(100))
    monkeypatch.setattr(FakeKV, "split", broken)
    with pytest.raises(RuntimeError):
        put(tree, [*range(60), 7], start=60)
    monkeypatch.undo()
    assert found(tree, range(100)) == 100
    check_integrity(tree)
    assert put(tree, [*range(60), 7])
    check_integrity(tree)


def test_pinned_entries_stay():
    tree = PrefixTree(2 * (10 + STATE))
    put(tree, range(10))
    node = tree.match("", tuple(range(10)))
    tree.pin(node)
    for start in (100, 200, 300):
        assert put(tree, range(start, start + 10))
    assert found(tree, range(10)) == 10
    other = tree.match("", tuple(range(300, 310)))
    tree.pin(other)
    assert not put(tree, range(400, 410))
    # Even one that is found to be bad keeps its KV until whoever reads it is done.
    tree.remove(node)
    assert found(tree, range(10)) == 0
    assert node.path()[0].kv is not None
    tree.unpin(node)
    tree.unpin(other)
    check_integrity(tree)
    assert put(tree, range(400, 410))


def test_a_pinned_entry_can_be_split():
    tree = PrefixTree(10_000)
    put(tree, range(100))
    node = tree.match("", tuple(range(100)))
    tree.pin(node)
    put(tree, [*range(40), 200])
    assert tuple(t for n in node.path() for t in n.kv.tokens) == tuple(range(100))
    tree.unpin(node)
    check_integrity(tree)


def test_an_entry_whose_beginning_has_gone_is_not_kept():
    tree = PrefixTree(10_000)
    assert not put(tree, range(20), start=5)
    assert put(tree, range(10))
    assert not put(tree, range(20), start=15)
    # More of it may have come since the copy was made.
    assert put(tree, range(20), start=3)
    assert tree.nbytes == 20 + 2 * STATE
    assert put(tree, range(20), start=3)
    assert tree.nbytes == 20 + 2 * STATE
    check_integrity(tree)


def test_a_growing_chain_keeps_few_snapshots():
    tree = PrefixTree(10**9)
    for end in range(10, 5000, 10):
        put(tree, range(end))
    ends = sorted(n.end for n in tree.nodes() if n.snapshot is not None)
    assert ends[0] == 10, "the system prompt's stays"
    assert ends[-NUM_RECENT - 1 :] == [4990 - 10 * i for i in range(NUM_RECENT, -1, -1)]
    assert len(ends) <= NUM_RECENT + 2 * 10
    # Wherever it is edited, at most half of what would have to be computed is lost.
    for place in range(20, 4990):
        best = max(e for e in ends if e <= place)
        assert place - best <= (4990 - best) / 2 + 10
    check_integrity(tree)


def test_where_branches_part_a_snapshot_is_not_thinned():
    tree = PrefixTree(10**9)
    put(tree, range(10))
    put(tree, range(50))
    put(tree, [*range(50), 999])
    for end in range(60, 2000, 10):
        put(tree, range(end))
    assert found(tree, range(55)) == 50


def test_a_system_prompts_snapshot_is_not_thinned():
    tree = PrefixTree(10**9)
    for end in range(10, 2000, 10):
        kv = FakeKV(tuple(range(end - 10, end)))
        system = tuple(range(end))
        tree.insert("", system, end - 10, kv, FakeState(system), lasting=end == 50)
    assert found(tree, range(55)) == 50


def test_spare_leaves_doubling_distances():
    assert spare([], 10) == []
    assert spare([1, 2, 3, 4], 5) == []
    ends = list(range(100))
    kept = [e for e in ends if e not in spare(ends, 100)]
    assert kept == [0, 4, 52, 76, 88, 94, 97, 98, 99]
    assert spare(kept, 100) == []


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)), st.integers(0, 5))
def test_common_length(one, other, at):
    at = min(at, len(other))
    expected = next(
        (i for i, (a, b) in enumerate(zip(one, other[at:])) if a != b),
        min(len(one), len(other) - at),
    )
    assert common_length(tuple(one), tuple(other), at) == expected


def test_comparing_long_prompts_looks_at_each_token_a_few_times():
    looked_at = 0

    class Counted(tuple):
        def __getitem__(self, where):
            nonlocal looked_at
            found = tuple(self)[where]
            looked_at += len(found) if isinstance(where, slice) else 1
            return found

    length = 100_000
    tokens = Counted(range(length))
    for part in (0, 1, length // 2, length - 1):
        other = (*range(part), -1, *range(part + 1, length))
        assert common_length(tokens, other) == part
        assert looked_at < 4 * length
        looked_at = 0


def path_of(node: Node) -> tuple[int, ...]:
    return tuple(t for n in node.path() for t in n.tokens)


class FakeDisk:
    """Holds what it is given, and forgets or breaks what a test says."""

    def __init__(self) -> None:
        self.kv: dict[tuple[str, tuple[int, ...]], FakeKV] = {}
        self.snapshots: dict[tuple[str, tuple[int, ...]], FakeState] = {}
        self.broken = False
        self.state = Fetch.HERE
        # Size and content of what was asked for, as it was then.
        self.fetched: dict[tuple, tuple] = {}

    @staticmethod
    def key(node: Node) -> tuple[str, tuple[int, ...]]:
        root = node
        while root.parent is not None:
            root = root.parent
        return root.key, path_of(node)

    def holds(self, node: Node) -> bool:
        return self.key(node) in self.kv

    def holds_snapshot(self, node: Node) -> bool:
        return self.key(node) in self.snapshots

    @property
    def fetched_nbytes(self) -> int:
        return sum(size for size, _ in self.fetched.values())

    def files(self, nodes: Sequence[Node], entry: Node) -> dict[tuple, tuple]:
        """What a fetch would read: sizes and content by key."""
        found: dict[tuple, tuple] = {}
        for key in map(self.key, nodes):
            kv = self.kv.get(key)
            found[key] = (0 if kv is None else kv.nbytes, None if self.broken else kv)
        snapshot = None if self.broken else self.snapshots.get(self.key(entry))
        return found | {("snapshot", *self.key(entry)): (STATE, snapshot)}

    def cost(self, nodes: Sequence[Node], entry: Node) -> int:
        files = self.files(nodes, entry)
        return sum(size for key, (size, _) in files.items() if key not in self.fetched)

    def fetch(self, nodes: Sequence[Node], entry: Node) -> Fetch:
        if self.state is not Fetch.NEVER:
            self.fetched = self.files(nodes, entry) | self.fetched
        return self.state

    def forget(self) -> None:
        self.fetched.clear()

    def read(self, node: Node) -> FakeKV | None:
        _, kv = self.fetched.pop(self.key(node), (0, None))
        # The file may begin before the node does.
        kv = kv and FakeKV(kv.tokens[-len(node.tokens) :])
        return kv if kv and kv.tokens == node.tokens else None

    def read_snapshot(self, node: Node) -> FakeState | None:
        return self.fetched.pop(("snapshot", *self.key(node)), (0, None))[1]

    def keep(self, node: Node) -> None:
        for each in node.path():
            self.kv.setdefault(self.key(each), each.kv)
        self.snapshots[self.key(node)] = node.snapshot

    def split(self, upper: Node, lower: Node) -> None:
        if self.holds(lower):
            self.kv |= {self.key(upper): upper.kv, self.key(lower): lower.kv}

    def touch(self, node: Node) -> None:
        pass

    def drop(self, node: Node) -> None:
        self.kv.pop(self.key(node), None)
        self.snapshots.pop(self.key(node), None)

    def drop_snapshot(self, node: Node) -> None:
        self.snapshots.pop(self.key(node), None)


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class Life(RuleBasedStateMachine):
    """Entries come, are used and go; the tree agrees with a list of prefixes at all times."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(260)
        self.pinned: list[Node] = []
        self.seen: set[tuple[str, tuple[int, ...]]] = set()

    @rule(tokens=tokens, salt=st.sampled_from("ab"), back=st.integers(0, 3))
    def insert(self, tokens: list[int], salt: str, back: int) -> None:
        tokens = tuple(tokens)
        start = max(self.tree.covered(salt, tokens) - back, 0)
        if put(self.tree, tokens, salt, start):
            self.seen.add((salt, tokens))
            assert found(self.tree, tokens, salt) == len(tokens)

    @rule(tokens=tokens, salt=st.sampled_from("ab"), pin=st.booleans())
    def look_up(self, tokens: list[int], salt: str, pin: bool) -> None:
        tokens = tuple(tokens)
        node = self.tree.match(salt, tokens)
        entries = {
            tuple(t for n in e.path() for t in n.tokens)
            for e in self.tree.nodes()
            if e.snapshot is not None and self.root_of(e) is self.tree._roots.get(salt)
        }
        best = max((e for e in entries if tokens[: len(e)] == e), key=len, default=())
        assert (() if node is None else node.snapshot.tokens) == best
        assert not best or (salt, best) in self.seen
        if node is not None:
            self.tree.touch(node)
            if pin and len(self.pinned) < 2:
                self.tree.pin(node)
                self.pinned.append(node)

    @staticmethod
    def root_of(node: Node) -> Node:
        while node.parent is not None:
            node = node.parent
        return node

    @precondition(lambda self: self.pinned)
    @rule(bad=st.booleans())
    def use(self, bad: bool) -> None:
        node = self.pinned.pop()
        assert all(n.kv is not None for n in node.path())
        if bad and node not in self.pinned:
            self.tree.remove(node)
        self.tree.unpin(node)

    @invariant()
    def whole(self) -> None:
        check_integrity(self.tree)
        for node in self.pinned:
            assert node in list(self.tree.nodes())


class LifeWithDisk(Life):
    """The same, with a disk that loses files of its own accord, and a tree that is cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = FakeDisk()
        self.tree = PrefixTree(260, self.disk)

    @rule(tokens=tokens, salt=st.sampled_from("ab"), pin=st.booleans())
    def look_up(self, tokens: list[int], salt: str, pin: bool) -> None:
        tokens = tuple(tokens)
        node = self.tree.match(salt, tokens)
        best = max(
            (path_of(n) for n in self.usable(salt) if tokens[: n.end] == path_of(n)),
            key=len,
            default=(),
        )
        assert (() if node is None else path_of(node)) == best
        if node is None or (node.snapshot is None and not self.bring(node)):
            again = self.tree.match(salt, tokens, in_memory=True)
            assert again is None or again.snapshot.tokens == path_of(again)
            return
        assert node.snapshot.tokens == best
        assert tuple(t for n in node.path() for t in n.kv.tokens) == best
        self.tree.touch(node)
        if pin and len(self.pinned) < 2:
            self.tree.pin(node)
            self.pinned.append(node)

    def bring(self, node: Node) -> bool:
        """Fetch an entry, or what has not been fetched of it, and load it."""
        if self.tree.fetch(node) is not Fetch.HERE:
            return False
        assert self.tree.load(node) == (node.snapshot is not None)
        self.tree.forget_fetched()
        return node.snapshot is not None

    @rule(tokens=tokens, salt=st.sampled_from("ab"))
    def ask(self, tokens: list[int], salt: str) -> None:
        """Something is fetched; what comes between this and its use is up to the other rules."""
        node = self.tree.match(salt, tuple(tokens))
        if node is not None and node.snapshot is None:
            self.tree.forget_fetched()
            self.tree.fetch(node)

    def usable(self, salt: str) -> list[Node]:
        return [
            n
            for n in self.tree.nodes()
            if self.root_of(n) is self.tree._roots.get(salt)
            and (n.snapshot is not None or self.disk.holds_snapshot(n))
        ]

    @rule(number=st.integers(0, 99), snapshot=st.booleans())
    def lose(self, number: int, snapshot: bool) -> None:
        """A file goes, with those that build on it; or a snapshot alone."""
        if self.disk.kv:
            salt, gone = sorted(self.disk.kv)[number % len(self.disk.kv)]
            if not snapshot:
                for files in (self.disk.kv, self.disk.snapshots):
                    for key in [k for k in files if k[0] == salt and k[1][: len(gone)] == gone]:
                        del files[key]
            self.disk.snapshots.pop((salt, gone), None)

    @rule(tokens=tokens, salt=st.sampled_from("ab"))
    def cannot_read(self, tokens: list[int], salt: str) -> None:
        """What hangs on an entry that can't be read is not found again."""
        node = self.tree.match(salt, tuple(tokens))
        if node is not None and node.snapshot is None:
            self.disk.broken = True
            self.tree.forget_fetched()
            if self.tree.fetch(node) is Fetch.HERE:
                assert not self.tree.load(node)
                assert self.tree.match(salt, tuple(tokens)) is not node
            self.tree.forget_fetched()
            self.disk.broken = False

    @rule()
    def clear(self) -> None:
        """Memory goes; what the disk has is found as before."""
        kept = {(s, p) for s, p in self.disk.snapshots if self.tree.match(s, p)}
        self.tree.clear()
        assert all(path_of(self.tree.match(s, p)) == p for s, p in kept)
        assert self.pinned or self.tree.nbytes == 0

    @rule()
    def sweep(self) -> None:
        self.tree.sweep()
        assert all(n.kv is not None or self.disk.holds(n) for n in self.tree.nodes())
        assert all(root.children for root in self.tree._roots.values())

    @invariant()
    def whole(self) -> None:
        check_integrity(self.tree, self.disk)


LifeWithDisk.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLifeWithDisk = pytest.mark.timeout(300)(LifeWithDisk.TestCase)
Life.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLife = pytest.mark.timeout(300)(Life.TestCase)
