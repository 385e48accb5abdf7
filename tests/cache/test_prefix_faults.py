"""What can go wrong around the disk store: kills, disks, owners, a second server."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_mtp.cache import prefix_folder, prefix_writer
from mlx_mtp.cache.prefix_keys import extend_key, root_key
from mlx_mtp.errors import UsageError
from tests.cache.stored_nodes import (
    FINGERPRINT,
    PATIENCE,
    ROOT,
    Open,
    check_whole,
    files,
    key_of,
    payload,
    put,
)

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can")
PATHS = ((1,), (1, 2), (1, 2, 3), (4,), (1, 5), (4, 6), (7,), (1, 2, 3, 8))
LARGE = 3 << 20

# Puts nodes again and again, replacing and removing some, until it is killed: by itself at the n-th
# thing that it does to the disk, or by its parent.
CHILD = """
import os, signal, sys
from pathlib import Path
from mlx_mtp.cache.prefix_store import PrefixStore
from tests.cache.stored_nodes import FINGERPRINT, key_of, put
from tests.cache.test_prefix_faults import LARGE, PATHS

folder, last, nbytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
events = 0

def event(original):
    def run(*args, **kwargs):
        global events
        events += 1
        if events == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    return run

store = PrefixStore(folder, FINGERPRINT, 1 << 30)
for name in ("open", "write", "fsync", "replace", "unlink", "close"):
    setattr(os, name, event(getattr(os, name)))
print("READY", flush=True)
for i in range(10**6 if last < 0 else 2):
    for path in PATHS:
        put(store, path[:-1], path[-1:], replace=True, nbytes=nbytes)
    if i % 2:
        store.remove(key_of(7))
    store.flush(60)
print("EVENTS", events)
"""


def _child(folder: Path, last: int, nbytes: int = 2048) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(folder), str(last), str(nbytes)]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _check_after_a_kill(open_store: Open, nbytes: int = 2048) -> int:
    store = open_store()
    assert store.stats().num_unfit == 0  # Nothing half written has a node's name.
    paths = {key_of(*path): path for path in PATHS}
    for header in store.found:
        check_whole(store.read(header.key), paths[header.key], nbytes)
    assert store.flush(PATIENCE)
    assert files(store._folder.path, "*.tmp") == []
    assert len(files(store._folder.path)) == len(store.found)
    store.close()
    return len(store.found)


def _killed_at(open_store: Open, folder: Path, events: range) -> set[int]:
    found = set()
    for event in events:
        shutil.rmtree(folder, ignore_errors=True)
        child = _child(folder, event)
        output, _ = child.communicate(timeout=120)
        if "EVENTS" in output:
            break
        assert child.returncode == -signal.SIGKILL
        found.add(_check_after_a_kill(open_store))
    return found


def test_killed_at_any_step_of_a_write(open_store: Open, folder: Path) -> None:
    """Open, five writes, fsync, close, rename, fsync: 1 to 10 are those of the first node."""
    assert {0, 1} <= _killed_at(open_store, folder, range(5, 13, 2))


@pytest.mark.full
def test_killed_at_every_step(open_store: Open, folder: Path) -> None:
    found = _killed_at(open_store, folder, range(1, 1000, 3))
    assert found == set(range(len(PATHS) + 1))


@pytest.mark.parametrize("times", [3, pytest.param(30, marks=pytest.mark.full)])
def test_killed_at_any_time(open_store: Open, folder: Path, times: int) -> None:
    """Files are of some size, so that most kills come in the middle of one."""
    rng = random.Random(7)
    unfinished = 0
    for _ in range(times):
        child = _child(folder, -1, LARGE)
        assert child.stdout is not None
        assert child.stdout.readline() == "READY\n"
        time.sleep(rng.uniform(0.02, 0.6))
        child.kill()
        child.wait()
        child.stdout.close()
        unfinished += len(files(folder, "*.tmp"))
        _check_after_a_kill(open_store, LARGE)
    if times > 10:
        assert unfinished > 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(mountpoint)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield mountpoint
    subprocess.run(["umount", "-l", str(mountpoint)], check=True)


@AS_ROOT
def test_a_full_disk(open_store: Open, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(path=small_disk / "prefixes", retry_seconds=0.0)
    with caplog.at_level(logging.WARNING):
        for i in range(8):
            assert put(store, (), (i,), nbytes=300 << 10)
            assert store.flush(PATIENCE)
    assert len(caplog.messages) == 1
    assert "No space left on device" in caplog.text
    assert "The cache goes on in memory" in caplog.text
    assert store.stats().num_written == 3
    assert store.stats().num_dropped == 5
    assert store.stats().queued_bytes == 0
    assert files(small_disk / "prefixes", "*.tmp") == []
    for i in range(3):
        check_whole(store.read(key_of(i)), (i,), 300 << 10)
    # There is room again, and so it goes on.
    store.remove(key_of(0))
    assert put(store, (), (9,), nbytes=300 << 10)
    assert store.flush(PATIENCE)
    check_whole(store.read(key_of(9)), (9,), 300 << 10)


@AS_ROOT
def test_a_disk_that_turns_read_only(
    open_store: Open, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "prefixes"
    store = open_store(path=path, retry_seconds=0.0)
    put(store, (), (1,))
    assert store.flush(PATIENCE)
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    if subprocess.run(remount, capture_output=True).returncode:
        pytest.skip("it can't be remounted here")
    with caplog.at_level(logging.WARNING):
        for i in range(2, 5):
            put(store, (), (i,))
        store.touch(key_of(1))
        store.remove(key_of(2))
        assert store.flush(PATIENCE)
    assert len(caplog.messages) == 1
    check_whole(store.read(key_of(1)), (1,))
    store.close()
    # What is there can still be used; a new directory can't be made.
    check_whole(open_store(path=path).read(key_of(1)), (1,))
    with pytest.raises(UsageError, match="Read-only file system"):
        open_store(path=small_disk / "other")


@pytest.mark.parametrize("place", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_every_refusal_of_the_disk(
    open_store: Open,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    number: int,
) -> None:
    store = open_store(retry_seconds=3600.0)
    real, broken = getattr(os, place), [True]

    def refuse(*args: object, **kwargs: object) -> object:
        ours = place in ("write", "fsync") or "mlx-mtp-prefix-" in str(args[0])
        if broken[0] and ours:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(prefix_folder.os, place, refuse)
    with caplog.at_level(logging.WARNING):
        assert put(store, (), (1,))
        assert store.flush(PATIENCE)
        # Nothing more is tried for a while.
        assert not put(store, (), (2,))
    broken[0] = False
    assert [m for m in caplog.messages if os.strerror(number) in m] == caplog.messages
    assert len(caplog.messages) == 1
    assert key_of(1) not in store
    assert files(folder) == files(folder, "*.tmp") == []
    assert store.stats().queued_bytes == 0
    store._writer._refused_until = 0.0
    assert put(store, (), (1,))
    assert store.flush(PATIENCE)
    check_whole(store.read(key_of(1)), (1,))


def test_a_file_size_limit(folder: Path) -> None:
    """The system's limit of a file's size, in a process of its own."""
    code = """
