"""The prefix cache's disk store: what is put comes back whole, or not at all."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open

from mlx_mtp.cache import prefix_writer
from mlx_mtp.cache.prefix_arrays import to_mlx
from mlx_mtp.cache.prefix_folder import PrefixFolder, UnfinishedFile
from tests.cache.stored_nodes import (
    DTYPES,
    PATIENCE,
    ROOT,
    Open,
    check_whole,
    files,
    key_of,
    payload,
    put,
    same,
)


def test_every_dtype_comes_back_bit_by_bit(open_store: Open) -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for dtype in DTYPES:
        raw = mx.array(rng.integers(0, 256, size=(3, 4, 8 * 2), dtype=np.uint8))
        # All bit patterns, NaNs included; a bool has two.
        value = raw > 127 if dtype == mx.bool_ else raw.view(dtype)
        name = str(dtype)
        arrays |= {name: value, f"{name} strided": value.transpose(2, 0, 1)[::2]}
        arrays |= {f"{name} scalar": value[0, 0, 0], f"{name} empty": value[:, :0]}
    with mx.stream(mx.cpu):
        arrays["float64"] = mx.array(rng.normal(size=5), dtype=mx.float64)
    mx.eval(arrays)
    store = open_store()
    extra = {"next": "17", "why": "the end of a \"message\", 'é' \x00"}
    assert store.put(key_of(1, 2), ROOT, ROOT, [1, 2], arrays, extra=extra)
    assert store.flush(PATIENCE)
    store.close()

    again = open_store()
    (header,) = again.found
    assert (header.key, header.parent, header.root) == (key_of(1, 2), ROOT, ROOT)
    assert header.tokens == (1, 2)
    assert header.num_tokens == 2
    assert header.extra == extra
    node = again.read(key_of(1, 2))
    assert node is not None
    assert node.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert same(to_mlx(node.arrays[name]), array), name


def test_restart_finds_the_tree_parents_first(open_store: Open) -> None:
    store = open_store()
    paths = [(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 2, 3, 5, 6, 7), (9,)]
    befores = [0, 3, 3, 5, 0]
    for path, cut in zip(paths, befores, strict=True):
        assert put(store, path[:cut], path[cut:])
    store.close()

    again = open_store()
    assert {h.key for h in again.found} == {key_of(*path) for path in paths}
    seen = {ROOT}
    for header in again.found:
        assert header.parent in seen
        seen.add(header.key)
    for path in paths:
        check_whole(again.read(key_of(*path)), path)
    assert again.stats().num_nodes == 5
    assert again.stats().nbytes == sum(file.stat().st_size for file in files(again._folder.path))


def test_files_are_safetensors(open_store: Open, folder: Path) -> None:
    store = open_store()
    put(store, (), (1, 2))
    assert store.flush(PATIENCE)
    (file,) = files(folder)
    wanted = payload((1, 2))
    with safe_open(file, "numpy") as opened:
        assert set(opened.keys()) == wanted.keys()
        assert opened.metadata()["key"] == key_of(1, 2)
    loaded = mx.load(str(file))
    assert all(same(loaded[name], wanted[name]) for name in wanted)


def test_a_split_node_keeps_its_key(open_store: Open) -> None:
    """[1 2 3 4] becomes [1 2] and [3 4] below it, as a second branch leaves after 2."""
    store = open_store()
    put(store, (), (1, 2, 3, 4))
    put(store, (), (1, 2))
    assert put(store, (1, 2), (3, 4), replace=True)
    put(store, (1, 2), (8, 9))
    store.close()
    again = open_store()
    assert again.found[0].tokens == (1, 2)
    assert {h.tokens for h in again.found} == {(1, 2), (3, 4), (8, 9)}
    assert again.stats().num_nodes == 3
    check_whole(again.read(key_of(1, 2, 3, 4)), (1, 2, 3, 4))


def test_a_known_node_is_not_written_again(open_store: Open) -> None:
    store = open_store()
    assert put(store, (), (1,))
    assert put(store, (), (1,))
    assert store.flush(PATIENCE)
    assert put(store, (), (1,))
    assert store.flush(PATIENCE)
    assert store.stats().num_written == 1


def test_a_child_needs_its_parent(open_store: Open) -> None:
    store = open_store()
    assert not put(store, (1,), (2,))
    assert put(store, (), (1,))
    assert put(store, (1,), (2,))
    assert store.flush(PATIENCE)
    assert key_of(1, 2) in store


def test_remove_one_and_all_under_it(open_store: Open, folder: Path) -> None:
    store = open_store()
    for path, cut in [((1,), 0), ((1, 2), 1), ((1, 2, 3), 2), ((1, 4), 1), ((5,), 0)]:
        put(store, path[:cut], path[cut:])
    assert store.flush(PATIENCE)
    store.remove(key_of(1, 4))
    assert key_of(1, 4) not in store
    store.remove_under(key_of(1, 2))
    assert store.read(key_of(1, 2, 3)) is None
    assert store.flush(PATIENCE)
    assert len(files(folder)) == 2
    store.remove_under(ROOT)
    assert store.flush(PATIENCE)
    assert files(folder) == []
    assert store.stats().nbytes == 0


def test_what_is_removed_while_it_waits_is_never_written(
    open_store: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = _hold_writes(monkeypatch)
    store = open_store()
    put(store, (), (1,))
    assert began.wait(PATIENCE)
    put(store, (1,), (2,))
    put(store, (1, 2), (3,))
    put(store, (), (7,))
    store.remove_under(key_of(1))
    go_on.set()
    assert store.flush(PATIENCE)
    assert [f.name for f in files(folder)] == [f"mlx-mtp-prefix-{key_of(7)}.safetensors"]
    assert files(folder, "*.tmp") == []
    assert store.stats().queued_bytes == 0


def test_the_engine_never_waits_for_the_disk(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = _hold_writes(monkeypatch)
    store = open_store(max_queued_bytes=10_000)
    assert put(store, (), (0,))
    assert began.wait(PATIENCE)
    taken = [put(store, (), (i,)) for i in range(1, 20)]
    assert 1 <= sum(taken) <= 4
    assert store.stats().num_dropped == 19 - sum(taken)
    assert store.stats().queued_bytes <= 10_000
    # What is on its way is read from the queue.
    check_whole(store.read(key_of(1)), (1,))
    assert key_of(1) not in store
    assert store.holds(key_of(1))
    assert store.size(key_of(1)) >= 2048
    go_on.set()
    assert store.flush(PATIENCE)
    check_whole(store.read(key_of(1)), (1,))
    assert put(store, (), (19,))


@pytest.mark.parametrize("place", ["publish", "unlink", "make room"])
def test_a_disk_that_hangs_anywhere_does_not_hold_up_the_engine(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store = open_store(max_bytes=15_000)
    for first in range(3):
        put(store, (), (first,))
    assert store.flush(PATIENCE)
    hangs, go_on = threading.Event(), threading.Event()

    def hold(real: Callable[..., None]) -> Callable[..., None]:
        def held(*arguments: object) -> None:
            hangs.set()
            assert go_on.wait(PATIENCE)
            real(*arguments)

        return held

    if place == "publish":
        monkeypatch.setattr(UnfinishedFile, "publish", hold(UnfinishedFile.publish))
        put(store, (), (7,))
    else:
        monkeypatch.setattr(PrefixFolder, "remove", hold(PrefixFolder.remove))
    if place == "unlink":
        store.remove(key_of(0))
    elif place == "make room":
        put(store, (), (8,), nbytes=8_000)
    assert hangs.wait(PATIENCE)
    free = store._writer.lock.acquire(timeout=PATIENCE / 2)
    assert free, "the engine would wait for the disk"
    store._writer.lock.release()
    # What is removed just then is gone, on the disk too.
    store.remove(key_of(7))
    assert not store.holds(key_of(7))
    assert put(store, (), (9,))
    go_on.set()
    assert store.flush(PATIENCE)
    assert key_of(9) in store
    assert key_of(7) not in store
    assert len(files(store.path)) == store.stats().num_nodes
    assert sum(path.stat().st_size for path in files(store.path)) == store.stats().nbytes <= 15_000


def test_a_disk_that_hangs_does_not_hold_up_the_end(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    began, go_on = _hold_writes(monkeypatch)
    monkeypatch.setattr(prefix_writer, "_ABANDON_SECONDS", 0.1)
    store = open_store()
    put(store, (), (0,))
    assert began.wait(PATIENCE)
    store.close(0.1)
    assert "hangs" in caplog.text
    assert not store.holds(key_of(0))
    assert store.read(key_of(0)) is None
    go_on.set()
    # What it still does, and says, is not for the next test.
    store._writer._thread.join(PATIENCE)
    assert not store._writer._thread.is_alive()


def test_bounded_in_bytes_the_least_recently_used_goes_first(
    open_store: Open, folder: Path
) -> None:
    size = _file_size(open_store, folder)
    store = open_store(max_bytes=4 * size)
    put(store, (), (1,))
    put(store, (1,), (2,))  # Two nodes of one branch, then two more.
    put(store, (), (3,))
    put(store, (), (4,))
    assert store.flush(PATIENCE)
    assert store.stats().num_nodes == 4
    store.touch(key_of(1, 2))
    assert store.flush(PATIENCE)
    for i in range(5, 30):
        put(store, (), (i,))
        assert store.flush(PATIENCE)
        store.touch(key_of(1, 2))
        assert sum(f.stat().st_size for f in folder.iterdir()) <= 4 * size
    assert {f.stem[-64:] for f in files(folder)} == {
        key_of(1),
        key_of(1, 2),
        key_of(28),
        key_of(29),
    }
    # The whole of a longer branch than fits: its own ancestors are not thrown out for it.
    path = (1, 2)
    for i in range(3, 8):
        put(store, path, (i,))
        path = (*path, i)
    assert store.flush(PATIENCE)
    assert {key_of(*path[:n]) in store for n in range(1, 5)} == {True}
    assert key_of(*path[:5]) not in store
    assert store.stats().nbytes <= 4 * size


def test_nothing_goes_for_what_cannot_fit(open_store: Open, folder: Path) -> None:
    """A conversation that outgrew the directory leaves the others in peace, and keeps its start."""
    store = open_store(max_bytes=32_000)
    for first in (1, 2, 3):
        assert put(store, [], [first])
    assert put(store, [], [9], nbytes=16_000)
    assert store.flush(PATIENCE)
    put(store, [9], [10], nbytes=16_000)
    assert store.flush(PATIENCE)
    assert all(key_of(first) in store for first in (1, 2, 3, 9))
    assert key_of(9, 10) not in store
    assert store.stats().nbytes == sum(path.stat().st_size for path in files(folder)) <= 32_000


def test_recency_survives_a_restart(open_store: Open, folder: Path) -> None:
    size = _file_size(open_store, folder)
    store = open_store(max_bytes=3 * size)
    for i in (1, 2, 3):
        put(store, (), (i,))
    assert store.flush(PATIENCE)
    # The system's own times would be those of its last tick: one for files that it wrote together.
    said = sorted(path.stat().st_mtime_ns for path in files(folder))
    assert said == sorted(entry.used for entry in store._index)
    store.read(key_of(1))
    store.close()
    again = open_store(max_bytes=3 * size)
    put(again, (), (4,))
    assert again.flush(PATIENCE)
    assert [key_of(i) in again for i in (1, 2, 3, 4)] == [True, False, True, True]
    again.close()
    smaller = open_store(max_bytes=size)
    assert [h.tokens for h in smaller.found] == [(4,)]
    assert smaller.flush(PATIENCE)
    assert len(files(folder)) == 1


def test_larger_than_the_bound_is_not_taken(open_store: Open) -> None:
    store = open_store(max_bytes=1000)
    assert not put(store, (), (1,))
    assert store.stats().num_dropped == 1


@pytest.mark.parametrize("change", [{"fingerprint": "e" * 64}])
def test_another_fingerprint_empties_the_directory(
    open_store: Open, folder: Path, change: dict[str, str]
) -> None:
    store = open_store()
    put(store, (), (1,))
    store.close()
    (folder / "a file of the user's").write_text("stays")
    other = open_store(**change)
    assert other.found == []
    assert other.flush(PATIENCE)
    assert files(folder) == []
    assert (folder / "a file of the user's").read_text() == "stays"
    assert other.stats().num_unfit == 1


@pytest.mark.parametrize("place", ["header", "data", "cut", "gone", "longer"])
@pytest.mark.parametrize("when", ["before the start", "while it runs"])
def test_a_damaged_file_goes_with_all_that_builds_on_it(
    open_store: Open, folder: Path, place: str, when: str
) -> None:
    store = open_store()
    put(store, (), (1,))
    put(store, (1,), (2,))
    put(store, (1, 2), (3,))
    put(store, (), (9,))
    assert store.flush(PATIENCE)
    if when == "before the start":
        store.close()
    _damage(next(f for f in files(folder) if key_of(1, 2) in f.name), place)
    if when == "before the start":
        store = open_store()
    assert store.read(key_of(1, 2)) is None
    assert store.read(key_of(1, 2, 3)) is None
    assert store.flush(PATIENCE)
    check_whole(store.read(key_of(1)), (1,))
    check_whole(store.read(key_of(9)), (9,))
    assert len(files(folder)) == 2
    # The place is free again.
    assert put(store, (1,), (2,))
    assert store.flush(PATIENCE)
    check_whole(store.read(key_of(1, 2)), (1, 2))


def test_files_that_are_not_ours_are_left_alone(open_store: Open, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    ours = {
        f"mlx-mtp-prefix-{key_of(1)}.safetensors": b"garbage",
        f"mlx-mtp-prefix-{key_of(2)}.safetensors": b"",
        f"mlx-mtp-prefix-{key_of(3)}.0123abcd.tmp": b"killed",
        f"mlx-mtp-prefix-{key_of(4)}.safetensors": (9).to_bytes(8, "little") + b'{"a":"b"}',
    }
    others = {"model.safetensors": b"x", "mlx-mtp-prefix-1.safetensors": b"y", "a.tmp": b"z"}
    for name, content in (ours | others).items():
        (folder / name).write_bytes(content)
    victim = folder.parent / "victim"
    victim.write_bytes(b"v")
    (folder / f"mlx-mtp-prefix-{key_of(5)}.safetensors").symlink_to(victim)
    (folder / f"mlx-mtp-prefix-{key_of(6)}.safetensors").mkdir()
    store = open_store()
    assert store.found == []
    assert store.flush(PATIENCE)
    left = {f.name for f in folder.iterdir()}
    assert left == {*others, "mlx-mtp-prefix.lock", f"mlx-mtp-prefix-{key_of(6)}.safetensors"}
    assert victim.read_bytes() == b"v"
    # A directory in a node's place costs that node alone.
    put(store, (), (6,))
    put(store, (), (1,))
    assert store.flush(PATIENCE)
    assert key_of(6) not in store


def test_a_link_in_a_files_place_is_not_followed(open_store: Open, folder: Path) -> None:
    store = open_store()
    put(store, (), (1,))
    assert store.flush(PATIENCE)
    (file,) = files(folder)
    elsewhere = folder.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert store.read(key_of(1)) is None
    assert store.flush(PATIENCE)
    assert elsewhere.exists()
    assert not file.is_symlink()


def test_for_the_owner_alone(open_store: Open, folder: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store(path=folder / "deeper")
        put(store, (), (1,))
        assert store.flush(PATIENCE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "deeper").stat().st_mode) == 0o700
    modes = {stat.S_IMODE(f.stat().st_mode) for f in (folder / "deeper").iterdir()}
    assert modes == {0o600}


def test_an_error_in_the_writer_is_not_the_end(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, calls = prefix_writer.encode, []

    def broken(*args: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("a mistake of ours")
        return real(*args)

    monkeypatch.setattr(prefix_writer, "encode", broken)
    store = open_store()
    with caplog.at_level(logging.WARNING):
        put(store, (), (1,))
        assert store.flush(PATIENCE)
    assert "a mistake of ours" in caplog.text
    assert key_of(1) not in store
    put(store, (), (1,))
    assert store.flush(PATIENCE)
    assert key_of(1) in store


def _hold_writes(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Writes wait until the second event is set; the first says that one does."""
    began, go_on = threading.Event(), threading.Event()
    real = prefix_writer.UnfinishedFile.write

    def slow(self: object, pieces: object, used: int) -> int:
        began.set()
        assert go_on.wait(PATIENCE)
        return real(self, pieces, used)

    monkeypatch.setattr(prefix_writer.UnfinishedFile, "write", slow)
    return began, go_on


def _file_size(open_store: Open, folder: Path) -> int:
    """Of the largest file that `put` makes (token ids below 100)."""
    probe = open_store(path=folder.parent / "probe")
    put(probe, (), (1,))
    probe.close()
    (file,) = files(folder.parent / "probe")
    return file.stat().st_size


def _damage(path: Path, place: str) -> None:
    content = bytearray(path.read_bytes())
    if place == "gone":
        path.unlink()
        return
    if place == "longer":
        content += b"\0"
    elif place == "cut":
        del content[len(content) // 2 :]
    else:
        content[50 if place == "header" else -7] ^= 4
    path.write_bytes(content)
