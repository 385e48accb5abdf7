"""The prefix cache's store on a real directory: what is kept comes back whole, or not at all."""

from __future__ import annotations

import itertools
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from safetensors import safe_open

from mlx_mtp.cache import prefix_files
from mlx_mtp.cache.prefix_files import PrefixDirectory, StoredFile, pack
from mlx_mtp.cache.prefix_keys import fingerprint, prefix_keys, root_key
from mlx_mtp.cache.prefix_state import Segment, Snapshot, join
from mlx_mtp.cache.prefix_store import PrefixStore
from mlx_mtp.cache.prefix_tree import Fetch
from mlx_mtp.errors import UsageError
from tests.cache.prefixes import (
    FINGERPRINT,
    PATIENCE,
    ROOT,
    fetch,
    is_whole,
    keep,
    same,
    segment,
    snapshot,
)

Open = Callable[..., PrefixStore]
DTYPES = (
    mx.bool_,
    mx.uint8,
    mx.uint32,
    mx.int64,
    mx.float16,
    mx.bfloat16,
    mx.float32,
    mx.complex64,
)


def files(folder: Path, pattern: str = "*.safetensors") -> list[Path]:
    return sorted(folder.glob(pattern))


def names(store: PrefixStore) -> set[str]:
    """Of the files that the store has in its index."""
    return {store._directory._name(file) for file in store._files.values()}


def check_integrity(store: PrefixStore) -> None:
    """What is on the disk is what the index says, within its limit, each with all its ancestors."""
    assert store.flush(PATIENCE)
    here = files(store.path)
    assert {path.name for path in here} == names(store)
    assert sum(path.stat().st_size for path in here) == store.stats().nbytes <= store.max_bytes
    assert store.stats().num_nodes == len(here)
    assert files(store.path, "*.tmp") == []
    for file in store._files.values():
        assert file.start == 0 or store._files[file.parent].end == file.start


