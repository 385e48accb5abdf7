"""The norms get their 1 exactly once, by where a head comes from and never by their values."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.convert.add_head import Request, add_head
from mlx_mtp.convert.console import Console
from mlx_mtp.convert.quantization import Flags
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.loader import load_model
from tests.convert.checkpoints import (
    Raw,
    encode,
    encode_all,
    expected_head,
    read_file,
    write_file,
    write_source,
    write_target,
)
from tests.tiny_models import Layout, hf_tensors

LAYOUT = Layout("qwen3_next")
NORM = "pre_fc_norm_hidden.weight"


def raws_of(convention: str) -> tuple[dict[str, Raw], dict[str, np.ndarray]]:
    """A head alone in MLX's layout, with or without the 1, and the true weights."""
    meant = encode_all(hf_tensors(LAYOUT), "BF16")[1]
    expected = expected_head(meant)
    raws = {}
    for name, values in expected.items():
        is_norm = values.ndim == 1
        stored = values - 1 if is_norm and convention == "hf" else values
        raws[f"mtp.{name}"] = encode(stored, "F32" if is_norm else "BF16")
    return raws, expected


def add(tmp_path: Path, **options: object) -> dict[str, Raw]:
    target = write_target(tmp_path / "target", LAYOUT)
    request = Request(str(target), str(tmp_path / "source"), **options)
    add_head(request, Console())
    tensors, metadata = read_file(target / "mtp.safetensors")
    assert metadata["norm_convention"] == "mlx"
    return tensors


def put(tmp_path: Path, convention: str, metadata: dict[str, str], **more: Raw) -> np.ndarray:
    raws, expected = raws_of(convention)
    (tmp_path / "source").mkdir(exist_ok=True)
    write_file(tmp_path / "source" / "head.safetensors", {**raws, **more}, metadata)
    return expected[NORM]


def conv(layout: str) -> Raw:
    shape = (8, 1, 4) if layout == "hf" else (8, 4, 1)
    return Raw("BF16", np.zeros(shape, np.uint16))


CONV = "model.layers.0.linear_attn.conv1d.weight"


@pytest.mark.parametrize("convention", ["hf", "mlx"])
def test_a_header_that_says_so(tmp_path, convention):
    expected = put(tmp_path, convention, {"norm_convention": convention})
    np.testing.assert_array_equal(add(tmp_path)[f"mtp.{NORM}"].bits, expected)


@pytest.mark.parametrize("convention", ["hf", "mlx"])
@pytest.mark.parametrize("mark", ["mlx", "pt"])
def test_a_convolution_in_the_same_file(tmp_path, convention, mark):
    """Whoever wrote it turned both or neither; that counts before a mark in the header."""
    expected = put(tmp_path, convention, {"format": mark}, **{CONV: conv(convention)})
    np.testing.assert_array_equal(add(tmp_path)[f"mtp.{NORM}"].bits, expected)


def test_pytorch_mark(tmp_path):
    expected = put(tmp_path, "hf", {"format": "pt"})
    np.testing.assert_array_equal(add(tmp_path)[f"mtp.{NORM}"].bits, expected)


def test_an_unmarked_head_beside_an_hf_trunk(tmp_path):
    expected = put(tmp_path, "hf", {})
    write_file(tmp_path / "source" / "model.safetensors", {CONV: conv("hf")}, {})
    np.testing.assert_array_equal(add(tmp_path)[f"mtp.{NORM}"].bits, expected)


@pytest.mark.parametrize("metadata", [{}, {"format": "mlx"}, {"norm_convention": "other"}])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside an MLX trunk"])
def test_guessing_is_an_error(tmp_path, metadata, beside):
    """Even beside a converted trunk: raw heads are put there too."""
    put(tmp_path, "mlx", metadata)
    if beside:
        trunk = {CONV: conv("mlx")}
        write_file(tmp_path / "source" / "model.safetensors", trunk, {"format": "mlx"})
    with pytest.raises(ConvertError, match=r"--mtp-norms hf .*--mtp-norms mlx"):
        add(tmp_path)
    assert not (tmp_path / "target" / "mtp.safetensors").exists()


