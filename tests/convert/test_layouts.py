"""Every layout a source comes in gives the head that a direct NumPy reference gives, bit by bit."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.convert.add_head import Request, add_head
from mlx_mtp.convert.console import Console
from mlx_mtp.convert.quantization import Flags
from mlx_mtp.models.loader import load_model
from tests.convert.checkpoints import (
    Raw,
    affine,
    bf16,
    decode,
    encode_all,
    expected_head,
    from_bf16,
    is_norm,
    read_file,
    unpack,
    write_file,
    write_source,
    write_target,
)
from tests.tiny_models import FAMILIES, Layout, hf_tensors, write_checkpoint

AFFINE = {"group_size": 32, "bits": 4, "mode": "affine"}
PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")


def convert(tmp_path: Path, **options: object) -> tuple[dict[str, Raw], dict[str, str]]:
    """Run the converter; the sidecar's tensors without their prefix, and its metadata."""
    request = Request(str(tmp_path / "target"), str(tmp_path / "source"), **options)
    add_head(request, Console())
    tensors, metadata = read_file(tmp_path / "target" / "mtp.safetensors")
    assert all(name.startswith("mtp.") for name in tensors)
    return {name.removeprefix("mtp."): raw for name, raw in tensors.items()}, metadata


@pytest.mark.parametrize("storage", ["BF16", "F16", "F32", "FP8"])
@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_unquantized_head_equals_the_reference(tmp_path, family, stacked, storage):
    layout = Layout(family, stacked_experts=stacked)
    meant = write_source(tmp_path / "source", layout, storage)
    write_target(tmp_path / "target", layout)
    got, _ = convert(tmp_path)
    expected = expected_head(meant)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        if is_norm(name):
            assert got[name].dtype == "F32"
            wanted = values
        else:
            # FP16 stays FP16; FP8 times its scale, and FP32, are rounded to BF16 once.
            assert got[name].dtype == ("F16" if storage == "F16" else "BF16")
            wanted = values if storage == "F16" else from_bf16(bf16(values))
        np.testing.assert_array_equal(decode(got[name]), wanted, err_msg=name)


@pytest.mark.parametrize("storage", ["BF16", "FP8"])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_head_equals_the_reference(tmp_path, family, prefix, storage):
    layout = Layout(family, head_prefix=prefix, stacked_experts=prefix != "mtp.")
    meant = write_source(tmp_path / "source", layout, storage)
    write_target(tmp_path / "target", layout, AFFINE)
    got, metadata = convert(tmp_path)
    assert (metadata["bits"], metadata["group_size"], metadata["mode"]) == ("4", "32", "affine")
    for name, values in expected_head(meant, prefix).items():
        if is_norm(name):
            np.testing.assert_array_equal(got[name].bits, values, err_msg=name)
            continue
        stem = name.removesuffix(".weight")
        router = name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        bits, group_size = (8, 64) if router else (4, 32)
        codes, scales, biases = affine(from_bf16(bf16(values)), bits, group_size)
        np.testing.assert_array_equal(unpack(got[name].bits, bits), codes, err_msg=name)
        np.testing.assert_array_equal(got[f"{stem}.scales"].bits, scales, err_msg=name)
        np.testing.assert_array_equal(got[f"{stem}.biases"].bits, biases, err_msg=name)


