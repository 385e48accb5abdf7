"""Every layout of a checkpoint loads to the same model, and a wrong one is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import convert as mlx_lm_convert
from mlx_lm.utils import load_model as mlx_lm_load

from mlx_mtp.errors import (
    CheckpointError,
    MissingHeadError,
    ModelError,
    UnsupportedModelError,
    UsageError,
)
from mlx_mtp.models.loader import load_model
from tests.tiny_models import FAMILIES, VOCAB, Layout, write_checkpoint

TOKENS = mx.array([[5, 9, 2, 33, 17, 60, 4]])


def logits_of(path: Path, **options: object) -> np.ndarray:
    model = load_model(path, enable_mtp=False, **options)
    return np.array(model.model(TOKENS))


def head_parameters(path: Path) -> dict[str, np.ndarray]:
    model = load_model(path, enable_mtp=True)
    assert model.head is not None
    return {k: np.array(v) for k, v in tree_flatten(model.head.parameters())}


def sidecar(path: Path, tensors: dict[str, mx.array], convention: str | None) -> None:
    metadata = {} if convention is None else {"norm_convention": convention}
    mx.save_safetensors(str(path / "mtp.safetensors"), tensors, metadata=metadata)


def mlx_head(path: Path) -> dict[str, mx.array]:
    """The head as our module holds it, under its MLX names."""
    head = load_model(path, enable_mtp=True).head
    return {f"mtp.{k}": v for k, v in tree_flatten(head.parameters())}


@pytest.mark.parametrize("family", FAMILIES)
def test_trunk_equals_mlx_lm_with_the_norms_added_in_float32(tmp_path, family):
    write_checkpoint(tmp_path, Layout(family, stacked_experts=family == "qwen3_5_moe"))
    theirs, _ = mlx_lm_load(tmp_path)
    np.testing.assert_allclose(logits_of(tmp_path), np.array(theirs(TOKENS)), atol=2e-5)


def test_bf16_norms_lose_nothing(tmp_path):
    """mlx-lm adds the 1 in BF16; in float32 each norm weight is exactly 1 + w."""
    tensors = write_checkpoint(tmp_path, Layout("qwen3_next", dtype=mx.bfloat16))
    model = load_model(tmp_path, enable_mtp=True)
    norm = np.array(model.causal_lm.model.norm.weight)
    np.testing.assert_array_equal(norm, 1.0 + tensors["model.norm.weight"])
    np.testing.assert_array_equal(
        np.array(model.head.norm.weight), 1.0 + tensors["mtp.norm.weight"]
    )
    gated = np.array(model.causal_lm.model.layers[0].linear_attn.norm.weight)
    np.testing.assert_array_equal(gated, tensors["model.layers.0.linear_attn.norm.weight"])


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "language_model.mtp."])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_head_layouts_give_the_same_parameters(tmp_path, family, stacked, prefix):
    plain, other = tmp_path / "plain", tmp_path / "other"
    write_checkpoint(plain, Layout(family))
    write_checkpoint(other, Layout(family, stacked_experts=stacked, head_prefix=prefix))
    expected, got = head_parameters(plain), head_parameters(other)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("convention", ["hf", "mlx"])
def test_sidecar_wins_and_its_header_decides_the_norms(tmp_path, convention):
    write_checkpoint(tmp_path, Layout("qwen3_next"))
    tensors = mlx_head(tmp_path)
    sidecar(tmp_path, tensors, convention)
    got = head_parameters(tmp_path)
    shift = 1.0 if convention == "hf" else 0.0
    expected = np.array(tensors["mtp.norm.weight"]) + shift
    np.testing.assert_array_equal(got["norm.weight"], expected)
    np.testing.assert_array_equal(got["fc.weight"], np.array(tensors["mtp.fc.weight"]))


def test_sidecar_that_does_not_say_its_norms_is_refused(tmp_path):
    write_checkpoint(tmp_path, Layout("qwen3_next"))
    sidecar(tmp_path, mlx_head(tmp_path), None)
    with pytest.raises(CheckpointError, match="norm_convention"):
        load_model(tmp_path, enable_mtp=True)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_mlx_checkpoint_with_and_without_a_head(tmp_path, bits):
    """mlx-lm's conversion drops the head; a sidecar of any precision gives it back."""
    source, target = tmp_path / "hf", tmp_path / "mlx"
    write_checkpoint(source, Layout("qwen3_next"))
    (source / "tokenizer.json").write_bytes(_demo("tokenizer.json"))
    (source / "tokenizer_config.json").write_bytes(_demo("tokenizer_config.json"))
    options = {} if bits is None else {"quantize": True, "q_bits": bits, "q_group_size": 32}
    mlx_lm_convert(str(source), str(target), dtype="float32", **options)
    with pytest.raises(MissingHeadError, match=r"mlx-mtp add-mtp-weights"):
        load_model(target, enable_mtp=True)
    if bits is None:
        np.testing.assert_allclose(logits_of(target), logits_of(source), atol=2e-5)
    sidecar(target, mlx_head(source), "mlx")
    for name, value in head_parameters(source).items():
        np.testing.assert_array_equal(head_parameters(target)[name], value)