def test_every_dtype_comes_back_bit_by_bit(open_store: Open, folder: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for dtype in DTYPES:
        raw = mx.array(rng.integers(0, 256, size=(3, 4, 16), dtype=np.uint8))
        # All bit patterns, NaNs included; a bool has two.
        value = raw > 127 if dtype == mx.bool_ else raw.view(dtype)
        arrays |= {f"{dtype}": value, f"{dtype} strided": value.transpose(2, 0, 1)[::2]}
        arrays |= {f"{dtype} scalar": value[0, 0, 0], f"{dtype} empty": value[:, :0]}
    store = open_store()
    store.keep(ROOT, (1, 2), [Segment(0, 2, arrays, 4)], Snapshot({"hidden": arrays[f"{dtype}"]}))
    assert store.flush(PATIENCE)
    for path in files(folder):
        with safe_open(path, "numpy") as opened:  # It is safetensors for others too.
            assert set(opened.keys()) in (set(arrays), {"hidden"})
    kv, _ = fetch(open_store(), 1, 2)
    assert kv.bits == 4
    assert kv.arrays.keys() == arrays.keys()
    assert all(same(kv.arrays[name], arrays[name]) for name in arrays)


def test_pieces_are_joined_and_cut_at_any_token() -> None:
    """The head's rows lie one before the trunk's, so that its first segment has one less."""
    tokens = range(10, 20)
    cuts = [c for n in range(3) for c in itertools.combinations(range(1, 10), n)]
    for inner in cuts[:: len(cuts) // 20]:
        bounds = [0, *inner, 10]
        for start in range(bounds[1]):
            parts = [segment(tokens[:b], a) for a, b in itertools.pairwise(bounds)]
            assert is_whole((join(parts, start), snapshot(tokens)), *tokens, start=start)
    whole = segment(tokens)
    assert is_whole((whole.cut(3, 10), snapshot(tokens)), *tokens, start=3)
    assert is_whole((whole.cut(0, 1), snapshot(tokens[:1])), *tokens[:1])


def test_after_a_restart_prefixes_are_found_and_share_their_beginning(open_store: Open) -> None:
    store = open_store()
    paths = [(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 2, 9), (8,)]
    for path in paths:
        keep(store, *path)
    keep(store, 1, 2, salt=root_key("mine"))
    check_integrity(store)
    rows = sorted((file.start, file.end) for file in store._files.values() if file.start < file.end)
    assert rows == [(0, 1), (0, 2), (0, 3), (0, 3), (3, 4), (3, 5)]
    again = open_store()
    check_integrity(again)
    for path in paths:
        assert again.longest(ROOT, (*path, 0)) == len(path)
        for start in range(len(path) + 1):
            assert is_whole(fetch(again, *path, start=start), *path, start=start)
    # There is KV of these, but nothing ends there.
    for path in ((1,), (1, 2), (1, 2, 3, 5)):
        assert again.longest(ROOT, path) == (3 if len(path) > 2 else 0)
    assert again.longest(root_key("mine"), (1, 2, 3)) == 2
    assert again.longest(root_key("other"), (1, 2, 3)) == 0
    assert fetch(again, 1, 2) is Fetch.GONE
    # What is here is not written again, and what goes on from it begins where it ends.
    keep(again, 1, 2, 3)
    keep(again, 1, 2, 3, 4, 5)
    check_integrity(again)
    assert again.stats().num_written == 2
    again.drop_snapshot(ROOT, (1, 2, 3))
    check_integrity(again)
    assert again.longest(ROOT, (1, 2, 3)) == 0
    assert is_whole(fetch(again, 1, 2, 3, 4), 1, 2, 3, 4)


def test_what_is_fetched_counts_until_it_is_taken_or_forgotten(open_store: Open) -> None:
    store = open_store()
    keep(store, 1, 2, 3)
    keep(store, 4, 5)
    assert store.flush(PATIENCE)
    asked: list[int] = []

    def room(nbytes: int) -> bool:
        asked.append(nbytes)
        return len(asked) > 1

    assert store.fetch(ROOT, (1, 2, 3), 0, room) is Fetch.NEVER
    assert store.reader.nbytes == 0
    assert store.fetch(ROOT, (1, 2, 3), 0, room) is Fetch.COMING
    assert store.reader.nbytes == asked[1] == asked[0]
    # Something else is wanted now: the first read does not count any more.
    assert store.fetch(ROOT, (4, 5), 0, room) is Fetch.COMING
    assert store.reader.nbytes == asked[2]
    assert is_whole(fetch(store, 4, 5), 4, 5)
    store.fetch(ROOT, (1, 2, 3), 0, room)
    store.forget()
    assert store.reader.nbytes == 0
    assert is_whole(fetch(store, 1, 2, 3), 1, 2, 3)


def test_the_least_recently_used_goes_first_and_a_restart_remembers(open_store: Open) -> None:
    store = open_store()
    keep(store, 1)
    assert store.flush(PATIENCE)
    size = store.stats().nbytes + 300  # of an entry, with longer numbers in its headers
    store = open_store(max_bytes=4 * size)
    for first in (1, 2, 3, 4):
        keep(store, first)
    check_integrity(store)
    for other in range(5, 20):
        store.touch(ROOT, (2,))
        keep(store, other)
        check_integrity(store)
    assert [n for n in range(20) if store.longest(ROOT, (n,))] == [2, 17, 18, 19]
    store.touch(ROOT, (17,))
    assert store.flush(PATIENCE)
    # The system's own times would be those of its last tick.
    used = sorted(file.used for file in store._files.values())
    assert sorted(path.stat().st_mtime_ns for path in files(store.path)) == used
    again = open_store(max_bytes=4 * size)
    keep(again, 20)
    check_integrity(again)
    assert [n for n in range(21) if again.longest(ROOT, (n,))] == [2, 17, 19, 20]
    smaller = open_store(max_bytes=2 * size)
    check_integrity(smaller)
    assert [n for n in range(21) if smaller.longest(ROOT, (n,))] == [17, 20]


def test_nothing_is_evicted_for_what_cannot_fit(open_store: Open) -> None:
    """A conversation that outgrows the directory keeps its beginning, and costs nobody's place."""
    store = open_store(max_bytes=40_000)
    for first in (1, 2):
        keep(store, first)
    keep(store, 9, 9, width=2000)
    check_integrity(store)
    keep(store, 9, 9, 9, 9, 9, width=2000)
    check_integrity(store)
    assert [store.longest(ROOT, (n, n)) for n in (1, 2, 9)] == [1, 1, 2]
    assert store.longest(ROOT, (9, 9, 9, 9, 9)) == 2
    assert store.stats().num_dropped == 1


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


class Life(RuleBasedStateMachine):
    """Prefixes are kept, used, dropped, damaged and evicted, and the store is closed and opened."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.kept: set[tuple[str, tuple[int, ...]]] = set()
        self.store = self.open()

    def open(self) -> PrefixStore:
        return PrefixStore(Path(self.place.name) / "prefixes", FINGERPRINT, 30_000)

    def teardown(self) -> None:
        self.store.close()
        self.place.cleanup()

    @rule(tokens=tokens, salt=st.sampled_from([ROOT, root_key("a")]))
    def keep(self, tokens: tuple[int, ...], salt: str) -> None:
        keep(self.store, *tokens, salt=salt)
        self.kept.add((salt, tokens))
        assert self.store.longest(salt, tokens) == len(tokens)

    @rule(tokens=tokens, salt=st.sampled_from([ROOT, root_key("a")]), start=st.integers(0, 7))
    def look_up(self, tokens: tuple[int, ...], salt: str, start: int) -> None:
        found = tokens[: self.store.longest(salt, tokens)]
        if found:
            assert (salt, found) in self.kept
            start = min(start, len(found))
            got = fetch(self.store, *found, start=start, salt=salt)
            if got is Fetch.GONE:  # damaged
                self.store.drop_snapshot(salt, found)
            else:
                assert is_whole(got, *found, start=start)
                self.store.touch(salt, found)

    @rule(tokens=tokens)
    def drop(self, tokens: tuple[int, ...]) -> None:
        self.store.drop_snapshot(ROOT, tokens)
        self.kept.discard((ROOT, tokens))

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.open()

    @precondition(lambda self: self.store.stats().num_nodes)
    @rule(number=st.integers(0, 99), at=st.integers(0, 500), how=st.sampled_from("fcm"))
    def damage(self, number: int, at: int, how: str) -> None:
        """Flip a bit, cut short, or move to another's place."""
        here = files(self.store.path)
        path, other = here[number % len(here)], here[at % len(here)]
        content = bytearray(path.read_bytes())
        content[at % len(content)] ^= 16
        path.write_bytes({"f": content, "c": content[:at], "m": other.read_bytes()}[how])
        if how != "f":
            # Its size would be noticed; a restart takes that for the right one.
            self.restart()

    @invariant()
    def whole(self) -> None:
        check_integrity(self.store)


Life.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLife = pytest.mark.timeout(300)(Life.TestCase)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> PrefixDirectory:
    return PrefixDirectory(tmp_path_factory.mktemp("directory") / "own", FINGERPRINT)


EXAMPLE = StoredFile("a" * 40, "b" * 40, 0, 2)
CONTENT = pack({"layers.0.keys": mx.arange(6).reshape(3, 2)}, None)


def read(directory: PrefixDirectory, content: bytes) -> bytes:
    (directory.path / directory._name(EXAMPLE)).write_bytes(content)
    EXAMPLE.nbytes = len(content)
    return directory.read(EXAMPLE)


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0), flip=st.integers(1, 255), cut=st.integers(0), more=st.binary(max_size=9))
def test_a_changed_byte_anywhere_is_noticed_and_so_is_a_cut(
    directory: PrefixDirectory, at: int, flip: int, cut: int, more: bytes
) -> None:
    """Whatever size is expected: that is the one of the start, when nothing is read."""
    assert directory.write(EXAMPLE, CONTENT, lambda: True)
    good = (directory.path / directory._name(EXAMPLE)).read_bytes()
    assert read(directory, good) == good
    changed = bytearray(good)
    changed[at % len(good)] ^= flip
    assume(good[: cut % len(good)] + more != good)
    for bad in (changed, good[: cut % len(good)] + more, good + b"0" + more, more, b""):
        with pytest.raises(ValueError):
            read(directory, bytes(bad))


