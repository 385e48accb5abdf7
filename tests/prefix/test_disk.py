"""The prefix cache's store on a real directory: prefixes come back whole, or not at all.

This also holds if the disk fails, hangs or is slow, or the process is killed.
"""

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from safetensors import safe_open

from mlx_mtp.errors import UsageError
from mlx_mtp.prefix import directory as prefix_files
from mlx_mtp.prefix import disk as prefix_store
from mlx_mtp.prefix.directory import kv_fingerprint
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.prefix.radix_tree import Fetch, prefix_keys, root_key
from mlx_mtp.prefix.segments import Segment
from tests.support.prefixes import FINGERPRINT, PATIENCE, ROOT, fetch, flush, is_whole, keep, same
from tests.support.quick import full
from tests.support.waiting import wait_until

SALTS = st.sampled_from([ROOT, root_key("a")])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


def files(folder: Path, pattern: str = "*.safetensors") -> list[Path]:
    return sorted(folder.glob(pattern))


def check_integrity(store: PrefixStore) -> None:
    """Check that the files are those of the index, within its limit, and have all ancestors."""
    assert flush(store)
    here = files(store.path)
    index = store._files.values()
    assert {path.name for path in here} == {store._directory._name(file) for file in index}
    assert (
        sum(path.stat().st_size for path in here) == store.stats()["file_nbytes"] <= store.max_bytes
    )
    assert store.stats()["num_files"] == len(here)
    assert files(store.path, "*.tmp") == []
    assert all(file.start == 0 or store._files[file.parent].end == file.start for file in index)


def test_every_dtype_comes_back_bit_by_bit(open_store, folder):
    """All bit patterns, NaNs included."""
    raw = mx.array(np.random.default_rng(0).integers(0, 256, size=(3, 4, 16), dtype=np.uint8))
    dtypes = mx.uint32, mx.float16, mx.bfloat16, mx.float32
    arrays = {f"{dtype}": raw.view(dtype) for dtype in dtypes}
    arrays |= {"strided": raw.transpose(2, 0, 1)[::2], "empty": raw[:, :0]}
    kv, states = Segment(0, 2, arrays, 4), Segment(2, 2, {"hidden": raw})
    open_store().keep(ROOT, (1, 2), [kv, states])
    assert all(map(same, fetch(open_store(), 1, 2), (kv, states)))
    with safe_open(next(folder.glob("*-0-2.*")), "numpy") as opened:  # It is a safetensors file.
        assert set(opened.keys()) == set(arrays)


READS_WHILE_CACHES_ARE_CLEARED = """
import threading
import mlx.core as mx
from mlx_mtp.prefix.directory import pack, unpack
content = pack({f"{n}": mx.zeros((64,)) for n in range(200)}, None)
reads = threading.Thread(target=lambda: [unpack(content) for _ in range(50)])
reads.start()
while reads.is_alive():
    mx.eval(mx.ones((1000,)) + 1)
    mx.clear_cache()
"""


def test_it_is_read_while_another_engine_clears_mlxs_cache():
    """`mx.clear_cache` waits for the streams of all threads, and no Python code runs meanwhile."""
    subprocess.run([sys.executable, "-c", READS_WHILE_CACHES_ARE_CLEARED], timeout=120, check=True)


def test_after_a_restart_prefixes_are_found_and_share_their_beginning(open_store):
    store = open_store()
    paths = [(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 2, 9), (8,)]
    for path in paths:
        keep(store, *path)
    keep(store, 1, 2, salt=root_key("mine"))
    check_integrity(store)
    rows = sorted((file.start, file.end) for file in store._files.values() if file.start < file.end)
    assert rows == [(0, 1), (0, 2), (0, 3), (0, 3), (3, 4), (3, 5)]
    again = open_store()
    for path in paths:
        assert again.longest(ROOT, (*path, 0)) == len(path)
        for start in range(len(path) + 1):
            assert is_whole(fetch(again, *path, start=start), *path, start=start)
    assert fetch(again, 1, 2) is Fetch.GONE, "there is KV of it, but nothing ends there"
    assert [again.longest(root_key(salt), (1, 2, 3)) for salt in ("mine", "other")] == [2, 0]
    # A stored prefix is not written again, and a longer one begins where it ends.
    keep(again, 1, 2, 3)
    keep(again, 1, 2, 3, 4, 5)
    check_integrity(again)
    assert again.stats()["num_files_written"] == 2


