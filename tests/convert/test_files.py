"""Damaged source files are named; tensors of a whole one are read in slices."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.convert.tensors import SafetensorsFile
from mlx_mtp.errors import CheckpointError
from tests.convert.checkpoints import Raw, bf16, from_bf16, to_fp8, write_file

RANDOM = np.random.default_rng(0)


def with_header(**changes: object) -> bytes:
    entry = {"dtype": "U8", "shape": [4, 6], "data_offsets": [0, 24], **changes}
    header = json.dumps({"x": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(24)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff" * 16, (500).to_bytes(8, "little") + b"{}"),
        *((4).to_bytes(8, "little") + b"nope", (2).to_bytes(8, "little") + b"[]"),
        *(with_header()[:-1], with_header(data_offsets=[0, 400]), with_header(shape=None)),
        *(with_header(data_offsets=[0, 12]), with_header(data_offsets=[0])),
    ],
)
def test_damaged_and_short_files_are_refused_by_name(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated, damaged or not") as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert f"{len(content)} bytes" in str(caught.value)


def test_a_file_that_is_not_there_or_shrinks(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(path)
    path.write_bytes(with_header())
    tensor = SafetensorsFile(path).tensors["x"]
    path.write_bytes(with_header()[:-5])
    with pytest.raises(CheckpointError, match="truncated while"):
        tensor.read()


@pytest.mark.parametrize("shape", [(300, 260), (128, 128), (1, 5), (3, 150, 130)])
@pytest.mark.parametrize("scale_type", ["BF16", "F32"])
def test_fp8_blocks_that_do_not_divide_a_matrix(tmp_path, shape, scale_type):
    codes, scales, meant = to_fp8(RANDOM.standard_normal(shape).astype(np.float32), 128)
    stored = Raw("BF16", scales) if scale_type == "BF16" else Raw("F32", from_bf16(scales))
    path = tmp_path / "a.safetensors"
    write_file(path, {"w": Raw("F8_E4M3", codes), "s": stored, "typed": Raw("U16", scales)}, {})
    tensors = SafetensorsFile(path).tensors
    tensor = tensors["w"].with_scales(tensors["s"], (128, 128))
    if len(shape) == 3:
        tensor, meant = tensor.part(1, 3), meant[1:3]
    got = tensor.read()
    assert got.dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(got.astype(mx.float32)), from_bf16(bf16(meant)))
    with pytest.raises(CheckpointError, match="U16"):
        tensors["w"].with_scales(tensors["typed"], (128, 128))
    with pytest.raises(CheckpointError, match="should be"):
        tensors["w"].with_scales(tensors["s"], (64, 2))
