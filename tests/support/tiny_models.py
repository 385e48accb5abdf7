"""Tiny random checkpoints of every family, in the layout of published checkpoints."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

VOCAB = 96
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")

_SHARED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# One image token covers 8 x 8 pixels.
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "deepstack_visual_indexes": [],
}
IMAGE_IDS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}


@dataclass(frozen=True)
class Layout:
    """The layout of a checkpoint's files."""

    family: str  # model_type
    stacked_experts: bool = False  # all experts in `gate_up_proj` and `down_proj`
    with_head: bool = True  # with mtp.* tensors
    dtype: mx.Dtype = mx.float32
    head_prefix: str = "mtp."
    seed: int = 0
    tied: bool = False  # no lm_head of its own
    vocab: int = VOCAB
    sees: bool = False  # with a vision tower
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None


def text_config(layout: Layout) -> dict[str, Any]:
    config = dict(_SHARED, tie_word_embeddings=layout.tied, vocab_size=layout.vocab)
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers"):
        config[name] = getattr(layout, name) or config[name]
    if layout.family == "qwen3_next":
        return {**config, **_MOE, "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    rope: dict[str, Any] = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    if layout.sees:
        rope["mrope_section"] = [2, 1, 1]
    config["rope_parameters"] = rope
    return {**config, **_MOE} if layout.family == "qwen3_5_moe" else config


def config_json(layout: Layout) -> dict[str, Any]:
    inner = text_config(layout)
    if layout.family == "qwen3_next":
        return {"model_type": "qwen3_next", **inner, "eos_token_id": 1}
    seeing = {"vision_config": TOWER, **IMAGE_IDS} if layout.sees else {}
    return {
        "model_type": layout.family,
        "text_config": {"model_type": f"{layout.family}_text", **inner, "eos_token_id": 1},
        **seeing,
    }


def change_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def write_checkpoint(path: Path, layout: Layout) -> dict[str, np.ndarray]:
    """Write config.json and model.safetensors; returns the tensors after rounding to `dtype`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_json(layout)))
    arrays = {k: mx.array(v).astype(layout.dtype) for k, v in hf_tensors(layout).items()}
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "pt"})
    return {k: np.array(v.astype(mx.float32)) for k, v in arrays.items()}


def hf_tensors(layout: Layout) -> dict[str, np.ndarray]:
    """Returns the checkpoint as float32 NumPy arrays, under the published names."""
    c = text_config(layout)
    size, dim = c["hidden_size"], c["head_dim"]
    random = np.random.default_rng(layout.seed)
    out: dict[str, np.ndarray] = {}

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape)

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        out[f"{name}.weight"] = draw(rows, columns) * scale / np.sqrt(columns)

    def norm(name: str, width: int = size) -> None:
        # Zero-centred, with a mean like that of real checkpoints.
        out[f"{name}.weight"] = 0.3 + 0.2 * draw(width)

    def layer(prefix: str, full: bool) -> None:
        norm(f"{prefix}input_layernorm")
        norm(f"{prefix}post_attention_layernorm")
        if full:
            attention(f"{prefix}self_attn.")
        else:
            gated_delta_net(f"{prefix}linear_attn.")
        if "num_experts" in c:
            moe(f"{prefix}mlp.")
        else:
            mlp(f"{prefix}mlp.", c["intermediate_size"])

    def attention(prefix: str) -> None:
        matrix(f"{prefix}q_proj", 2 * c["num_attention_heads"] * dim, size)
        for name in "kv":
            matrix(f"{prefix}{name}_proj", c["num_key_value_heads"] * dim, size)
        matrix(f"{prefix}o_proj", size, c["num_attention_heads"] * dim)
        for name in "qk":
            norm(f"{prefix}{name}_norm", dim)

    def gated_delta_net(prefix: str) -> None:
        heads, keys = c["linear_num_value_heads"], c["linear_num_key_heads"]
        keys, values = keys * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
        projections = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
        if layout.family == "qwen3_next":
            projections = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
        for name, rows in projections.items():
            matrix(f"{prefix}in_proj_{name}", rows, size)
        convolution = draw(2 * keys + values, 1, c["linear_conv_kernel_dim"]) * 0.5
        out[f"{prefix}conv1d.weight"] = convolution
        out[f"{prefix}A_log"] = np.log(random.uniform(0.5, 4.0, heads))
        out[f"{prefix}dt_bias"] = draw(heads)
        out[f"{prefix}norm.weight"] = 1.0 + 0.1 * draw(c["linear_value_head_dim"])
        matrix(f"{prefix}out_proj", size, values)

    def moe(prefix: str) -> None:
        inner = c["moe_intermediate_size"]
        matrix(f"{prefix}gate", c["num_experts"], size)
        matrix(f"{prefix}shared_expert_gate", 1, size)
        mlp(f"{prefix}shared_expert.", c["shared_expert_intermediate_size"])
        shapes = {"gate_proj": (inner, size), "up_proj": (inner, size), "down_proj": (size, inner)}
        experts = [
            {name: draw(*shape) / np.sqrt(shape[1]) for name, shape in shapes.items()}
            for _ in range(c["num_experts"])
        ]
        # mlx-lm knows one expert layout for the trunk of each family; the head can have either.
        in_trunk = layout.family == "qwen3_next" and not prefix.startswith("mtp")
        if layout.stacked_experts and not in_trunk:
            joined = [np.concatenate([e["gate_proj"], e["up_proj"]]) for e in experts]
            out[f"{prefix}experts.gate_up_proj"] = np.stack(joined)
            out[f"{prefix}experts.down_proj"] = np.stack([e["down_proj"] for e in experts])
            return
        for index, expert in enumerate(experts):
            for name, value in expert.items():
                out[f"{prefix}experts.{index}.{name}.weight"] = value

    def mlp(prefix: str, inner: int) -> None:
        matrix(f"{prefix}gate_proj", inner, size)
        matrix(f"{prefix}up_proj", inner, size)
        matrix(f"{prefix}down_proj", size, inner)

    trunk = "model." if layout.family == "qwen3_next" else "model.language_model."
    matrix(f"{trunk}embed_tokens", c["vocab_size"], size)
    for index in range(c["num_hidden_layers"]):
        layer(f"{trunk}layers.{index}.", (index + 1) % c["full_attention_interval"] == 0)
    norm(f"{trunk}norm")
    if not layout.tied:
        matrix("lm_head", c["vocab_size"], size, scale=3.0)
    if layout.with_head:
        prefix = layout.head_prefix
        matrix(f"{prefix}fc", size, 2 * size)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            norm(f"{prefix}{name}")
        layer(f"{prefix}layers.0.", full=True)
    if layout.sees:
        out |= tower_tensors("model.visual.", TOWER, random)
    return {name: value.astype(np.float32) for name, value in out.items()}


def tower_tensors(
    prefix: str, sizes: dict[str, Any], random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Returns a vision tower as published: the patch convolution has channels first."""
    size, patch, out = sizes["hidden_size"], sizes["patch_size"], dict[str, np.ndarray]()
    merged = size * sizes["spatial_merge_size"] ** 2

    def linear(name: str, rows: int, *columns: int) -> None:
        width = np.prod(columns)
        out[f"{prefix}{name}.weight"] = random.standard_normal((rows, *columns)) / np.sqrt(width)
        out[f"{prefix}{name}.bias"] = 0.1 * random.standard_normal(rows)

    def norm(name: str) -> None:
        out[f"{prefix}{name}.weight"] = 1 + 0.1 * random.standard_normal(size)
        out[f"{prefix}{name}.bias"] = 0.1 * random.standard_normal(size)

    linear("patch_embed.proj", size, 3, sizes["temporal_patch_size"], patch, patch)
    positions = sizes["num_position_embeddings"]
    out[f"{prefix}pos_embed.weight"] = 0.5 * random.standard_normal((positions, size))
    for number in range(sizes["depth"]):
        norm(f"blocks.{number}.norm1")
        norm(f"blocks.{number}.norm2")
        linear(f"blocks.{number}.attn.qkv", 3 * size, size)
        linear(f"blocks.{number}.attn.proj", size, size)
        linear(f"blocks.{number}.mlp.linear_fc1", sizes["intermediate_size"], size)
        linear(f"blocks.{number}.mlp.linear_fc2", size, sizes["intermediate_size"])
    norm("merger.norm")
    linear("merger.linear_fc1", merged, merged)
    linear("merger.linear_fc2", sizes["out_hidden_size"], merged)
    return out