@pytest.mark.parametrize(
    ("bits", "group_size", "mode"),
    [
        *[(2, 64, "affine"), (3, 32, "affine"), (5, 64, "affine"), (6, 64, "affine")],
        *[(8, 32, "affine"), (4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")],
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mode_packs_as_mx_quantize_does(tmp_path, family, bits, group_size, mode):
    layout = Layout(family)
    meant = write_source(tmp_path / "source", layout)
    write_target(
        tmp_path / "target", layout, {"group_size": group_size, "bits": bits, "mode": mode}
    )
    got, _ = convert(tmp_path)
    loaded = mx.load(str(tmp_path / "target" / "mtp.safetensors"))
    for name, values in expected_head(meant).items():
        stem = name.removesuffix(".weight")
        router = name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        if is_norm(name) or router:
            continue
        if values.shape[-1] % group_size:
            assert got[name].dtype == "BF16"
            continue
        matrix = mx.array(values).astype(mx.bfloat16)
        parts = mx.quantize(matrix, group_size, bits, mode, stream=mx.cpu)
        names = [name, f"{stem}.scales", f"{stem}.biases"]
        for part, value in zip(names, parts):
            assert mx.array_equal(loaded[f"mtp.{part}"], value), part
        assert (f"{stem}.biases" in got) == (len(parts) == 3)


@pytest.mark.parametrize("quantization", [None, AFFINE])
@pytest.mark.parametrize("family", FAMILIES)
def test_converted_head_loads_beside_a_trunk(tmp_path, family, quantization):
    layout = Layout(family, dtype=mx.bfloat16)
    meant = write_source(tmp_path / "source", layout)
    # The trunk is an unquantized HF one, which no head's quantization depends on.
    write_checkpoint(tmp_path / "target", Layout(family, with_head=False, dtype=mx.bfloat16))
    flags = Flags() if quantization is None else Flags(bits=8, group_size=32)
    got, _ = convert(tmp_path, flags=flags)
    model = load_model(tmp_path / "target", enable_mtp=True)
    parameters = dict(tree_flatten(model.head.parameters()))
    for name, values in expected_head(meant).items():
        loaded = np.array(parameters[name].astype(mx.float32))
        if f"{name.removesuffix('.weight')}.scales" in got:
            np.testing.assert_allclose(loaded, values, atol=0.01 * np.abs(values).max())
        else:
            np.testing.assert_array_equal(loaded, values)


def test_head_is_read_from_several_shards_through_the_index(tmp_path):
    layout = Layout("qwen3_next")
    meant = write_source(tmp_path / "source", layout, shards=4)
    write_target(tmp_path / "target", layout)
    (tmp_path / "source" / "model-00001-of-00004.safetensors").unlink()  # the trunk isn't needed
    got, _ = convert(tmp_path)
    for name, values in expected_head(meant).items():
        np.testing.assert_array_equal(decode(got[name]), values, err_msg=name)


def test_a_source_without_index_or_with_the_head_in_a_file_of_its_own(tmp_path):
    layout = Layout("qwen3_5")
    write_source(tmp_path / "source", Layout("qwen3_5", with_head=False), shards=3)
    raws, meant = encode_all(hf_tensors(layout), "BF16")
    own = {name: raw for name, raw in raws.items() if name.startswith("mtp.")}
    write_file(tmp_path / "source" / "mtp.safetensors", own, {"format": "pt"})
    write_target(tmp_path / "target", layout)
    got, _ = convert(tmp_path)
    for name, values in expected_head(meant).items():
        np.testing.assert_array_equal(decode(got[name]), values, err_msg=name)


def test_a_head_without_a_shared_expert_gets_one_that_adds_nothing(tmp_path):
    layout = Layout("qwen3_next")
    raws, meant = encode_all(hf_tensors(layout), "BF16")
    kept = {name: raw for name, raw in raws.items() if not _shared(name)}
    source = tmp_path / "source"
    write_source(source, layout, change={"shared_expert_intermediate_size": 0})
    write_file(source / "model.safetensors", kept, {"format": "pt"})
    write_target(tmp_path / "target", layout, AFFINE)
    convert(tmp_path)
    loaded = mx.load(str(tmp_path / "target" / "mtp.safetensors"))
    stem = "mtp.layers.0.mlp.shared_expert.down_proj"
    parts = [loaded[f"{stem}.{part}"] for part in ("weight", "scales", "biases")]
    down = mx.dequantize(*parts, group_size=32, bits=4)
    assert down.shape == (64, 32)
    assert not down.any()
    assert expected_head(meant)["layers.0.mlp.shared_expert.down_proj.weight"].any()


def _shared(name: str) -> bool:
    return name.startswith("mtp.") and ".shared_expert" in name


def test_any_number_of_experts(tmp_path):
    """Two digits: their order in a file is not that of their numbers."""
    layout = Layout("qwen3_next")
    tensors = hf_tensors(layout)
    random = np.random.default_rng(1)
    mlp = "mtp.layers.0.mlp."
    for part, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        for expert in range(13):
            name = f"{mlp}experts.{expert}.{part}.weight"
            tensors[name] = random.standard_normal(shape).astype(np.float32)
    tensors[f"{mlp}gate.weight"] = random.standard_normal((13, 64)).astype(np.float32)
    raws, meant = encode_all(tensors, "BF16")
    write_source(tmp_path / "source", layout, change={"num_experts": 13})
    ordered = {name: raws[name] for name in sorted(raws)}
    write_file(tmp_path / "source" / "model.safetensors", ordered, {"format": "pt"})
    write_target(tmp_path / "target", layout, num_experts=13)
    got, _ = convert(tmp_path)
    for name, values in expected_head(meant).items():
        np.testing.assert_array_equal(decode(got[name]), values, err_msg=name)