def test_the_least_recently_used_goes_first_and_a_restart_remembers(open_store):
    def here(store: PrefixStore) -> list[int]:
        check_integrity(store)
        return [n for n in range(50) if store.longest(ROOT, (n,))]

    store = open_store()
    keep(store, 1)
    check_integrity(store)
    size = store.stats()["file_nbytes"] + 300  # of an entry with longer numbers in its headers
    store = open_store(max_bytes=4 * size)
    for first in range(2, 20):
        keep(store, first)
        store.touch(ROOT, (2,))
    assert here(store) == [2, 17, 18, 19]
    store.touch(ROOT, (17,))
    assert flush(store)
    again = open_store(max_bytes=4 * size)
    keep(again, 20)
    assert here(again) == [2, 17, 19, 20]
    assert here(open_store(max_bytes=2 * size)) == [17, 20]


class Life(RuleBasedStateMachine):
    """Prefixes are kept, used, dropped, damaged and evicted, and the store is closed and opened."""

    def __init__(self):
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.kept: set[tuple[str, tuple[int, ...]]] = set()
        self.store = self.open()

    def open(self):
        return PrefixStore(Path(self.place.name) / "prefixes", FINGERPRINT, 30_000)

    def teardown(self):
        self.store.close()
        self.place.cleanup()

    @rule(tokens=TOKENS, salt=SALTS)
    def keep(self, tokens, salt):
        keep(self.store, *tokens, salt=salt)
        self.kept.add((salt, tokens))
        assert self.store.longest(salt, tokens) == len(tokens)

    @rule(tokens=TOKENS, salt=SALTS, start=st.integers(0, 7))
    def look_up(self, tokens, salt, start):
        found = tokens[: self.store.longest(salt, tokens)]
        if found:
            assert (salt, found) in self.kept
            start = min(start, len(found))
            got = fetch(self.store, *found, start=start, salt=salt)
            if got is Fetch.GONE:  # It was damaged.
                self.store.drop_snapshot(salt, found)
            else:
                assert is_whole(got, *found, start=start)

    @rule(tokens=TOKENS)
    def drop(self, tokens):
        self.store.drop_snapshot(ROOT, tokens)
        self.kept.discard((ROOT, tokens))

    @rule(number=st.none() | st.integers(0, 99), at=st.integers(0, 500))
    def restart(self, number, at):
        """Close and open the store; in between, a file can be damaged or cut short."""
        self.store.close()
        here = [path for path in files(self.store.path) if path.stat().st_size]
        if here and number is not None:
            path = here[number % len(here)]
            content = bytearray(path.read_bytes())
            content[at % len(content)] ^= 16
            path.write_bytes(content if number % 2 else content[:at])
        self.store = self.open()

    @invariant()
    def whole(self):
        check_integrity(self.store)


Life.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLife = Life.TestCase


@pytest.mark.parametrize("how", ["header", "data", "cut", "gone", "longer", "renamed", "link"])
def test_a_damaged_file_goes_with_all_that_builds_on_it(open_store, folder, how):
    store = open_store()
    for path in ((1,), (1, 2), (1, 2, 3), (9,)):
        keep(store, *path)
    check_integrity(store)
    restarts = how in ("data", "longer", "link")  # Else damage happens while it is open.
    if restarts:
        store.close()
    other, path = folder.parent / "other", next(folder.glob("*-1-2.safetensors"))
    content = bytearray(path.read_bytes())
    content[50 if how == "header" else -7] ^= 4
    path.rename(other)
    if how == "link":
        path.symlink_to(other)
    elif how != "gone":
        first = next(folder.glob("*-0-1.safetensors")).read_bytes()
        changed = {"cut": content[:-9], "longer": content + b"0", "renamed": first}
        path.write_bytes(changed.get(how, content))
    if restarts:
        store = open_store()
    assert fetch(store, 1, 2, 3) is Fetch.GONE or how in ("link", "gone")
    assert store.longest(ROOT, (1, 2, 3)) == 1
    check_integrity(store)
    assert other.exists(), "a link was followed"
    # The prefix can be stored again.
    keep(store, 1, 2, 3)
    check_integrity(store)
    assert is_whole(fetch(store, 1, 2, 3), 1, 2, 3)