@pytest.mark.parametrize("how", ["header", "data", "cut", "gone", "longer", "renamed", "link"])
@pytest.mark.parametrize("when", ["before the start", "while it runs"])
def test_a_damaged_file_goes_with_all_that_builds_on_it(
    open_store: Open, folder: Path, how: str, when: str
) -> None:
    store = open_store()
    for path in ((1,), (1, 2), (1, 2, 3), (9,)):
        keep(store, *path)
    assert store.flush(PATIENCE)
    key = dict(prefix_keys(ROOT, (1, 2), [1, 2]))[2]
    other, path = folder.parent / "other", next(folder.glob(f"*-{key}-*-1-2.safetensors"))
    if when == "before the start":
        store.close()
    content = bytearray(path.read_bytes())
    content[{"header": 50}.get(how, -7)] ^= 4
    if how in ("gone", "renamed", "link"):
        path.rename(other)
    else:
        path.write_bytes({"cut": content[:-9], "longer": content + b"0"}.get(how, content))
    if how == "renamed":
        path.write_bytes(next(folder.glob("*-0-1.safetensors")).read_bytes())
    elif how == "link":
        path.symlink_to(other)
    if when == "before the start":
        store = open_store()
    while length := store.longest(ROOT, (1, 2, 3)):
        if is_whole(fetch(store, *(1, 2, 3)[:length]), *(1, 2, 3)[:length]):
            break
        store.drop_snapshot(ROOT, (1, 2, 3)[:length])
    assert length == 1
    assert is_whole(fetch(store, 9), 9)
    check_integrity(store)
    assert other.exists() == (how in ("gone", "renamed", "link")), "a link was followed"
    # Its place is free again.
    keep(store, 1, 2, 3)
    check_integrity(store)
    assert is_whole(fetch(store, 1, 2, 3), 1, 2, 3)