@pytest.mark.parametrize(
    ("bits", "mode", "group_size"), [(4, "affine", 32), (8, "affine", 64), (4, "mxfp4", 32)]
)
def test_quantized_sidecar_includes_fc(tmp_path, bits, mode, group_size):
    """`mtp.fc` is packed like any other Linear; on the CPU it is expanded again."""
    write_checkpoint(tmp_path, Layout("qwen3_next"))
    head = load_model(tmp_path, enable_mtp=True).head
    nn.quantize(head, group_size=group_size, bits=bits, mode=mode, class_predicate=_matrices)
    packed = {f"mtp.{k}": v for k, v in tree_flatten(head.parameters())}
    assert "mtp.fc.scales" in packed
    sidecar(tmp_path, packed, "mlx")
    biases = packed.get("mtp.fc.biases")
    expected = mx.dequantize(
        packed["mtp.fc.weight"], packed["mtp.fc.scales"], biases, group_size, bits, mode
    )
    got = head_parameters(tmp_path)["fc.weight"]
    np.testing.assert_allclose(got, np.array(expected.astype(mx.float32)), atol=1e-6)
    # Only where there is memory: packed it is slower, but it runs.
    tight = load_model(tmp_path, enable_mtp=True, memory=1000).head
    assert ("fc.scales" in dict(tree_flatten(tight.parameters()))) == (
        mx.default_device() == mx.cpu
    )


def _matrices(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0


def _demo(name: str) -> bytes:
    from tests.conftest import DEMO

    return (DEMO / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mtp.fc.weight", (64, 64)),
        ("mtp.layers.0.self_attn.q_proj.weight", (128, 64)),
        ("mtp.norm.weight", (32,)),
        ("mtp.layers.0.mlp.experts.0.up_proj.weight", (16, 64)),
        ("mtp.layers.0.mlp.gate.weight", (8, 64)),
    ],
)
def test_misfits_are_named_with_both_shapes(tmp_path, name, shape):
    tensors = write_checkpoint(tmp_path, Layout("qwen3_next"))
    changed = dict(tensors)
    names = [name]
    if ".experts.0." in name:
        names = [name.replace(".0.up", f".{i}.up") for i in range(6)]
    for each in names:
        changed[each] = np.zeros(shape, dtype=np.float32)
    _rewrite(tmp_path, changed)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path, enable_mtp=True)
    assert str(shape[0]) in str(caught.value)
    assert "expected" in str(caught.value)
    assert name.rsplit(".", 2)[-2] in str(caught.value)