import resource, sys, signal
from pathlib import Path
from mlx_mtp.cache.prefix_store import PrefixStore
from tests.cache.stored_nodes import FINGERPRINT, check_whole, key_of, put
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
store = PrefixStore(Path(sys.argv[1]), FINGERPRINT, 1 << 30, retry_seconds=0.0)
put(store, (), (1,), nbytes=1 << 20); assert store.flush(60)
put(store, (), (2,)); assert store.flush(60)
assert key_of(1) not in store
check_whole(store.read(key_of(2)), (2,))
store.close()
"""
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("File too large") == 1


def test_a_directory_that_vanishes(
    open_store: Open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(retry_seconds=0.0)
    put(store, (), (1,))
    assert store.flush(PATIENCE)
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING):
        assert store.read(key_of(1)) is None
        for i in range(3):
            put(store, (), (i,))
            assert store.flush(PATIENCE)
        store.remove_under(ROOT)
        assert store.flush(PATIENCE)
    assert len(caplog.messages) == 1
    assert not folder.exists()


def test_a_directory_that_others_can_write_is_refused(open_store: Open, folder: Path) -> None:
    for mode in (0o777, 0o770, 0o702, 0o1777):
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
        with pytest.raises(UsageError, match=r"can be written by others \(mode .*chmod 700"):
            open_store()
    assert list(folder.iterdir()) == []


def test_a_readable_directory_is_closed_if_nothing_else_is_in_it(
    open_store: Open, folder: Path
) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "other").touch()
    open_store().close()
    assert folder.stat().st_mode & 0o777 == 0o755
    (folder / "other").unlink()
    open_store().close()
    assert folder.stat().st_mode & 0o777 == 0o700


@AS_ROOT
def test_anothers_directory_is_refused(open_store: Open, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        open_store()


def test_a_link_or_a_file_is_no_directory(open_store: Open, folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(UsageError, match="is a symbolic link"):
        open_store()
    folder.unlink()
    folder.write_text("x")
    with pytest.raises(UsageError, match="Not a directory"):
        open_store()
    assert list(elsewhere.iterdir()) == []


def test_a_second_process_gets_a_clear_error(open_store: Open, folder: Path) -> None:
    child = _child(folder, -1)
    assert child.stdout is not None
    assert child.stdout.readline() == "READY\n"
    try:
        with pytest.raises(UsageError, match="is in use by another server"):
            open_store(lock_seconds=0.2)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    # A killed one leaves no lock behind.
    open_store(lock_seconds=0.0)
    with pytest.raises(UsageError, match="is in use by another server"):
        open_store(lock_seconds=0.0)


def test_closing_writes_what_waits_and_ends(open_store: Open) -> None:
    store = open_store()
    for i in range(20):
        put(store, (), (i,))
    store.close(PATIENCE)
    assert not put(store, (), (99,))
    assert store.read(key_of(1)) is None
    store.close()
    assert open_store().stats().num_nodes == 20


def test_closing_does_not_wait_for_a_slow_disk(
    open_store: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def slow(*args: object) -> int:
        time.sleep(0.05)
        return real(*args)

    monkeypatch.setattr(prefix_folder.os, "write", slow)
    # What has begun is given up between two pieces; a machine may pause within one.
    monkeypatch.setattr(prefix_writer, "_ABANDON_SECONDS", PATIENCE)
    store = open_store()
    for i in range(500):
        put(store, (), (i,))
    while not files(folder):
        time.sleep(0.01)
    store.close(seconds=0.3)
    assert len(files(folder)) < 100
    assert files(folder, "*.tmp") == []
    assert open_store(fingerprint=FINGERPRINT).stats().num_unfit == 0


def test_salts_do_not_share_and_are_not_written(open_store: Open, folder: Path) -> None:
    salt = "the user's own secret"
    store = open_store()
    mine = root_key(salt)
    assert put(store, (), (1,))
    assert mine != ROOT
    assert store.put(extend_key(mine, [1]), mine, mine, [1], payload((1,)))
    assert store.flush(PATIENCE)
    assert len(files(folder)) == 2
    assert all(salt.encode() not in f.read_bytes() for f in files(folder))
    store.remove_under(mine)
    assert store.flush(PATIENCE)
    assert len(files(folder)) == 1