@pytest.mark.parametrize("convention", ["hf", "mlx"])
@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"format": "mlx"}])
def test_the_flag_decides(tmp_path, convention, metadata):
    expected = put(tmp_path, convention, metadata)
    got = add(tmp_path, mtp_norms=convention)
    np.testing.assert_array_equal(got[f"mtp.{NORM}"].bits, expected)


def test_a_flag_against_the_header_is_an_error(tmp_path):
    put(tmp_path, "mlx", {"norm_convention": "mlx"})
    with pytest.raises(ConvertError, match="says hf, but the header"):
        add(tmp_path, mtp_norms="hf")


def test_two_files_of_two_conventions_are_an_error(tmp_path):
    raws, _ = raws_of("mlx")
    names = list(raws)
    (tmp_path / "source").mkdir()
    for number, said in enumerate(["hf", "mlx"]):
        part = {name: raws[name] for name in names[number::2]}
        write_file(tmp_path / "source" / f"{number}.safetensors", part, {"norm_convention": said})
    with pytest.raises(ConvertError, match="can't be determined"):
        add(tmp_path)


@pytest.mark.parametrize("mean", [0.27, 0.49, 1.0, -0.9])
def test_values_never_decide(tmp_path, mean):
    """Zero-centred norms with means that look like anything get their 1."""
    tensors = hf_tensors(LAYOUT)
    tensors[f"mtp.{NORM}"] = np.full(64, mean, np.float32)
    raws, meant = encode_all(tensors, "BF16")
    (tmp_path / "source").mkdir()
    write_file(tmp_path / "source" / "model.safetensors", raws, {"format": "pt"})
    got = add(tmp_path)[f"mtp.{NORM}"].bits
    np.testing.assert_array_equal(got, meant[f"mtp.{NORM}"] + np.float32(1))


def test_the_one_is_added_without_a_loss_and_survives_the_loader(tmp_path):
    """In BF16 1 + 0.0021 would be 1; here it is the float32 sum."""
    write_source(tmp_path / "source", LAYOUT)
    add(tmp_path)
    (tmp_path / "source" / "mtp.safetensors").write_bytes(
        (tmp_path / "target" / "mtp.safetensors").read_bytes()
    )
    from_sidecar = load_model(tmp_path / "source", enable_mtp=True)
    assert from_sidecar.head_source == "sidecar mtp.safetensors"
    (tmp_path / "source" / "mtp.safetensors").unlink()
    from_files = load_model(tmp_path / "source", enable_mtp=True)
    one, other = (dict(tree_flatten(m.head.parameters())) for m in (from_sidecar, from_files))
    for name, value in other.items():
        assert mx.array_equal(one[name], value), name


@pytest.mark.parametrize("flags", [Flags(), Flags(bits=4), Flags(bits=8, group_size=32)])
def test_a_packed_mlx_head_is_taken_over_or_packed_again(tmp_path, flags):
    write_source(tmp_path / "hf", LAYOUT)
    first = write_target(tmp_path / "source", LAYOUT, {"bits": 4, "group_size": 64})
    add_head(Request(str(first), str(tmp_path / "hf")), Console())
    source, _ = read_file(first / "mtp.safetensors")
    got = add(tmp_path, flags=flags)
    wanted_names = set(source)
    if flags.group_size == 32:
        # Groups of 32 divide the experts' inner size, which groups of 64 don't.
        wanted_names |= {
            f"mtp.layers.0.mlp.{mlp}.down_proj.{part}"
            for mlp in ("switch_mlp", "shared_expert")
            for part in ("scales", "biases")
        }
    assert set(got) == wanted_names
    for name, raw in source.items():
        same = np.array_equal(got[name].bits, raw.bits)
        repacked = flags.bits == 8 and raw.bits.ndim > 1 and "gate." not in name.rsplit("mlp.")[-1]
        if not repacked:
            assert same, name
    if flags.bits == 8:
        fc = got["mtp.fc.weight"].bits
        assert fc.shape == (64, 128 * 8 // 32)