def test_missing_and_unknown_head_tensors_are_named(tmp_path):
    tensors = write_checkpoint(tmp_path, Layout("qwen3_5"))
    without = {k: v for k, v in tensors.items() if k != "mtp.pre_fc_norm_hidden.weight"}
    _rewrite(tmp_path, without)
    with pytest.raises(CheckpointError, match=r"no tensor mtp\.pre_fc_norm_hidden\.weight"):
        load_model(tmp_path, enable_mtp=True)
    _rewrite(tmp_path, {**tensors, "mtp.extra.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match=r"no place for: mtp\.extra\.weight"):
        load_model(tmp_path, enable_mtp=True)
    hole = {k: v for k, v in tensors.items() if "mtp" not in k}
    _rewrite(tmp_path, hole)
    with pytest.raises(MissingHeadError):
        load_model(tmp_path, enable_mtp=True)


def test_shared_expert_is_not_dropped(tmp_path):
    write_checkpoint(tmp_path, Layout("qwen3_next"))
    names = head_parameters(tmp_path)
    assert "layers.0.mlp.shared_expert.up_proj.weight" in names
    assert "layers.0.mlp.shared_expert_gate.weight" in names


def test_tied_embeddings_serve_as_lm_head(tmp_path):
    write_checkpoint(tmp_path, Layout("qwen3_5", tied=True))
    model = load_model(tmp_path, enable_mtp=True)
    hidden = mx.ones((1, 1, 64))
    expected = hidden @ model.causal_lm.model.embed_tokens.weight.T
    assert mx.allclose(model.logits(hidden), expected, atol=1e-5)
    assert model.logits(hidden).shape == (1, 1, VOCAB)


def test_bad_directories_and_configs_say_what_is_wrong(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path, enable_mtp=False)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="can't be read"):
        load_model(tmp_path, enable_mtp=False)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="JSON object"):
        load_model(tmp_path, enable_mtp=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedModelError, match=r"qwen3_5, qwen3_5_moe, qwen3_next"):
        load_model(tmp_path, enable_mtp=False)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("generation_config.json", "[]", "JSON object"),
        ("generation_config.json", "{", "can't be read"),
        ("generation_config.json", '{"eos_token_id": [99999999999]}', "99999999999"),
        ("generation_config.json", '{"eos_token_id": "x"}', "'x'"),
        ("config.json", {"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ("config.json", {"max_position_embeddings": "x"}, "max_position_embeddings is 'x'"),
        ("config.json", {"num_attention_heads": "x"}, "can't be loaded"),
        ("config.json", {"hidden_size": 65}, "can't be loaded"),
    ],
)
def test_wrong_values_in_the_configs_are_named(tmp_path, file, content, words):
    write_checkpoint(tmp_path, Layout("qwen3_next"))
    if isinstance(content, dict):
        content = json.dumps({**json.loads((tmp_path / file).read_text()), **content})
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=words):
        load_model(tmp_path, enable_mtp=True)


def test_experts_on_the_cpu_are_float32_or_refused(tmp_path):
    """mlx would fail in every step; a dense model may have any type."""
    write_checkpoint(tmp_path / "moe", Layout("qwen3_next"))
    write_checkpoint(tmp_path / "dense", Layout("qwen3_5"))
    if mx.default_device() == mx.cpu:
        with pytest.raises(UsageError, match="float32"):
            load_model(tmp_path / "moe", enable_mtp=True, dtype="bfloat16")
    dense = load_model(tmp_path / "dense", enable_mtp=True, dtype="bfloat16")
    assert dense.causal_lm.model.norm.weight.dtype == mx.bfloat16


def test_damaged_weights_and_custom_code_are_refused(tmp_path):
    write_checkpoint(tmp_path, Layout("qwen3_next"))
    with pytest.raises(UsageError, match="float32"):
        load_model(tmp_path, enable_mtp=False, dtype="int8")
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError):
        load_model(tmp_path, enable_mtp=False)
    weights.unlink()
    with pytest.raises(CheckpointError, match="no model"):
        load_model(tmp_path, enable_mtp=False)
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_file": "evil.py"}))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="runs no code"):
        load_model(tmp_path, enable_mtp=False)


def test_patching_leaves_mlx_lm_alone(tmp_path):
    from mlx_lm.models.qwen3_next import Model, Qwen3NextGatedDeltaNet

    write_checkpoint(tmp_path, Layout("qwen3_next"))
    before = Qwen3NextGatedDeltaNet.__call__, Model.sanitize
    model = load_model(tmp_path, enable_mtp=True)
    assert (Qwen3NextGatedDeltaNet.__call__, Model.sanitize) == before
    inner = model.causal_lm.model.layers[0].linear_attn
    assert type(inner) is not Qwen3NextGatedDeltaNet
    with pytest.raises(UnsupportedModelError, match="mlx-lm>="):
        model.family.patch(model.model)  # its layers are not mlx-lm's own any more


def _rewrite(path: Path, tensors: dict[str, np.ndarray]) -> None:
    arrays = {k: mx.array(v) for k, v in tensors.items()}
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "pt"})