def test_other_files_are_left_alone_and_unfit_ones_of_ours_removed(
    open_store: Open, folder: Path
) -> None:
    folder.mkdir(mode=0o700)
    name, key = "mlx-mtp-prefix-", "a" * 40
    ours = {
        f"{name}{'1' * 64}.safetensors": "of the first version",
        f"{name}{'1' * 64}.0123abcd.tmp": "of the first version, not finished",
        f"{name}eeeeeeee-{key}-{key}-0-2.safetensors": "of another model",
        f"{name}ffffffff-{key}s.0123abcd.tmp": "not finished",
        f"{name}ffffffff-{key}-{'b' * 40}-1-2.safetensors": "without an ancestor",
    }
    others = {"model.safetensors": "x", "mlx-mtp-prefix-1.safetensors": "y", "a.tmp": "z"}
    for each, content in (ours | others).items():
        (folder / each).write_text(content)
    victim = folder.parent / "victim"
    victim.write_text("v")
    (folder / f"{name}ffffffff-{key}-{key}-0-3.safetensors").symlink_to(victim)
    blocked = folder / f"{name}ffffffff-{key}-{key}-0-4.safetensors"
    blocked.mkdir()
    store = open_store()
    assert store.flush(PATIENCE)
    assert {path.name for path in folder.iterdir()} == {
        *others,
        blocked.name,
        "mlx-mtp-prefix.lock",
    }
    assert victim.read_text() == "v"


