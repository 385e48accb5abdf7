"""Copies of the trunk's matrices are left out; whether they were copies is told."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.convert.add_head import Request, add_head
from mlx_mtp.convert.console import Console
from tests.convert.checkpoints import (
    Raw,
    bf16,
    encode_all,
    read_file,
    write_file,
    write_source,
    write_target,
)
from tests.tiny_models import Layout, hf_tensors

COPIES = {
    "mtp.embed_tokens.weight": "embed_tokens.weight",
    "mtp.lm_head.weight": "lm_head.weight",
    "mtp.shared_head.head.weight": "lm_head.weight",
}


def sources(tmp_path, layout: Layout, change=None) -> dict[str, np.ndarray]:
    """A source with all three copies, and the trunk's tensors in a target beside it."""
    write_source(tmp_path / "source", layout)
    raws, meant = encode_all(hf_tensors(layout), "BF16")
    trunk = {k: v for k, v in meant.items() if "mtp." not in k}
    for copy, ending in COPIES.items():
        endings = (ending, "embed_tokens.weight") if layout.tied else (ending,)
        original = next(k for e in endings for k in trunk if k.endswith(e))
        raws[copy] = Raw("BF16", bf16(trunk[original] if change is None else change(copy, trunk)))
    write_file(tmp_path / "source" / "model.safetensors", raws, {"format": "pt"})
    write_target(tmp_path / "target", layout)
    return trunk


def run(tmp_path, capsys) -> str:
    capsys.readouterr()
    add_head(Request(str(tmp_path / "target"), str(tmp_path / "source")), Console())
    tensors, _ = read_file(tmp_path / "target" / "mtp.safetensors")
    assert not set(tensors) & set(COPIES)
    captured = capsys.readouterr()
    assert sum("left out" in line for line in (captured.out + captured.err).splitlines()) == 3
    return captured.out + captured.err


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_equal_copies(tmp_path, capsys, family, tied):
    """Compared with the source's trunk, as the target has no weights here."""
    sources(tmp_path, Layout(family, tied=tied))
    said = run(tmp_path, capsys)
    assert said.count("equal to the trunk's") == 3
    assert "warning" not in said


def test_a_different_copy_is_a_warning(tmp_path, capsys):
    def change(copy: str, trunk: dict[str, np.ndarray]) -> np.ndarray:
        values = trunk["lm_head.weight" if "head" in copy else "model.embed_tokens.weight"]
        return values[::-1] if copy == "mtp.lm_head.weight" else values

    sources(tmp_path, Layout("qwen3_next"), change)
    said = run(tmp_path, capsys)
    assert said.count("equal to the trunk's") == 2
    line = next(line for line in said.splitlines() if "different from" in line)
    assert line.startswith("warning: mtp.lm_head.weight")
    assert "relative error 14" in line  # two independent matrices: the square root of 2


def test_a_copy_of_another_shape_is_a_warning(tmp_path, capsys):
    sources(tmp_path, Layout("qwen3_next"), lambda copy, trunk: trunk["lm_head.weight"][:50])
    assert "of shape (50, 64), the trunk's of (96, 64)" in run(tmp_path, capsys)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("equal", [False, True])
def test_against_a_quantized_trunk(tmp_path, capsys, bits, equal):
    """Equality to the bit is out of reach: as near as the quantization lets it be."""

    def change(copy: str, trunk: dict[str, np.ndarray]) -> np.ndarray:
        values = trunk["lm_head.weight" if "head" in copy else "model.embed_tokens.weight"]
        return values if equal else values + 0.3 * np.roll(values, 1, axis=0)

    trunk = sources(tmp_path, Layout("qwen3_next"), change)
    packed = {}
    for name in ("lm_head", "model.embed_tokens"):
        matrix = mx.array(trunk[f"{name}.weight"]).astype(mx.bfloat16)
        parts = mx.quantize(matrix, group_size=32, bits=bits)
        packed |= dict(zip([f"{name}.{p}" for p in ("weight", "scales", "biases")], parts))
    mx.save_safetensors(str(tmp_path / "target" / "model.safetensors"), packed)
    said = run(tmp_path, capsys)
    words = f"as far as {bits} bits, groups of 32, affine can tell" if equal else "different from"
    assert said.count(words) == 3


def test_copies_with_no_trunk_at_hand(tmp_path, capsys):
    sources(tmp_path, Layout("qwen3_next"))
    tensors, metadata = read_file(tmp_path / "source" / "model.safetensors")
    head = {name: raw for name, raw in tensors.items() if name.startswith("mtp.")}
    write_file(tmp_path / "source" / "model.safetensors", head, metadata)
    assert run(tmp_path, capsys).count("not compared") == 3
