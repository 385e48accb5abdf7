"""Every layout of a checkpoint loads to the same model, and a wrong one is refused by name."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import convert as mlx_lm_convert
from mlx_lm.utils import load_model as mlx_lm_load

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.errors import CheckpointError, MissingHeadError, ModelError, UsageError
from mlx_mtp.models.loader import load_model
from tests.conftest import DEMO
from tests.support.tiny_models import FAMILIES, Layout, change_json, write_checkpoint

TOKENS = mx.array([[5, 9, 2, 33, 17, 60, 4]])


def logits_of(path: Path) -> np.ndarray:
    return np.array(load_model(path, enable_mtp=False).model(TOKENS))


def head_parameters(path: Path) -> dict[str, mx.array]:
    return dict(tree_flatten(load_model(path, enable_mtp=True).head.parameters()))


def write_sidecar(path: Path, tensors: dict[str, mx.array], **metadata: str) -> None:
    named = {f"mtp.{name}": value for name, value in tensors.items()}
    mx.save_safetensors(str(path / "mtp.safetensors"), named, metadata=metadata)


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    arrays = {k: mx.array(v) for k, v in tensors.items()}
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_trunk_equals_mlx_lm_with_the_norms_added_in_float32(tmp_path, family):
    write_checkpoint(tmp_path, Layout(family, stacked_experts=family == "qwen3_5_moe"))
    theirs, _ = mlx_lm_load(tmp_path)
    np.testing.assert_allclose(logits_of(tmp_path), np.array(theirs(TOKENS)), atol=2e-5)


def test_bf16_norms_lose_nothing(tmp_path):
    """mlx-lm adds the 1 in BF16; in float32 each norm weight is exactly 1 + w."""
    tensors = write_checkpoint(tmp_path, Layout("qwen3_next", dtype=mx.bfloat16))
    model = load_model(tmp_path, enable_mtp=True)
    gated = model.causal_lm.model.layers[0].linear_attn.norm
    for name, norm, added in (
        ("model.norm.weight", model.causal_lm.model.norm, 1.0),
        ("mtp.norm.weight", model.head.norm, 1.0),
        ("model.layers.0.linear_attn.norm.weight", gated, 0.0),
    ):
        np.testing.assert_array_equal(np.array(norm.weight), added + tensors[name])


@pytest.mark.parametrize(
    ("family", "prefix"),
    [("qwen3_next", "model.mtp."), ("qwen3_5", "language_model.mtp."), ("qwen3_5_moe", "mtp.")],
)
def test_head_layouts_give_the_same_parameters(tmp_path, family, prefix):
    plain, other = tmp_path / "plain", tmp_path / "other"
    write_checkpoint(plain, Layout(family))
    write_checkpoint(other, Layout(family, stacked_experts=True, head_prefix=prefix))
    expected, got = head_parameters(plain), head_parameters(other)
    assert got.keys() == expected.keys()
    assert all(mx.array_equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize("convention", ["hf", "mlx"])
def test_sidecar_wins_and_its_header_decides_the_norms(tmp_path, convention):
    write_checkpoint(tmp_path, Layout("qwen3_next"))
    tensors = {k: v * 2 for k, v in head_parameters(tmp_path).items()}
    write_sidecar(tmp_path, tensors)
    with pytest.raises(CheckpointError, match="norm_convention"):
        load_model(tmp_path, enable_mtp=True)
    write_sidecar(tmp_path, tensors, norm_convention=convention)
    got = head_parameters(tmp_path)
    shift = 1.0 if convention == "hf" else 0.0
    for name in ("norm.weight", "layers.0.self_attn.q_norm.weight"):
        assert mx.array_equal(got[name], tensors[name] + shift)
    assert mx.array_equal(got["fc.weight"], tensors["fc.weight"])


@pytest.mark.parametrize("bits", [None, 4])
def test_mlx_checkpoint_with_and_without_a_head(tmp_path, bits):
    """mlx-lm's conversion drops the head; a sidecar of any precision restores it."""
    source, target = tmp_path / "hf", tmp_path / "mlx"
    write_checkpoint(source, Layout("qwen3_next"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((DEMO / name).read_bytes())
    options = {} if bits is None else {"quantize": True, "q_bits": bits, "q_group_size": 32}
    mlx_lm_convert(str(source), str(target), dtype="float32", **options)
    with pytest.raises(MissingHeadError, match=r"mlx-mtp add-mtp-weights"):
        load_model(target, enable_mtp=True)
    if bits is None:
        np.testing.assert_allclose(logits_of(target), logits_of(source), atol=2e-5)
    head = head_parameters(source)
    write_sidecar(target, head, norm_convention="mlx")
    got = head_parameters(target)
    assert all(mx.array_equal(got[name], value) for name, value in head.items())


@pytest.mark.parametrize(("bits", "mode", "group_size"), [(8, "affine", 64), (4, "mxfp4", 32)])
def test_quantized_sidecar_includes_fc(tmp_path, bits, mode, group_size):
    """`mtp.fc` can be quantized like any other Linear; on the CPU it is expanded again."""
    write_checkpoint(tmp_path, Layout("qwen3_next"))
    head = load_model(tmp_path, enable_mtp=True).head

    def is_matrix(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0

    nn.quantize(head, group_size=group_size, bits=bits, mode=mode, class_predicate=is_matrix)
    packed = dict(tree_flatten(head.parameters()))
    write_sidecar(tmp_path, packed, norm_convention="mlx")
    parts = (packed["fc.weight"], packed["fc.scales"], packed.get("fc.biases"))
    expected = mx.dequantize(*parts, group_size, bits, mode).astype(mx.float32)
    got = head_parameters(tmp_path)["fc.weight"]
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=1e-6)
    # It is expanded only if there is memory.
    tight = load_model(tmp_path, enable_mtp=True, memory=1000).head
    assert ("scales" in tight.fc) == (mx.default_device() == mx.cpu)


def test_a_scaled_rope_decodes_on_another_thread_than_it_was_loaded_on(tmp_path):
    """Frequencies are no parameters; left lazy, they couldn't be evaluated on another thread."""
    write_checkpoint(tmp_path, Layout("qwen3_next"))
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    change_json(tmp_path / "config.json", rope_scaling=scaling)
    model = load_model(tmp_path, enable_mtp=True)

    def decode() -> list[mx.array]:
        cache, head = model.make_cache(1), RaggedKVCache()
        cache.reserve([1])
        packing = cache.begin_window([1], mx.array([1], dtype=mx.int32))
        hidden = model.hidden(TOKENS[0, :1], cache)
        model.head.write(hidden, hidden, head, packing)
        found = [model.logits(hidden), *head.arrays]
        mx.eval(found)
        return found

    with ThreadPoolExecutor(1) as threads:
        there = threads.submit(decode).result()
    assert all(map(mx.allclose, there, decode()))


def _without(name: str):
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def _shaped(name: str, *shape: int):
    zeros = np.zeros(shape, np.float32)
    # If the tensor is one of an expert, all experts get it.
    names = [name.replace(".0.up", f".{i}.up") for i in range(6)]
    return lambda tensors: {**tensors, **dict.fromkeys(names, zeros)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_shaped("mtp.fc.weight", 64, 64), r"received shape \(64, 64\) for parameter fc\.weight"),
        (
            _shaped("mtp.layers.0.mlp.experts.0.up_proj.weight", 16, 64),
            r"16.* for parameter .*up_proj",
        ),
        (_without("mtp.pre_fc_norm_hidden.weight"), r"Missing 1 .*: pre_fc_norm_hidden\.weight"),
        (_without("mtp.layers.0.mlp.experts.1.up_proj.weight"), "expert 1 is missing"),
        (_shaped("mtp.extra.weight", 2, 2), r"not in model: extra\.weight"),
        (_shaped("mtp.fc.weight_scale_inv", 2, 2), "FP8"),
        (lambda tensors: {k: v for k, v in tensors.items() if "mtp" not in k}, "has no MTP head"),
    ],
)
def test_misfits_are_named(tmp_path, change, words):
    tensors = write_checkpoint(tmp_path, Layout("qwen3_next"))
    write_tensors(tmp_path, change(tensors))
    with pytest.raises((CheckpointError, MissingHeadError), match=words):
        load_model(tmp_path, enable_mtp=True)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, r"no config\.json"),
        ("config.json", "{", "can't be read"),
        ("config.json", "[1]", "JSON object"),
        ("config.json", {"model_type": "llama"}, r"qwen3_5, qwen3_5_moe, qwen3_next"),
        ("config.json", {"model_file": "evil.py"}, "runs no code"),
        ("config.json", {"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ("config.json", {"num_attention_heads": "x"}, "num_attention_heads is 'x', but must"),
        ("generation_config.json", "{", "can't be read"),
        ("generation_config.json", '{"eos_token_id": [99999999999]}', "99999999999"),
        ("model.safetensors", None, "no model.*, but model.bin: only safetensors are read"),
        ("model.safetensors", b"\x10", "is truncated, damaged or not a safetensors file"),
    ],
)
def test_wrong_files_are_named(tmp_path, file, content, words):
    write_checkpoint(tmp_path, Layout("qwen3_next"))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    (tmp_path / "model.bin").write_bytes(b"")
    if content is None:
        (tmp_path / file).unlink()
    elif isinstance(content, dict):
        change_json(tmp_path / file, **content)
    else:
        (tmp_path / file).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ModelError, match=words):
        load_model(tmp_path, enable_mtp=True)


def test_experts_on_the_cpu_are_float32_or_refused(tmp_path):
    """Other types would fail in every step in mlx; a dense model can have any type."""
    write_checkpoint(tmp_path / "moe", Layout("qwen3_next"))
    write_checkpoint(tmp_path / "dense", Layout("qwen3_5"))
    if mx.default_device() == mx.cpu:
        with pytest.raises(UsageError, match="float32"):
            load_model(tmp_path / "moe", enable_mtp=True, dtype="bfloat16")
    dense = load_model(tmp_path / "dense", enable_mtp=True, dtype="bfloat16")
    assert dense.causal_lm.model.norm.weight.dtype == mx.bfloat16
    with pytest.raises(UsageError, match="float32"):
        load_model(tmp_path / "dense", enable_mtp=False, dtype="int8")