def test_files_of_another_fingerprint_are_removed(open_store: Open, folder: Path) -> None:
    """Also if their marks in the names are equal by chance."""
    keep(open_store(), 1, 2)
    near = FINGERPRINT[:-1] + "e"
    store = open_store(mark=near)
    assert store.longest(ROOT, (1, 2)) == 2
    assert fetch(store, 1, 2) is Fetch.GONE
    check_integrity(store)
    assert files(folder) == []
    keep(store, 1, 2)
    other = open_store(mark="e" * 64)
    assert other.longest(ROOT, (1, 2)) == 0
    assert files(folder) == []


def test_for_the_owner_alone(open_store: Open, folder: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store(path=folder / "deeper")
        keep(store, 1, 2, salt=root_key("a secret"))
        assert store.flush(PATIENCE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "deeper").stat().st_mode) == 0o700
    inside = list((folder / "deeper").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in inside} == {0o600}
    assert all(b"a secret" not in path.read_bytes() for path in inside)


def test_a_directory_that_is_not_safe_is_refused(open_store: Open, folder: Path) -> None:
    folder.mkdir()
    for mode in (0o777, 0o770, 0o702, 0o1777):
        folder.chmod(mode)
        with pytest.raises(UsageError, match=r"can be written by others \(mode .*chmod 700"):
            open_store()
    folder.chmod(0o755)
    (folder / "other").touch()
    open_store().close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755, "another program's files are there"
    (folder / "other").unlink()
    open_store().close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    link = folder.parent / "link"
    link.symlink_to(folder)
    with pytest.raises(UsageError, match="is a symbolic link"):
        open_store(path=link)
    (folder / "file").write_text("x")
    with pytest.raises(UsageError, match="Not a directory"):
        open_store(path=folder / "file")
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
        with pytest.raises(UsageError, match="belongs to user 12345"):
            open_store()


def test_one_server_at_a_time(
    open_store: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock is the descriptor's, so that a second store is like another process."""
    monkeypatch.setattr(prefix_files, "_LOCK_SECONDS", 0.2)
    store = open_store()
    began = time.monotonic()
    with pytest.raises(UsageError, match="is in use by another server"):
        PrefixStore(folder, FINGERPRINT, 1 << 30)
    assert time.monotonic() - began >= 0.2
    store.close()
    open_store()


def test_keys_and_the_fingerprint_follow_all_they_are_made_of(tmp_path: Path) -> None:
    roots = [root_key(salt) for salt in (None, "", "a", "b")]
    keys = [key for root in roots for _, key in prefix_keys(root, (1, 2, 3, 258), [1, 2, 4])]
    keys += [key for _, key in prefix_keys(ROOT, (2, 1, 3), [1, 2, 3])]
    assert len(set(keys)) == len(keys)
    assert keys[:3] == [next(prefix_keys(ROOT, (1, 2, 3, 258), [n]))[1] for n in (1, 2, 4)]

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    os.utime(weights, ns=(10**18, 10**18))
    facts = {"dtype": "bfloat16", "version": "0.1.0", "kv_bits": None}
    marks = [fingerprint({"a": 1}, [weights], **facts)]
    assert fingerprint({"a": 1}, [weights], **facts) == marks[0]
    marks.append(fingerprint({"a": 2}, [weights], **facts))
    marks += [fingerprint({"a": 1}, [weights], **facts | {name: 8}) for name in facts]
    with weights.open("r+b") as file:  # The last byte, and the time as it was.
        file.seek(-1, os.SEEK_END)
        file.write(b"1")
    os.utime(weights, ns=(10**18, 10**18))
    marks.append(fingerprint({"a": 1}, [weights], **facts))
    os.utime(weights, ns=(10**18, 10**18 + 1))
    marks.append(fingerprint({"a": 1}, [weights], **facts))
    weights.rename(tmp_path / "other.safetensors")
    marks.append(fingerprint({"a": 1}, [tmp_path / "other.safetensors"], **facts))
    assert len(set(marks)) == len(marks)
