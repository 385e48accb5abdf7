"""Damaged source files are named; tensors of a whole one are read in slices."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.convert.files import SafetensorsFile
from mlx_mtp.errors import CheckpointError
from tests.convert.checkpoints import to_fp8, write_file


def with_header(**changes: object) -> bytes:
    entry = {"dtype": "U8", "shape": [4, 6], "data_offsets": [0, 24], **changes}
    header = json.dumps({"x": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(24)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", (500).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"),
        *(with_header()[:-1], with_header(data_offsets=[0, 400]), with_header(data_offsets=[0])),
    ],
)
def test_damaged_and_short_files_are_refused_by_name(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated, damaged or not") as caught:
        SafetensorsFile(path)
    assert f"{path} ({len(content)} bytes)" in str(caught.value)


def test_a_file_that_is_not_there_or_shrinks(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(path)
    path.write_bytes(with_header())
    tensor = SafetensorsFile(path).tensors["x"]
    path.write_bytes(with_header()[:-5])
    with pytest.raises(CheckpointError, match="truncated while"):
        tensor.read()


@pytest.mark.parametrize("shape", [(300, 260), (1, 5), (3, 150, 130)])
@pytest.mark.parametrize("scale_type", [mx.bfloat16, mx.float32])
def test_fp8_blocks_that_do_not_divide_a_matrix(tmp_path, shape, scale_type):
    codes, scales, meant = to_fp8(np.random.default_rng(0).standard_normal(shape), 128)
    path = tmp_path / "a.safetensors"
    stored = {"w": codes, "w_scale_inv": scales.astype(scale_type), "typed": scales.view(mx.uint16)}
    write_file(path, stored)
    tensors = SafetensorsFile(path).tensors
    tensor = tensors["w"].with_scales(tensors["w_scale_inv"], (128, 128))
    if len(shape) == 3:
        tensor, meant = tensor.part(1, 3), meant[1:3]
    assert mx.array_equal(tensor.read(), meant.astype(mx.bfloat16))
    for wrong, block, match in (
        (tensors["typed"], 128, "U16"),
        (tensors["w_scale_inv"], 2, "should be"),
        (None, 128, "is FP8 and has no w_scale_inv"),
    ):
        with pytest.raises(CheckpointError, match=match):
            tensors["w"].with_scales(wrong, (block, block))
