"""Rows of matrices read a few at a time are what reading all of them gives."""

from __future__ import annotations

import contextlib

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.convert.rows import E4M3, Fp8Rows, PackedRows, PlainRows, Setting, StoredTensor
from mlx_mtp.convert.safetensors_file import SafetensorsFile
from mlx_mtp.errors import CheckpointError
from tests.convert.checkpoints import (
    Raw,
    bf16,
    e4m3_value,
    encode,
    from_bf16,
    to_fp8,
    write_file,
)

RANDOM = np.random.default_rng(0)


@pytest.fixture
def stored(tmp_path):
    """Puts tensors into a file, which is closed at the end."""
    with contextlib.ExitStack() as stack:

        def put(tensors: dict[str, Raw]) -> dict[str, StoredTensor]:
            path = tmp_path / "file.safetensors"
            write_file(path, tensors, {})
            file = stack.enter_context(SafetensorsFile(path))
            return {name: StoredTensor(file, info) for name, info in file.tensors.items()}

        yield put


def floats(values: mx.array) -> np.ndarray:
    return np.array(values.astype(mx.float32))


def test_e4m3_table_is_the_definition():
    expected = np.array([e4m3_value(code) for code in range(256)], dtype=np.float32)
    np.testing.assert_array_equal(E4M3, expected)
    assert E4M3[0x7E] == 448
    assert E4M3[1] == 2.0**-9
    theirs = mx.from_fp8(mx.arange(256).astype(mx.uint8), dtype=mx.float32)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.array(theirs)[finite], expected[finite])


@pytest.mark.parametrize("shape", [(300, 260), (128, 128), (1, 5), (3, 150, 130)])
@pytest.mark.parametrize("scale_type", ["BF16", "F32"])
def test_fp8_rows_at_any_cut(stored, shape, scale_type):
    """Blocks that don't divide the matrix, a leading axis, and cuts inside of blocks."""
    codes, scales, meant = to_fp8(RANDOM.standard_normal(shape).astype(np.float32), 128)
    told = Raw("BF16", scales) if scale_type == "BF16" else Raw("F32", from_bf16(scales))
    tensors = stored({"w": Raw("F8_E4M3", codes), "s": told})
    rows = Fp8Rows(tensors["w"], tensors["s"], (128, 128))
    expected = from_bf16(bf16(meant)).reshape(-1, shape[-1])
    count = len(expected)
    for start, stop in [(0, count), (0, 1), (count // 3, count // 3 * 2 + 1), (count - 1, count)]:
        got = rows.read(start, stop)
        assert got.dtype == mx.bfloat16
        np.testing.assert_array_equal(floats(got), expected[start:stop])


def test_fp8_scales_that_do_not_fit_are_refused_with_both_shapes(stored):
    codes, scales, _ = to_fp8(RANDOM.standard_normal((300, 260)).astype(np.float32), 128)
    tensors = stored(
        {
            "w": Raw("F8_E4M3", codes),
            "short": Raw("BF16", scales[:2]),
            "typed": Raw("U16", scales),
        },
    )
    with pytest.raises(CheckpointError, match=r"\(2, 3\).*should be \(3, 3\)"):
        Fp8Rows(tensors["w"], tensors["short"], (128, 128))
    with pytest.raises(CheckpointError, match="U16"):
        Fp8Rows(tensors["w"], tensors["typed"], (128, 128))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("storage", ["BF16", "F16", "F32"])
def test_plain_rows(stored, storage, exact):
    values = RANDOM.standard_normal((2, 7, 6)).astype(np.float32)
    rows = PlainRows(stored({"w": encode(values, storage)})["w"], exact=exact)
    flat = values.reshape(-1, 6)[3:11]
    if storage == "F16":
        expected = flat.astype(np.float16)
    elif storage == "F32" and exact:
        expected = flat
    else:
        expected = from_bf16(bf16(flat))
    np.testing.assert_array_equal(floats(rows.read(3, 11)), expected)


@pytest.mark.parametrize("setting", [Setting(4, 32), Setting(6, 64), Setting(4, 16, "nvfp4")])
def test_packed_rows_unpack_to_what_mlx_says(stored, setting):
    values = mx.array(RANDOM.standard_normal((3, 5, 128))).astype(mx.bfloat16)
    parts = setting.quantize(values)
    names = ["w", "scales", "biases"][: len(parts)]
    raws = {}
    for name, part in zip(names, parts):
        dtype = {mx.uint32: "U32", mx.uint8: "U8", mx.bfloat16: "BF16"}[part.dtype]
        view = part.view(mx.uint16) if part.dtype == mx.bfloat16 else part
        raws[name] = Raw(dtype, np.array(view))
    tensors = stored(raws)
    rows = PackedRows(tensors["w"], tensors["scales"], tensors.get("biases"), setting)
    assert rows.shape == (3, 5, 128)
    expected = setting.dequantize(parts, mx.bfloat16).reshape(15, 128)
    np.testing.assert_array_equal(floats(rows.read(4, 12)), floats(expected[4:12]))
