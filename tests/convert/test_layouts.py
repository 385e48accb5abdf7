"""Every layout a source comes in gives the head that a NumPy reference gives, bit by bit."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.models.loader import load_model
from tests.convert.checkpoints import (
    Raw,
    bf16,
    decode,
    e4m3_value,
    encode_all,
    expected_head,
    from_bf16,
    is_norm,
    write_file,
    write_source,
    write_target,
)
from tests.tiny_models import FAMILIES, Layout, hf_tensors, write_checkpoint

PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")
STORAGES = ("BF16", "F16", "F32", "FP8")
SETTINGS = [
    *[(2, 64, "affine"), (3, 32, "affine"), (4, 32, "affine"), (6, 64, "affine")],
    *[(8, 32, "affine"), (4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")],
]
ROUTERS = ("mlp.gate.weight", "shared_expert_gate.weight")


def rounded(values: np.ndarray, storage: str) -> np.ndarray:
    """FP16 stays FP16; FP8 times its scale, and FP32, are rounded to BF16 once."""
    return values if storage == "F16" else from_bf16(bf16(values))


def check(got: dict[str, Raw], expected: dict[str, np.ndarray], storage: str) -> None:
    """Unquantized tensors are those of the reference."""
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        wanted = "F32" if is_norm(name) else "F16" if storage == "F16" else "BF16"
        assert got[name].dtype == wanted, name
        exact = values if is_norm(name) else rounded(values, storage)
        np.testing.assert_array_equal(decode(got[name]), exact, err_msg=name)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_unquantized_head_equals_the_reference(pair, family, stacked, storage):
    number = FAMILIES.index(family) + STORAGES.index(storage)
    prefix = PREFIXES[number % 4]
    layout = Layout(family, stacked_experts=stacked, head_prefix=prefix)
    meant = pair.write(layout, storage)
    check(pair.convert(), expected_head(meant, prefix), storage)
    assert pair.metadata()["bits"] == "16"


@pytest.mark.parametrize(("number", "setting"), enumerate(SETTINGS), ids=str)
def test_a_quantized_head_is_what_mx_quantize_makes_of_the_reference(pair, number, setting):
    """Each setting with another family, storage and layout of the experts."""
    bits, group_size, mode = setting
    table = {"bits": bits, "group_size": group_size, "mode": mode}
    storage = STORAGES[number % 4]
    layout = Layout(FAMILIES[number % 3], stacked_experts=number % 2 == 1)
    expected = expected_head(pair.write(layout, storage, table))
    pair.run()
    loaded = {k.removeprefix("mtp."): v for k, v in mx.load(str(pair.sidecar)).items()}
    said = json.loads(pair.metadata()["quantization"])
    for name, values in expected.items():
        stem, own = name.removesuffix(".weight"), table
        if name.endswith(ROUTERS):
            own = {"bits": 8, "group_size": 64, "mode": "affine"}
        if is_norm(name) or values.shape[-1] % own["group_size"]:
            assert stem not in said
            continue
        assert said[stem] == own
        matrix = mx.array(rounded(values, storage))
        matrix = matrix.astype(mx.float16 if storage == "F16" else mx.bfloat16)
        parts = mx.quantize(matrix, **own, stream=mx.cpu)
        for part, value in zip(("weight", "scales", "biases"), parts):
            got = loaded.pop(f"{stem}.{part}")
            assert got.dtype == value.dtype
            assert mx.array_equal(got, value), f"{stem}.{part}"
    assert not [name for name in loaded if name.endswith((".scales", ".biases"))]


@pytest.mark.parametrize("flags", [{}, {"bits": 4}, {"bits": 16}, {"bits": 8, "group_size": 32}])
def test_a_packed_mlx_head_is_taken_over_or_packed_again(pair, tmp_path, flags):
    packed = pair.convert()
    pair.source, pair.target = pair.target, write_target(tmp_path / "second", Layout("qwen3_next"))
    pair.sidecar = pair.target / "mtp.safetensors"
    got = pair.convert(flags=flags)
    words, *others = (mx.array(packed[f"fc.{p}"].bits) for p in ("weight", "scales", "biases"))
    fc = mx.dequantize(words, *(each.view(mx.bfloat16) for each in others))
    if flags.get("bits", 4) == 4:
        assert got.keys() == packed.keys()
        assert all(np.array_equal(got[name].bits, raw.bits) for name, raw in packed.items())
    elif flags["bits"] == 16:
        assert not [name for name in got if name.endswith((".scales", ".biases"))]
        np.testing.assert_array_equal(decode(got["fc.weight"]), np.array(fc.astype(mx.float32)))
    else:
        router = "layers.0.mlp.gate.weight"
        assert np.array_equal(got[router].bits, packed[router].bits)
        again = mx.quantize(fc, group_size=32, bits=8)
        assert np.array_equal(got["fc.weight"].bits, np.array(again[0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_head_is_loaded_beside_a_trunk(pair, family):
    meant = pair.write(Layout(family, dtype=mx.bfloat16))
    write_checkpoint(pair.target, Layout(family, with_head=False, dtype=mx.bfloat16))
    for bits in (16, 8):
        flags = {"bits": 8, "group_size": 32} if bits == 8 else {}
        got = pair.convert(flags=flags, force=True)
        parameters = dict(tree_flatten(load_model(pair.target, enable_mtp=True).head.parameters()))
        for name, values in expected_head(meant).items():
            loaded = np.array(parameters[name].astype(mx.float32))
            is_packed = f"{name.removesuffix('.weight')}.scales" in got
            near = 0.01 * np.abs(values).max() if is_packed else 0
            np.testing.assert_allclose(loaded, values, rtol=0, atol=near, err_msg=name)


def test_experts_are_ordered_by_their_numbers(pair):
    """Two digits, whose order in a file is not that of their numbers, in more than one slice."""
    tensors, random = hf_tensors(Layout("qwen3_next")), np.random.default_rng(1)
    mlp = "mtp.layers.0.mlp."
    for part, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        for expert in range(19):
            values = random.standard_normal(shape).astype(np.float32)
            tensors[f"{mlp}experts.{expert}.{part}.weight"] = values
    tensors[f"{mlp}gate.weight"] = random.standard_normal((19, 64)).astype(np.float32)
    raws, meant = encode_all(tensors, "BF16")
    pair.write(Layout("qwen3_next"), change={"num_experts": 19})
    write_target(pair.target, Layout("qwen3_next"), num_experts=19)
    ordered = {name: raws[name] for name in sorted(raws)}
    write_file(pair.source / "model.safetensors", ordered, {"format": "pt"})
    check(pair.convert(), expected_head(meant), "BF16")
    stacked = {name: raw for name, raw in ordered.items() if ".experts." not in name}
    up, gate, down = (
        np.stack([raws[f"{mlp}experts.{i}.{part}_proj.weight"].bits for i in range(19)])
        for part in ("up", "gate", "down")
    )
    stacked[f"{mlp}experts.gate_up_proj"] = Raw("BF16", np.concatenate([gate, up], axis=1))
    stacked[f"{mlp}experts.down_proj"] = Raw("BF16", down)
    write_file(pair.source / "model.safetensors", stacked, {"format": "pt"})
    check(pair.convert(force=True), expected_head(meant), "BF16")


@pytest.mark.parametrize("where", ["shards", "beside the trunk", "alone"])
def test_only_the_files_with_the_head_are_read(pair, where):
    meant = pair.write(Layout("qwen3_5"), shards=4)
    (pair.source / "model-00001-of-00004.safetensors").unlink()
    if where != "shards":
        raws, meant = encode_all(hf_tensors(Layout("qwen3_5")), "BF16")
        own = {name: raw for name, raw in raws.items() if name.startswith("mtp.")}
        for path in pair.source.iterdir():
            path.unlink()
        if where == "beside the trunk":
            write_source(pair.source, Layout("qwen3_5", with_head=False), shards=3)
        write_file(pair.source / "mtp.safetensors", own, {"format": "pt"})
    check(pair.convert(), expected_head(meant), "BF16")


def test_fp8_codes_are_those_of_the_definition():
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    expected = np.array([e4m3_value(code) for code in codes.tolist()], np.float32)
    np.testing.assert_array_equal(np.array(mx.from_fp8(mx.array(codes), mx.float32)), expected)
