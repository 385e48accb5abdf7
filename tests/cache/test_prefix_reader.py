"""The thread that reads a store's files: what was asked for comes, is bounded by who asks, and is
dropped when nobody wants it."""

from __future__ import annotations

import threading

import pytest

from mlx_mtp.cache import prefix_reader
from mlx_mtp.cache.prefix_file import NodeHeader, StoredNode
from mlx_mtp.cache.prefix_reader import PrefixReader
from tests.cache.stored_nodes import PATIENCE, Open, check_whole, files, key_of, put


def node(key: str) -> StoredNode:
    return StoredNode(NodeHeader(key, "", "", "", b"", {}, {}), {})


class Disk:
    """Reads keys, but waits in each until it may go on."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.began, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.reader = PrefixReader(self)
        self.reader.on_done = self.ended.release

    def __call__(self, key: str, go_on) -> StoredNode | None:
        self.read.append(key)
        self.began.release()
        assert self.go_on.acquire(timeout=PATIENCE)
        go_on()
        if key == "bad":
            raise RuntimeError("a bug")
        return None if key == "gone" else node(key)

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self.go_on.release()

    def wait(self) -> None:
        assert self.ended.acquire(timeout=PATIENCE)


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(prefix_reader, "_STOP_SECONDS", PATIENCE)
    made = Disk()
    yield made
    made.reader.stop()
    made.let(10)
    assert made.reader.ended()


def test_what_is_asked_for_comes_in_order_once_and_counts_until_it_is_taken(disk: Disk) -> None:
    reader = disk.reader
    assert reader.done
    for key, nbytes in (("a", 5), ("gone", 7), ("bad", 1), ("b", 2), ("a", 5)):
        reader.ask(key, nbytes)
    assert reader.nbytes == 15
    assert not reader.done
    disk.let(4)
    disk.wait()
    assert reader.done
    assert disk.read == ["a", "gone", "bad", "b"]
    assert reader.nbytes == 15
    assert reader.take("a").header.key == "a"
    assert reader.nbytes == 10
    assert reader.take("gone") is reader.take("bad") is reader.take("never asked") is None
    assert reader.take("b").header.key == "b"
    assert (reader.nbytes, reader.asked("a"), reader.done) == (0, False, True)


def test_a_read_that_is_forgotten_is_given_up_and_can_be_asked_for_again(disk: Disk) -> None:
    reader = disk.reader
    reader.ask("a", 5)
    reader.ask("b", 5)
    assert disk.began.acquire(timeout=PATIENCE)
    reader.forget()
    assert reader.nbytes == 0
    reader.ask("c", 1)
    disk.let()  # a: ends when it is seen that nobody wants it
    assert disk.began.acquire(timeout=PATIENCE)
    assert disk.read == ["a", "c"]
    reader.forget()
    reader.ask("d", 1)
    reader.ask("c", 1)
    disk.let(3)
    disk.wait()
    # The read of c, which was under way, served the second question too.
    assert disk.read == ["a", "c", "d"]
    assert reader.take("c").header.key == "c"
    assert reader.take("d").header.key == "d"


def test_a_file_that_takes_too_long_is_told(disk: Disk, monkeypatch) -> None:
    assert not disk.reader.hangs
    disk.reader.ask("a", 5)
    assert disk.began.acquire(timeout=PATIENCE)
    assert not disk.reader.hangs
    monkeypatch.setattr(prefix_reader, "READ_SECONDS", -1.0)
    assert disk.reader.hangs
    disk.let()
    disk.wait()
    assert not disk.reader.hangs


def test_stopping_ends_a_read_and_does_not_wait_for_one_that_hangs(monkeypatch) -> None:
    disk = Disk()
    disk.reader.ask("a", 5)
    assert disk.began.acquire(timeout=PATIENCE)
    monkeypatch.setattr(prefix_reader, "_STOP_SECONDS", 0.05)
    disk.reader.stop()
    assert not disk.reader.ended()
    monkeypatch.setattr(prefix_reader, "_STOP_SECONDS", PATIENCE)
    disk.let()
    assert disk.reader.ended()
    disk.reader.ask("b", 5)
    assert disk.reader.nbytes == 0
    never = PrefixReader(disk)
    never.stop()
    assert never.ended()


def test_a_store_reads_ahead_what_it_has_and_what_waits_to_be_written(open_store: Open) -> None:
    store = open_store()
    assert put(store, (), (1,))
    assert put(store, (1,), (2,))
    done = threading.Event()
    store.reader.on_done = done.set
    for key in (key_of(1), key_of(1, 2), key_of(9)):
        store.reader.ask(key, store.size(key))
    # It is told whenever nothing is left: that may be before the next key is asked for.
    while not store.reader.done:
        assert done.wait(PATIENCE)
        done.clear()
    check_whole(store.reader.take(key_of(1)), (1,))
    check_whole(store.reader.take(key_of(1, 2)), (1, 2))
    assert store.reader.take(key_of(9)) is None


def test_between_two_pieces_a_read_can_be_ended(open_store: Open, folder) -> None:
    """Nothing is removed for that."""
    store = open_store()
    put(store, (), (1,), nbytes=9 << 20)
    assert store.flush(PATIENCE)
    pieces = 0

    def go_on() -> None:
        nonlocal pieces
        pieces += 1
        if pieces == 2:
            raise LookupError

    with pytest.raises(LookupError):
        store.read(key_of(1), go_on)
    assert len(files(folder)) == 1
    check_whole(store.read(key_of(1)), (1,), 9 << 20)
