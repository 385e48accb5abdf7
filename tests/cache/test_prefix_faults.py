"""What can go wrong around the store of prefixes: a disk that refuses, hangs or is slow, a kill."""

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_mtp.prefix import directory as prefix_files
from mlx_mtp.prefix import disk as prefix_store
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.prefix.radix_tree import Fetch, prefix_keys
from tests.cache.prefixes import PATIENCE, ROOT, fetch, flush, is_whole, keep
from tests.cache.test_prefix_store import check_integrity, files
from tests.waiting import wait_until

PATHS = ((1,), (1, 2), (1, 2, 3), (4,), (1, 5), (4, 6), (7,), (1, 2, 3, 8))
CALLS = ("open", "write", "fsync", "replace", "unlink", "close", "utime")


def remove_under(store: PrefixStore, *tokens: int) -> None:
    with store._lock:
        store._remove(next(prefix_keys(ROOT, tokens, [len(tokens)]))[1])


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)])
def test_killed_at_any_step(open_store, folder, monkeypatch, caplog, every):
    """A kill leaves what is in the directory before one of the store's calls of the system.

    Nothing half written bears a file's name, and what is there can be used.
    """
    left: list[Path] = []
    store = open_store()
    own = [store._thread]

    def copied_before(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if own == [threading.current_thread()]:
                own.clear()  # The copying makes such calls itself.
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
    """It is logged once, nothing more is tried for a while, and then all is well again."""
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
            # One that is not there any more is no error.
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
    """Makes a call of the system wait; returns what says that it does, and lets it go on."""
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
    """What waits is bounded, and what is removed meanwhile never gets there."""
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
    # What waits is found, and is read when the disk answers.
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
    # What it still does, and says, is not for the next test.
    store._thread.join(PATIENCE)
    assert not store._thread.is_alive()
    store._directory.close()
