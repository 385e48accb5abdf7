"""Damaged source files are named; tensors of a whole one are read in slices."""

import re

import mlx.core as mx
import pytest

from mlx_mtp.convert.files import SafetensorsFile
from mlx_mtp.errors import CheckpointError
from tests.convert.checkpoints import write_file


def test_damaged_and_short_files_are_refused_by_name(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(path)
    write_file(path, {"x": mx.zeros(6)})
    whole = path.read_bytes()
    tensor = SafetensorsFile(path).tensors["x"]
    for content in (b"", whole[:5], (500).to_bytes(8, "little") + b"{}", whole[:-1]):
        path.write_bytes(content)
        found = re.escape(f"{path} ({len(content)} bytes) is truncated, damaged or not")
        with pytest.raises(CheckpointError, match=found):
            SafetensorsFile(path)
    with pytest.raises(CheckpointError, match="truncated while"):
        tensor.read()
