"""Every layout of a source gives the reference's head, bit for bit."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.models.head_weights import HeadTensors, to_mlx
from tests.convert.conftest import LAYOUT
from tests.support.checkpoints import (
    TYPES,
    encode_all,
    expected_head,
    is_norm,
    write_file,
    write_source,
    write_target,
)
from tests.support.tiny_models import FAMILIES, Layout, hf_tensors

PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")
STORAGES = ("BF16", "F16", "F32", "FP8")
SETTINGS = [
    *[(2, 64, "affine"), (3, 32, "affine"), (4, 32, "affine"), (6, 64, "affine")],
    *[(8, 32, "affine"), (4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")],
]


def check(got: dict[str, mx.array], expected: dict[str, mx.array], storage: str = "BF16") -> None:
    """Check that norms are float32, FP16 stays FP16, and the rest is rounded to BF16 once."""
    assert got.keys() == expected.keys()
    dtype = mx.float16 if storage == "F16" else mx.bfloat16
    for name, values in expected.items():
        wanted = values if is_norm(name) else values.astype(dtype)
        assert got[name].dtype == wanted.dtype, name
        assert mx.array_equal(got[name], wanted), name


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_unquantized_head_equals_the_reference(pair, family, stacked, storage):
    prefix = PREFIXES[(FAMILIES.index(family) + STORAGES.index(storage)) % 4]
    layout = Layout(family, stacked_experts=stacked, head_prefix=prefix)
    meant = pair.write(layout, storage)
    check(pair.convert(), expected_head(meant, prefix), storage)
    assert pair.metadata()["bits"] == "16"


@pytest.mark.parametrize(("number", "setting"), enumerate(SETTINGS), ids=str)
def test_a_quantized_head_is_what_mx_quantize_makes_of_the_reference(pair, number, setting):
    """Each setting is combined with a different family, storage type and layout of experts."""
    table = dict(zip(("bits", "group_size", "mode"), setting))
    storage = STORAGES[number % 4]
    layout = Layout(FAMILIES[number % 3], stacked_experts=number % 2 == 1)
    expected = expected_head(pair.write(layout, storage, table))
    got = pair.convert()
    said = json.loads(pair.metadata()["quantization"])
    for name, values in expected.items():
        stem, own = name.removesuffix(".weight"), table
        if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            own = {"bits": 8, "group_size": 64, "mode": "affine"}
        if is_norm(name) or values.shape[-1] % own["group_size"]:
            assert stem not in said
            continue
        assert said[stem] == own
        parts = mx.quantize(values.astype(TYPES[storage if storage == "F16" else "BF16"]), **own)
        for part, value in zip(("weight", "scales", "biases"), parts):
            found = got.pop(f"{stem}.{part}")
            assert found.dtype == value.dtype
            assert mx.array_equal(found, value), f"{stem}.{part}"
    assert not [name for name in got if name.endswith((".scales", ".biases"))]


@pytest.mark.parametrize("flags", [{}, {"bits": 16}, {"bits": 8, "group_size": 32}])
def test_a_packed_mlx_head_is_taken_over_or_packed_again(pair, tmp_path, flags):
    packed = pair.convert()
    pair.source, pair.target = pair.target, write_target(tmp_path / "second", LAYOUT)
    got = pair.convert(flags=flags)
    fc = mx.dequantize(*(packed[f"fc.{part}"] for part in ("weight", "scales", "biases")))
    if flags.get("bits", 4) == 4:
        assert got.keys() == packed.keys()
        assert all(mx.array_equal(got[name], value) for name, value in packed.items())
    elif flags["bits"] == 16:
        assert not [name for name in got if name.endswith((".scales", ".biases"))]
        assert mx.array_equal(got["fc.weight"], fc)
    else:
        router = "layers.0.mlp.gate.weight"
        assert mx.array_equal(got[router], packed[router])
        assert mx.array_equal(got["fc.weight"], mx.quantize(fc, group_size=32, bits=8)[0])


def test_experts_are_ordered_by_their_numbers(pair):
    """Two-digit numbers decide, although the names in the file are in another order."""
    tensors, random = hf_tensors(LAYOUT), np.random.default_rng(1)
    mlp = "mtp.layers.0.mlp."
    for part, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        for expert in range(19):
            values = random.standard_normal(shape).astype(np.float32)
            tensors[f"{mlp}experts.{expert}.{part}.weight"] = values
    tensors[f"{mlp}gate.weight"] = random.standard_normal((19, 64)).astype(np.float32)
    stored, meant = encode_all(tensors)
    pair.write(LAYOUT, num_experts=19)
    write_target(pair.target, LAYOUT, num_experts=19)
    write_file(pair.source / "model.safetensors", stored)
    check(pair.convert(), expected_head(meant))
    # The loader gives the same head if the source is served unconverted.
    head = {name.removeprefix("mtp."): value for name, value in meant.items() if "mtp." in name}
    served = to_mlx(HeadTensors(head, "hf", "test"))
    assert all(mx.array_equal(served[name], v) for name, v in expected_head(meant).items())


@pytest.mark.parametrize("where", ["shards", "beside the trunk", "alone"])
def test_only_the_files_with_the_head_are_read(pair, where):
    meant = pair.write(LAYOUT, shards=4)
    (pair.source / "model-00001-of-00004.safetensors").unlink()
    if where != "shards":
        for path in pair.source.iterdir():
            path.unlink()
        if where == "beside the trunk":
            write_source(pair.source, Layout("qwen3_next", with_head=False), shards=3)
        stored, meant = encode_all(hf_tensors(LAYOUT))
        own = {name: value for name, value in stored.items() if name.startswith("mtp.")}
        write_file(pair.source / "mtp.safetensors", own)
    check(pair.convert(), expected_head(meant))
