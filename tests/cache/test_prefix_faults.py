"""What can go wrong around the store of prefixes: a disk that refuses, hangs or is slow, a kill."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_mtp.cache import prefix_files, prefix_store
from mlx_mtp.cache.prefix_keys import prefix_keys
from mlx_mtp.cache.prefix_store import PrefixStore
from mlx_mtp.cache.prefix_tree import Fetch
from tests.cache.prefixes import PATIENCE, ROOT, fetch, is_whole, keep
from tests.cache.test_prefix_store import Open, check_integrity, files

PATHS = ((1,), (1, 2), (1, 2, 3), (4,), (1, 5), (4, 6), (7,), (1, 2, 3, 8))
EVENTS = ("open", "write", "fsync", "replace", "unlink", "close", "utime")


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)])
def test_killed_at_any_step(
    open_store: Open,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    every: int,
) -> None:
    """A kill leaves what is in the directory before one of the store's calls of the system.

    Nothing half written bears a file's name, and what is there can be used.
    """
    left: list[Path] = []
    store = open_store()
    own = [store._thread]

    def event(real: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            if own == [threading.current_thread()]:
                own.clear()  # The copying makes such calls itself.
                left.append(folder.parent / f"left {len(left)}")
                shutil.copytree(folder, left[-1])
                own.append(store._thread)
            return real(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(prefix_files, "_SLICE", 2000)
        for name in EVENTS:
            patch.setattr(prefix_files.os, name, event(getattr(os, name)))
        for _ in range(2):
            for path in PATHS:
                keep(store, *path)
            assert store.flush(PATIENCE)
            with store._lock:
                store._remove_under(next(prefix_keys(ROOT, (1, 2), [2]))[1])
        assert store.flush(PATIENCE)
    store.close()
    found, unfinished = set(), 0
    for path in left[::every]:
        unfinished += len(files(path, "*.tmp"))
        store = open_store(path=path)
        check_integrity(store)
        whole = [path for path in PATHS if store.longest(ROOT, path) == len(path)]
        assert all(is_whole(fetch(store, *path), *path) for path in whole)
        found.add(len(whole))
    assert found == set(range(len(PATHS) + 1))
    assert unfinished > len(left) / every / 3
    assert "damaged" not in caplog.text


# Keeps prefixes until it is killed.
CHILD = """
import sys
from pathlib import Path
from mlx_mtp.cache.prefix_store import PrefixStore
from tests.cache.prefixes import FINGERPRINT, ROOT, keep
store = PrefixStore(Path(sys.argv[1]), FINGERPRINT, 1 << 30)
print("READY", flush=True)
for number in range(10**6):
    keep(store, number, width=20_000)
    store.flush(60)
    store.drop_snapshot(ROOT, (number,))
"""


@pytest.mark.full
def test_killed_at_any_time(
    open_store: Open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(7)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    unfinished = 0
    for _ in range(30):
        command = [sys.executable, "-c", CHILD, str(folder)]
        killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert killed.stdout is not None
        assert killed.stdout.readline() == "READY\n"
        time.sleep(rng.uniform(0.02, 0.3))
        killed.kill()
        killed.communicate()
        unfinished += len(files(folder, "*.tmp"))
        store = open_store()
        check_integrity(store)
        for number in range(1000):
            if store.longest(ROOT, (number,)):
                assert is_whole(fetch(store, number), number, width=20_000)
        store.close()
    assert "damaged" not in caplog.text
    assert unfinished > 3


@pytest.mark.parametrize("place", ["open", "write", "fsync", "replace", "unlink"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_every_refusal_of_the_disk(
    open_store: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    number: int,
) -> None:
    """It is logged once, nothing more is tried for a while, and then all is well again."""
    store = open_store()
    keep(store, 9)
    assert store.flush(PATIENCE)
    real = getattr(os, place)

    def refuse(*args: object, **kwargs: object) -> object:
        if place in ("write", "fsync") or "mlx-mtp-prefix-" in str(args[0]):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(prefix_files.os, place, refuse)
        if place == "unlink":
            store.drop_snapshot(ROOT, (9,))
        else:
            keep(store, 1, 2)
        assert store.flush(PATIENCE)
        keep(store, 3)
        assert store.flush(PATIENCE)
    assert store.longest(ROOT, (1, 2)) == store.longest(ROOT, (3,)) == 0
    assert [os.strerror(number) in message for message in caplog.messages] == [True]
    assert "The cache goes on in memory" in caplog.text
    assert store.stats().num_dropped >= 1
    store._refused_until = 0.0
    keep(store, 1, 2)
    if place != "unlink":
        check_integrity(store)
        assert is_whole(fetch(store, 9), 9)
    assert is_whole(fetch(store, 1, 2), 1, 2)


def test_a_directory_that_vanishes(
    open_store: Open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    keep(store, 1)
    assert store.flush(PATIENCE)
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING):
        assert fetch(store, 1) is Fetch.GONE
        for first in range(3):
            store._refused_until = 0.0
            keep(store, first)
            assert store.flush(PATIENCE)
    assert len(caplog.messages) == 1
    assert not folder.exists()


def test_an_error_of_our_own_is_not_the_end(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("a mistake of ours")

    store = open_store()
    for owner, name in (
        (prefix_store, "pack"),
        (prefix_files.PrefixDirectory, "write"),
        (prefix_files.PrefixDirectory, "mark_used"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            keep(store, 1)
            assert store.flush(PATIENCE)
        assert "a mistake of ours" in caplog.text
        caplog.clear()
        keep(store, 1)
        check_integrity(store)
        assert is_whole(fetch(store, 1), 1)
        store.drop_snapshot(ROOT, (1,))
        with store._lock:
            store._remove_under(next(iter(store._files)))


class Hang:
    """A function of the system's that waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        real: Callable[..., object] = getattr(os, name)

        def held(*args: object, **kwargs: object) -> object:
            self.began.set()
            assert self.go_on.wait(PATIENCE)
            return real(*args, **kwargs)

        monkeypatch.setattr(prefix_files.os, name, held)

    def wait(self) -> None:
        assert self.began.wait(PATIENCE)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Hang]]:
    made: list[Hang] = []

    def make(name: str) -> Hang:
        made.append(Hang(monkeypatch, name))
        return made[-1]

    yield make
    for each in made:
        each.go_on.set()


