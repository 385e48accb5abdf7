"""Damaged source files are named; tensors of a whole one are read in slices."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.convert.files import SafetensorsFile
from mlx_mtp.errors import CheckpointError
from tests.convert.checkpoints import to_fp8, write_file


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