def test_other_files_are_left_alone_and_unfit_ones_of_ours_removed(open_store, folder):
    folder.mkdir(mode=0o700)
    name, key = "mlx-mtp-prefix-", "a" * 40
    blocked = f"{name}ffffffff-{key}-{key}-0-4.safetensors"
    others = {"model.safetensors", "mlx-mtp-prefix-1.safetensors", "a.tmp"}
    for each in (
        f"{name}{'1' * 64}.safetensors",  # of the first version of this program
        f"{name}eeeeeeee-{key}-{key}-0-2.safetensors",  # of another model
        f"{name}ffffffff-{key}s.0123abcd.tmp",  # not finished
        f"{name}ffffffff-{key}-{'b' * 40}-1-2.safetensors",  # without its ancestor
        *others,
    ):
        (folder / each).write_text("x")
    (folder / f"{name}ffffffff-{key}-{key}-0-3.safetensors").symlink_to(folder / "a.tmp")
    (folder / blocked).mkdir()
    assert flush(open_store())
    left = {path.name for path in folder.iterdir()}
    assert left == {*others, blocked, "mlx-mtp-prefix.lock"}
    assert (folder / "a.tmp").read_text() == "x"


def test_files_of_another_fingerprint_are_never_used(open_store, folder):
    """This holds even if the marks in the files' names are equal by chance."""
    keep(open_store(), 1, 2)
    store = open_store(mark=FINGERPRINT[:-1] + "e")
    assert store.longest(ROOT, (1, 2)) == 2
    assert fetch(store, 1, 2) is Fetch.GONE
    check_integrity(store)
    keep(store, 1, 2)
    assert open_store(mark="e" * 64).longest(ROOT, (1, 2)) == 0
    assert files(folder) == []


def test_for_the_owner_alone(open_store, folder):
    before = os.umask(0)
    try:
        store = open_store(path=folder / "deeper")
        keep(store, 1, 2, salt=root_key("a secret"))
        check_integrity(store)
    finally:
        os.umask(before)
    inside = list((folder / "deeper").iterdir())
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder / "deeper", *inside)}
    assert modes == {0o700, 0o600}
    assert all(b"a secret" not in path.read_bytes() for path in inside)


def test_a_directory_that_is_not_safe_is_refused(open_store, folder):
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
    (folder / "link").symlink_to(folder)
    with pytest.raises(UsageError, match="is a symbolic link"):
        open_store(path=folder / "link")
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
        with pytest.raises(UsageError, match="belongs to user 12345"):
            open_store()


def test_one_server_at_a_time(open_store, monkeypatch):
    """A lock belongs to a descriptor, so a second store is like another process."""
    monkeypatch.setattr(prefix_files, "_LOCK_SECONDS", 0.2)
    store = open_store()
    with pytest.raises(UsageError, match="is in use by another server"):
        PrefixStore(store.path, FINGERPRINT, 1 << 30)
    store.close()
    open_store()