@pytest.mark.parametrize("place", ["open", "write", "fsync", "replace", "unlink", "utime"])
def test_a_disk_that_hangs_anywhere_does_not_hold_up_the_engine(
    open_store: Open, hang: Callable[[str], Hang], place: str
) -> None:
    """What waits is bounded, and what is dropped meanwhile never gets there."""
    store = open_store(max_bytes=60_000, max_queued_bytes=30_000)
    for first in range(3):
        keep(store, first)
    assert store.flush(PATIENCE)
    disk = hang(place)
    if place == "unlink":
        store.drop_snapshot(ROOT, (0,))
    keep(store, 7)
    disk.wait()
    for other in range(10, 30):
        keep(store, other)
    assert store.stats().num_dropped > 10
    assert store._queued_bytes() <= 30_000
    # What waits is found, and is read when the disk answers.
    assert store.longest(ROOT, (10,)) == 1
    assert store.fetch(ROOT, (10,), 0, lambda nbytes: True) is Fetch.COMING
    assert store.stats().num_nodes <= 8
    with store._lock:
        store._remove_under(next(key for key, file in store._files.items() if file.end == 1))
    store.drop_snapshot(ROOT, (7,))
    disk.go_on.set()
    assert is_whole(fetch(store, 10), 10)
    check_integrity(store)
    assert store.longest(ROOT, (7,)) == 0
    keep(store, 7)
    check_integrity(store)
    assert is_whole(fetch(store, 7), 7)


def test_a_read_that_takes_too_long_is_not_waited_for(
    open_store: Open, hang: Callable[[str], Hang], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    for path in ((1,), (1, 2), (9,)):
        keep(store, *path)
    assert store.flush(PATIENCE)
    disk = hang("open")
    assert store.fetch(ROOT, (1, 2), 0, lambda nbytes: True) is Fetch.COMING
    disk.wait()
    monkeypatch.setattr(prefix_store, "READ_SECONDS", 0.0)
    assert store.fetch(ROOT, (1, 2), 0, lambda nbytes: True) is Fetch.NEVER
    assert store.fetch(ROOT, (9,), 0, lambda nbytes: True) is Fetch.NEVER
    store.forget()
    disk.go_on.set()
    assert store.flush(PATIENCE)
    assert store.reader.contents is None, "what was forgotten is not kept"
    monkeypatch.undo()
    assert is_whole(fetch(store, 1, 2), 1, 2)


def test_closing_writes_what_waits_for_some_time(
    open_store: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    for first in range(20):
        keep(store, first)
    store.close(PATIENCE)
    keep(store, 99)
    store.close()
    assert open_store().stats().num_nodes == 40
    real = os.write

    def slow(*args: object) -> int:
        time.sleep(0.02)
        return real(*args)

    monkeypatch.setattr(prefix_files.os, "write", slow)
    store = open_store()
    for first in range(100, 400):
        keep(store, first)
    while len(files(folder)) < 42:
        time.sleep(0.01)
    store.close(0.3)
    assert 42 <= len(files(folder)) < 200
    check_integrity(open_store())


def test_a_disk_that_hangs_does_not_hold_up_the_end(
    open_store: Open,
    hang: Callable[[str], Hang],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(prefix_store, "_ABANDON_SECONDS", 0.1)
    store: PrefixStore = open_store()
    disk = hang("write")
    keep(store, 0)
    disk.wait()
    store.close(0.1)
    assert "hangs" in caplog.text
    keep(store, 1)
    assert store.stats().num_dropped == 1
    disk.go_on.set()
    # What it still does, and says, is not for the next test.
    store._thread.join(PATIENCE)
    assert not store._thread.is_alive()
    store._directory.close()
