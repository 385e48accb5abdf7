"""Damaged files are told apart and named; whole ones are read a slice at a time."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_mtp.convert.safetensors_file import SafetensorsFile
from mlx_mtp.convert.writer import SafetensorsWriter, TensorSpec
from mlx_mtp.errors import CheckpointError
from tests.convert.checkpoints import Raw, write_file


def test_slices_and_their_digest(tmp_path):
    path = tmp_path / "a.safetensors"
    values = np.arange(24, dtype=np.uint8).reshape(4, 6)
    write_file(path, {"x": Raw("U8", values)}, {"said": "so"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"said": "so"}
        assert file.tensors["x"].shape == (4, 6)
        np.testing.assert_array_equal(file.read(file.tensors["x"], 6, 18), np.arange(6, 18))
        assert file.digest.hexdigest() == hashlib.sha256(bytes(range(6, 18))).hexdigest()


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [4, 6], "data_offsets": [0, 24], **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header would be 0 bytes"),
        (b"\xff" * 16, "not a safetensors file"),
        ((500).to_bytes(8, "little") + b"{}", "truncated.*508"),
        ((4).to_bytes(8, "little") + b"nope", "damaged header"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path, content, message):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_offsets": [0, 400]}, r"truncated: it should hold at least 4\d\d bytes"),
        ({"data_offsets": [0, 12]}, "takes 24 bytes, the header says 12"),
        ({"shape": None}, "damaged header: x"),
        ({"data_offsets": [0]}, "damaged header: x"),
    ],
)
def test_headers_that_contradict_the_file(tmp_path, changes, message):
    path = tmp_path / "a.safetensors"
    header = json.dumps({"x": entry(**changes)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path):
    path = tmp_path / "a.safetensors"
    write_file(path, {"x": Raw("U8", np.zeros((4, 6), np.uint8))}, {})
    with SafetensorsFile(path) as file:
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(CheckpointError, match="truncated"):
            file.read(file.tensors["x"])


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(tmp_path / "a.safetensors")


def test_rows_may_be_written_in_any_order_and_the_header_last(tmp_path):
    specs = [TensorSpec("bytes", "U8", (3,)), TensorSpec("words", "U32", (2, 2, 3))]
    path = tmp_path / "b.safetensors"
    words = np.arange(12, dtype=np.uint32).reshape(4, 3)
    with path.open("xb") as file:
        writer = SafetensorsWriter(file, specs, {"sum": "0000"})
        writer.write("words", 2, words[2:].view(np.uint8))
        writer.write("bytes", 0, np.array([7, 8, 9], np.uint8))
        writer.write("words", 0, words[:2].view(np.uint8))
        writer.finish({"sum": "1234"})
    loaded = load_file(path)
    np.testing.assert_array_equal(loaded["mtp.words"], words.reshape(2, 2, 3))
    np.testing.assert_array_equal(loaded["mtp.bytes"], [7, 8, 9])
    with SafetensorsFile(path) as reread:
        assert reread.metadata == {"sum": "1234"}
        # Wide types begin at multiples of their size, whatever the order asked for.
        assert reread.tensors["mtp.words"].offset % 8 == 0


def test_a_write_beyond_its_tensor_is_a_bug_here(tmp_path):
    with (tmp_path / "b.safetensors").open("xb") as file:
        writer = SafetensorsWriter(file, [TensorSpec("x", "U8", (2, 3))], {})
        with pytest.raises(AssertionError):
            writer.write("x", 1, np.zeros(4, np.uint8))
