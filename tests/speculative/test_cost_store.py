"""The table between runs: written in one go, checked when read, never in the way of a start."""

from __future__ import annotations

import json
import os

import pytest

from mlx_mtp.engine import calibration as cost_store
from mlx_mtp.engine.calibration import CostFile

TABLE = {1: {0: 0.01, 3: 0.02}, 16: {0: 0.05}}


def test_what_is_saved_comes_back_and_leaves_nothing_else(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    store = CostFile(folder, "a" * 64)
    assert store.load() == {}
    store.save(TABLE)
    assert CostFile(folder, "a" * 64).load() == TABLE
    assert os.listdir(folder) == [store.path.name]
    store.save({1: {0: 0.5}})
    assert store.load() == {1: {0: 0.5}}


def test_another_model_or_machine_has_another_file(tmp_path):
    CostFile(tmp_path, "a" * 64).save(TABLE)
    assert CostFile(tmp_path, "b" * 64).load() == {}


def spoil(**fields):
    def change(text: str) -> str:
        return json.dumps(json.loads(text) | fields)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: "[" * 100_000,
        lambda text: "null",
        lambda text: "{}",
        spoil(format=0),
        spoil(fingerprint="c" * 64),
        spoil(saved_at="yesterday"),
        spoil(saved_at=0.0),
        spoil(saved_at=1e12),
        spoil(seconds=[]),
        spoil(seconds={"1": 3}),
        spoil(seconds={"one": {"0": 1.0}}),
        spoil(seconds={"0": {"0": 1.0}}),
        spoil(seconds={"1": {"-1": 1.0}}),
        spoil(seconds={"1": {"0": 0.0}}),
        spoil(seconds={"1": {"0": float("nan")}}),
        spoil(seconds={"1": {"0": float("inf")}}),
        spoil(seconds={"1": {"0": "fast"}}),
    ],
)
def test_a_file_that_is_damaged_or_foreign_is_ignored_and_replaced(tmp_path, change, caplog):
    store = CostFile(tmp_path, "a" * 64)
    store.save(TABLE)
    store.path.write_text(change(store.path.read_text()))
    assert store.load() == {}
    assert str(store.path) in caplog.text
    store.save(TABLE)
    assert store.load() == TABLE


def test_bytes_that_are_no_text_and_a_folder_in_its_place_are_no_table(tmp_path):
    store = CostFile(tmp_path, "a" * 64)
    store.path.write_bytes(b"\xff\xfe\x00")
    assert store.load() == {}
    store.path.unlink()
    store.path.mkdir()
    assert store.load() == {}


def test_a_folder_that_cannot_be_written_is_warned_of_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    store = CostFile(tmp_path / "file" / "folder", "a" * 64)
    store.save(TABLE)
    store.save(TABLE)
    assert caplog.text.count("not kept") == 1
    assert store.load() == {}


def test_a_failed_save_leaves_the_old_table(tmp_path, monkeypatch):
    store = CostFile(tmp_path, "a" * 64)
    store.save(TABLE)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(cost_store.os, "replace", fail)
    store.save({1: {0: 9.0}})
    monkeypatch.undo()
    assert store.load() == TABLE
    assert os.listdir(tmp_path) == [store.path.name]
