"""Towers of checkpoints: both layouts, quantized or not, and restored in a conversion."""

import json
import sys

import mlx.core as mx
import mlx_lm.convert  # noqa: F401
import numpy as np
import pytest

from mlx_mtp.convert.convert import add_head, convert_model
from mlx_mtp.errors import CheckpointError, MlxMtpError
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.tower_weights import SIDECAR
from tests.support.tiny_models import TOWER, Layout, change_json, write_checkpoint
from tests.vision.seeing import picture, rows_of


def rgb(seed: int = 1) -> np.ndarray:
    pixels = picture(3, 2, seed)
    return np.frombuffer(pixels.rgb, np.uint8).reshape(pixels.height, pixels.width, 3)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original")
    write_checkpoint(path, Layout("qwen3_5", sees=True, dtype=mx.bfloat16))
    (path / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 64}}')
    return path


@pytest.mark.parametrize("bits", [None, 8])
def test_a_conversion_keeps_the_tower(original, tmp_path, bits, monkeypatch):
    expected = np.array(rows_of(load_model(original, enable_mtp=True).tower, rgb()))

    def mlx_lm_convert(source, mlx_path, **_):  # drops tower and head, as mlx-lm does
        write_checkpoint(tmp_path / "made", Layout("qwen3_5", with_head=False, dtype=mx.bfloat16))
        (tmp_path / "made").rename(mlx_path)

    monkeypatch.setattr(sys.modules["mlx_lm.convert"], "convert", mlx_lm_convert)
    more = {"dtype": None, "revision": None, "verify": False, "vision_bits": bits}
    convert_model(str(original), tmp_path / "out", quantize=False, flags={}, **more)
    model = load_model(tmp_path / "out", enable_mtp=True)
    assert model.image_token_ids == (90, 91, 92, 93)
    assert model.config["preprocessor_config"] == {"size": {"shortest_edge": 64}}
    # Only this tower's merger is quantized: groups of 64 don't divide other matrices' rows.
    assert np.abs(np.array(rows_of(model.tower, rgb())) - expected).max() < (
        1e-6 if bits is None else 0.1
    )
    assert load_model(tmp_path / "out", enable_mtp=True, see=False).tower is None
    # A run without the file restores it, and a second run finds it in place.
    (tmp_path / "out" / SIDECAR).unlink()
    for _ in range(2):
        add_head(str(tmp_path / "out"), str(original))
    assert (tmp_path / "out" / SIDECAR).exists()
    (tmp_path / "out" / SIDECAR).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=SIDECAR):
        load_model(tmp_path / "out", enable_mtp=True)


def test_layouts_and_quantized_towers(original, tmp_path):
    """mlx-vlm's conversions have other names, channels last, and quantized matrices."""
    expected = np.array(rows_of(load_model(original, enable_mtp=True).tower, rgb()))
    tensors = mx.load(str(original / "model.safetensors"))
    renamed = {}
    for key, value in tensors.items():
        name = key.replace("model.visual.", "vision_tower.")
        if "patch_embed.proj.weight" in name:
            value = value.transpose(0, 2, 3, 4, 1)
        renamed[name] = value
    for bits, near in ((None, 1e-6), (8, 0.15)):
        path = tmp_path / str(bits)
        path.mkdir()
        (path / "config.json").write_text((original / "config.json").read_text())
        if bits:
            for layer in ("merger.linear_fc1", "blocks.1.attn.qkv", "pos_embed"):
                parts = mx.quantize(renamed.pop(f"vision_tower.{layer}.weight"), 32, bits)
                names = (f"vision_tower.{layer}.{part}" for part in ("weight", "scales", "biases"))
                renamed |= zip(names, parts)
        mx.save_safetensors(str(path / "model.safetensors"), renamed, {"format": "pt"})
        tower = load_model(path, enable_mtp=True).tower
        assert np.abs(np.array(rows_of(tower, rgb())) - expected).max() < near


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vision_config": TOWER | {"depth": 3}}, "blocks"),
        ({"vision_config": TOWER | {"out_hidden_size": 32}}, "rows of 32"),
        ({"vision_config": TOWER | {"deepstack_visual_indexes": [1]}}, "deepstack"),
        ({"vision_config": TOWER | {"num_heads": 0}}, "num_heads"),
        ({"vision_config": TOWER | {"num_position_embeddings": -4}}, "num_position_embeddings"),
        ({"vision_config": TOWER | {"num_position_embeddings": 5}}, "not a square"),
        ({"vision_config": {"depth": 2}}, "vision_config"),
        ({"image_token_id": None}, "image_token_id"),
    ],
)
def test_towers_that_do_not_fit(original, tmp_path, change, words):
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_json(tmp_path / "config.json", **change)
    with pytest.raises(MlxMtpError, match=words):
        load_model(tmp_path, enable_mtp=True)
    assert load_model(tmp_path, enable_mtp=True, see=False).tower is None
    assert json.loads((tmp_path / "config.json").read_text())