def test_keys_and_the_fingerprint_follow_all_they_are_made_of(tmp_path, monkeypatch):
    roots = [root_key(salt) for salt in (None, "", "a", "b")]
    keys = [key for root in roots for _, key in prefix_keys(root, (1, 2, 3, 258), [1, 2, 4])]
    assert keys[:3] == [next(prefix_keys(ROOT, (1, 2, 3, 258), [n]))[1] for n in (1, 2, 4)]
    keys += [key for _, key in prefix_keys(ROOT, (2, 1, 3), [1, 2, 3])]
    assert len(set(keys)) == len(keys)

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    facts = {"dtype": "bfloat16", "version": "0.1.0", "kv_bits": None}

    def mark(config: int = 1, **more: object) -> str:
        (path,) = tmp_path.iterdir()
        return kv_fingerprint({"a": config}, [path], **facts | more)

    marks = [mark(), mark(config=2), *(mark(**{name: 8}) for name in facts)]
    monkeypatch.setattr(prefix_files, "_HASH_BLOCK", 1 << 20)
    for place in (0, 1 << 20, (3 << 20) - 1, 1_234_567):  # Writes that keep size and time.
        marks.append(mark())
        assert mark() == marks[-1]
        with weights.open("r+b") as file:
            file.seek(place)
            file.write(b"1")
        os.utime(weights, ns=(10**18, 10**18))
    marks.append(mark())
    weights.rename(tmp_path / "other.safetensors")
    marks.append(mark())
    assert len(set(marks)) == len(marks)


PATHS = ((1,), (1, 2), (1, 2, 3), (4,), (1, 5), (4, 6), (7,), (1, 2, 3, 8))
CALLS = ("open", "write", "fsync", "replace", "unlink", "close", "utime")


def remove_under(store: PrefixStore, *tokens: int) -> None:
    with store._lock:
        store._remove(next(prefix_keys(ROOT, tokens, [len(tokens)]))[1])


