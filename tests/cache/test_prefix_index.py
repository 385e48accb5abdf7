"""Which node of a prefix store goes first, without files."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.prefix_index import Entry, PrefixIndex

KEYS = st.integers(0, 11)


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "remove", "touch", "oldest"]), KEYS, KEYS, KEYS),
        max_size=80,
    )
)
def test_the_oldest_leaf_is_what_a_look_at_all_of_them_says(steps):
    index = PrefixIndex()
    parents: dict[str, str] = {}
    used: dict[str, int] = {}
    for now, (what, one, other, third) in enumerate(steps):
        key = f"{one:02}"
        if what == "add":
            # A parent's number is lower, so that nothing is its own ancestor.
            parents[key] = f"{other:02}" if other < one else "root"
            used[key] = now
            index.add(Entry(key, parents[key], "root", 10, now))
        elif what == "remove":
            assert (index.remove(key) is None) == (parents.pop(key, None) is None)
            used.pop(key, None)
        elif what == "touch":
            for each in index.touch(key, now):
                used[each] = now
        spared = frozenset({f"{other:02}", f"{third:02}"}) if what == "oldest" else frozenset()
        leaves = [k for k in parents if k not in parents.values() and k not in spared]
        found = index.oldest_leaf(spared)
        assert (found is None) == (not leaves)
        assert found is None or (found.key in leaves and found.used == used[found.key])
        assert found is None or found.used == min(used[k] for k in leaves)
        assert index.nbytes == 10 * len(parents)


def test_what_was_used_often_is_noted_but_once():
    index = PrefixIndex()
    for number in range(10):
        index.add(Entry(f"{number}", "root", "root", 1, number))
    for now in range(10_000):
        index.touch(f"{now % 9}", 100 + now)
    assert len(index._oldest) < 200
    oldest = index.oldest_leaf()
    assert oldest is not None
    assert oldest.key == "9"
