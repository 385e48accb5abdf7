"""The prefix cache's policy, without arrays: what is found, shared, pinned and evicted."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlx_mtp.prefix import radix_tree
from mlx_mtp.prefix.radix_tree import NUM_RECENT, Fetch, Node, PrefixTree
from tests.support.prefixes import STATE, FakeDisk, check_tree, nodes, put
from tests.support.quick import full


def found(tree: PrefixTree, tokens, salt: str = "") -> int:
    node = tree.longest_prefix(salt, tuple(tokens))
    return 0 if node is None else node.end


def test_the_least_recently_used_goes_first():
    tree = PrefixTree(3 * (10 + STATE))
    for start in (0, 100, 200):
        put(tree, range(start, start + 10))
    tree.touch(tree.longest_prefix("", tuple(range(10))))
    put(tree, range(300, 310))
    assert [found(tree, range(s, s + 10)) for s in (0, 100)] == [10, 0]
    put(tree, range(200, 210))  # It is in the tree, so this is a use.
    put(tree, range(400, 410))
    assert [found(tree, range(s, s + 10)) for s in range(0, 500, 100)] == [0, 0, 10, 10, 10]


def test_what_has_no_room_is_not_kept_and_costs_no_other_its_place():
    tree = PrefixTree(500)
    assert put(tree, range(1000, 1010))
    assert put(tree, range(200))
    assert not put(tree, range(500)), "a conversation that outgrows the limit"
    assert not put(tree, range(2000, 2600))
    tree.pin(tree.longest_prefix("", tuple(range(200))))
    assert not put(tree, range(2000, 2250)), "the pinned entry leaves no room"
    assert [found(tree, range(500)), found(tree, range(1000, 1010))] == [200, 10]


def test_a_growing_chain_keeps_few_snapshots_in_memory_and_on_the_disk():
    disk = FakeDisk()
    tree = PrefixTree(10**9, disk)
    put(tree, [*range(30), 999])
    for end in range(10, 5000, 10):
        put(tree, range(end), lasting=end == 50)
    ends = sorted(n.end for n in nodes(tree) if n.snapshot is not None and n.end != 31)
    assert {len(tokens) for _, tokens in disk.entries} == {*ends, 31}
    assert ends[:3] == [10, 30, 50], "the first, where a branch leaves, and the system prompt's"
    assert ends[-NUM_RECENT - 1 :] == [4990 - 10 * i for i in range(NUM_RECENT, -1, -1)]
    assert len(ends) <= NUM_RECENT + 2 * 10
    # Wherever the text is edited, at most half of the tokens to compute were computed before.
    for place in range(50, 4990):
        best = max(e for e in ends if e <= place)
        assert place - best <= (4990 - best) / 2 + 10


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
salts = st.sampled_from("ab")


class Life(RuleBasedStateMachine):
    """Entries are added, used and removed, in memory and on a disk that also loses some itself.

    At all times a lookup finds the longest entry that was inserted and is still in the tree.
    """

    def __init__(self):
        super().__init__()
        self.disk = FakeDisk()
        self.tree = PrefixTree(260, self.disk)
        self.pinned: list[Node] = []
        self.seen: set[tuple[str, tuple[int, ...]]] = set()

    @rule(tokens=tokens, salt=salts, back=st.integers(-1, 3))
    def insert(self, tokens, salt, back):
        """Since the KV was copied, the tree can have got more of the prefix, or lost some."""
        covered = self.tree.covered(salt, tokens)
        start = min(max(covered - back, 0), len(tokens))
        if start > covered:
            assert not put(self.tree, tokens, salt, start)
        elif put(self.tree, tokens, salt, start):
            self.seen.add((salt, tokens))
            assert found(self.tree, tokens, salt) == len(tokens)
            assert self.disk.longest(salt, tokens) == len(tokens)

    @rule(tokens=tokens, salt=salts, pin=st.booleans())
    def look_up(self, tokens, salt, pin):
        node = self.tree.longest_prefix(salt, tokens)
        entries = {n.prefix() for n in nodes(self.tree) if n.snapshot and n.salt == salt}
        best = max((e for e in entries if tokens[: len(e)] == e), key=len, default=())
        assert (() if node is None else node.snapshot.tokens) == best
        assert not best or (salt, best) in self.seen
        if node is not None:
            self.tree.touch(node)
            if pin and len(self.pinned) < 2:
                self.tree.pin(node)
                self.pinned.append(node)

    @precondition(lambda self: self.pinned)
    @rule(bad=st.booleans())
    def use(self, bad):
        """Unpin a node; even if it is found to be bad, it keeps its KV until then."""
        node = self.pinned.pop()
        if bad and node not in self.pinned:
            prefix = node.prefix()
            self.tree.remove(node)
            assert (node.salt, prefix) not in self.disk.entries
            assert tuple(t for n in node.path() for t in n.kv.tokens) == prefix
        self.tree.unpin(node)

    @rule(tokens=tokens, salt=salts, broken=st.booleans(), coming=st.booleans())
    def fetch(self, tokens, salt, broken, coming):
        """Fetch an entry from the disk; between two calls, other rules can run."""
        length = self.disk.longest(salt, tokens)
        if length <= found(self.tree, tokens, salt):
            return
        self.disk.broken, self.disk.state = broken, Fetch.COMING if coming else Fetch.HERE
        state = self.tree.fetch(salt, tokens[:length])
        here = found(self.tree, tokens, salt) == length
        assert here == (state is Fetch.HERE)
        assert state is not Fetch.COMING or coming
        assert (self.disk.longest(salt, tokens) < length) == (state is Fetch.GONE)

    @rule(number=st.integers(0, 99))
    def lose(self, number):
        if self.disk.entries:
            self.disk.entries.discard(sorted(self.disk.entries)[number % len(self.disk.entries)])

    @rule()
    def clear(self):
        kept = set(self.disk.entries)
        self.tree.clear()
        assert self.disk.entries == kept
        assert self.tree.fetched_nbytes == 0
        assert self.pinned or self.tree.nbytes == 0

    @invariant()
    def whole(self):
        check_tree(self.tree)
        assert all(node in nodes(self.tree) for node in self.pinned)


@pytest.mark.parametrize("examples", [60, full(1000)])
def test_a_life(examples, monkeypatch):
    monkeypatch.setattr(radix_tree, "_STRIDE", 4)
    how = settings(max_examples=examples, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Life, settings=how)