@pytest.mark.parametrize("every", [5, full(1)])
def test_killed_at_any_step(open_store, folder, monkeypatch, caplog, every):
    """A kill leaves the directory as it is before one of the store's system calls.

    No incomplete file has a final name, and all files there can be used.
    """
    left: list[Path] = []
    store = open_store()
    own = [store._thread]

    def copied_before(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if own == [threading.current_thread()]:
                own.clear()  # Copying makes such calls, too.
                left.append(folder.parent / f"left {len(left)}")
                shutil.copytree(folder, left[-1])
                own.append(store._thread)
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(prefix_files, "_SLICE", 2000)
        for name in CALLS:
            patch.setattr(prefix_files.os, name, copied_before(getattr(os, name)))
        for _ in range(2):
            for path in PATHS:
                keep(store, *path)
            assert flush(store)
            remove_under(store, 1, 2)
        assert flush(store)
    store.close()
    found, unfinished = set(), 0
    for place in left[::every]:
        unfinished += len(files(place, "*.tmp"))
        store = open_store(path=place)
        check_integrity(store)
        whole = [path for path in PATHS if store.longest(ROOT, path) == len(path)]
        assert all(is_whole(fetch(store, *path), *path) for path in whole)
        found.add(len(whole))
    assert found == set(range(len(PATHS) + 1))
    assert unfinished > len(left) / every / 3
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("place", ["open", "write", "fsync", "replace", "unlink"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOENT])
def test_every_refusal_of_the_disk(open_store, monkeypatch, caplog, place, number):
    """A failure is logged once, the store pauses for a while, and then it works again."""
    store = open_store()
    keep(store, 9)
    check_integrity(store)
    real = getattr(os, place)

    def refuse(*args: object, **kwargs: object) -> object:
        if place in ("write", "fsync") or "mlx-mtp-prefix-" in str(args[0]):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(prefix_files.os, place, refuse)
        if place == "unlink":
            # A file that no longer exists is no error.
            store.drop_snapshot(ROOT, (9,))
        else:
            keep(store, 1, 2)
        assert flush(store)
        keep(store, 3)
        assert flush(store)
    refused = (place, number) != ("unlink", errno.ENOENT)
    assert [os.strerror(number) in message for message in caplog.messages] == [True] * refused
    assert ("The cache goes on in memory" in caplog.text) == refused
    assert [store.longest(ROOT, path) for path in ((1, 2), (3,))] == [0, int(not refused)]
    assert store.stats()["num_files_dropped"] >= refused + (place != "unlink")
    store._refused_until = 0.0
    keep(store, 1, 2)
    assert is_whole(fetch(store, 1, 2), 1, 2)
    assert place == "unlink" or is_whole(fetch(store, 9), 9)


@pytest.mark.parametrize("name", ["pack", "write"])
def test_an_error_of_our_own_is_not_the_end(open_store, monkeypatch, name):
    store = open_store()
    with monkeypatch.context() as patch:
        owner = prefix_store if name == "pack" else store._directory
        patch.setattr(owner, name, lambda *args: 1 / 0)
        keep(store, 1)
        assert flush(store)
    keep(store, 1)
    assert is_whole(fetch(store, 1), 1)


@pytest.fixture
def hang(monkeypatch):
    """Makes a system call wait; returns the event that it waits, and the event that ends it."""
    made: list[threading.Event] = []

    def make(name: str) -> tuple[threading.Event, threading.Event]:
        began, go_on = threading.Event(), threading.Event()
        made.append(go_on)
        real = getattr(os, name)

        def held(*args: object, **kwargs: object) -> object:
            began.set()
            assert go_on.wait(PATIENCE)
            return real(*args, **kwargs)

        monkeypatch.setattr(prefix_files.os, name, held)
        return began, go_on

    yield make
    for go_on in made:
        go_on.set()


@pytest.mark.parametrize("place", ["open", "write", "fsync", "replace", "unlink", "utime"])
def test_a_disk_that_hangs_anywhere_does_not_hold_up_the_engine(
    open_store, hang, monkeypatch, place
):
    """Queued bytes are bounded, and prefixes removed while they wait are never written."""
    store = open_store(max_bytes=60_000, max_queued_bytes=30_000)
    for first in range(3):
        keep(store, first)
    check_integrity(store)
    began, go_on = hang(place)
    if place == "unlink":
        store.drop_snapshot(ROOT, (0,))
    keep(store, 7)
    assert began.wait(PATIENCE)
    for other in range(10, 30):
        keep(store, other)
    assert store.stats()["num_files_dropped"] > 10
    assert sum(len(file.content or b"") for file in [*store._files.values()]) <= 30_000
    # Prefixes that wait are found, and are read when the disk answers.
    assert store.longest(ROOT, (10,)) == 1
    assert store.fetch(ROOT, (10,), 0, lambda nbytes: True) is Fetch.COMING
    with monkeypatch.context() as patch:
        patch.setattr(prefix_store, "READ_SECONDS", 0.0)
        assert store.fetch(ROOT, (10,), 0, lambda nbytes: True) is Fetch.LATE
    store.forget()
    remove_under(store, 7)
    go_on.set()
    assert flush(store)
    assert store._contents is None, "what was forgotten is kept"
    assert is_whole(fetch(store, 10), 10)
    check_integrity(store)
    assert store.longest(ROOT, (7,)) == 0
    keep(store, 7)
    assert is_whole(fetch(store, 7), 7)


def test_closing_writes_what_waits_for_some_time(open_store, folder, monkeypatch):
    store = open_store()
    for first in range(20):
        keep(store, first)
    store.close(PATIENCE)
    assert len(files(folder)) == 40
    real = os.write

    def slow(*args: object) -> int:
        time.sleep(0.02)
        return real(*args)

    monkeypatch.setattr(prefix_files.os, "write", slow)
    store = open_store()
    for first in range(100, 400):
        keep(store, first)
    wait_until(lambda: len(files(folder)) >= 42)
    store.close(0.3)
    assert 42 <= len(files(folder)) < 200
    check_integrity(open_store())


def test_a_disk_that_hangs_does_not_hold_up_the_end(open_store, hang, monkeypatch, caplog):
    monkeypatch.setattr(prefix_store, "_ABANDON_SECONDS", 0.1)
    store = open_store()
    began, go_on = hang("write")
    keep(store, 0)
    assert began.wait(PATIENCE)
    store.close(0.1)
    assert "hangs" in caplog.text
    keep(store, 1)
    assert store.stats()["num_files_dropped"] == 1
    go_on.set()
    # The thread must not work or log during the next test.
    store._thread.join(PATIENCE)
    assert not store._thread.is_alive()
    store._directory.close()
