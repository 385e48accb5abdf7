"""Tiny random checkpoints of every family, in the layout of the published ones."""

from __future__ import annotations

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
    "vocab_size": VOCAB,
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


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is written."""

    family: str  # model_type
    stacked_experts: bool = False  # as `gate_up_proj` and `down_proj`, not one by one
    with_head: bool = True  # with mtp.* tensors
    dtype: mx.Dtype = mx.float32
    head_prefix: str = "mtp."
    seed: int = 0
    tied: bool = False  # no lm_head of its own


def text_config(layout: Layout) -> dict[str, Any]:
    config = dict(_SHARED, tie_word_embeddings=layout.tied)
    if layout.family == "qwen3_next":
        return {**config, **_MOE, "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    rope = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config["rope_parameters"] = rope
    return {**config, **_MOE} if layout.family == "qwen3_5_moe" else config


def config_json(layout: Layout) -> dict[str, Any]:
    inner = text_config(layout)
    if layout.family == "qwen3_next":
        return {"model_type": "qwen3_next", **inner, "eos_token_id": 1}
    return {
        "model_type": layout.family,
        "text_config": {"model_type": f"{layout.family}_text", **inner, "eos_token_id": 1},
    }


def hf_tensors(layout: Layout) -> dict[str, np.ndarray]:
    """The checkpoint as float32 NumPy arrays, under the published names."""
    return _Maker(layout).tensors()


def write_checkpoint(path: Path, layout: Layout) -> dict[str, np.ndarray]:
    """Write config.json and model.safetensors; returns the tensors as they were rounded."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_json(layout)))
    arrays = {k: mx.array(v).astype(layout.dtype) for k, v in hf_tensors(layout).items()}
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "pt"})
    return {k: np.array(v.astype(mx.float32)) for k, v in arrays.items()}


class _Maker:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.config = text_config(layout)
        self.random = np.random.default_rng(layout.seed)
        self.out: dict[str, np.ndarray] = {}

    def tensors(self) -> dict[str, np.ndarray]:
        c = self.config
        trunk = "model." if self.layout.family == "qwen3_next" else "model.language_model."
        self.matrix(f"{trunk}embed_tokens", c["vocab_size"], c["hidden_size"], scale=1.0)
        for index in range(c["num_hidden_layers"]):
            full = (index + 1) % c["full_attention_interval"] == 0
            self.layer(f"{trunk}layers.{index}.", full)
        self.norm(f"{trunk}norm", c["hidden_size"])
        if not self.layout.tied:
            self.matrix("lm_head", c["vocab_size"], c["hidden_size"], scale=3.0)
        if self.layout.with_head:
            self.head(self.layout.head_prefix)
        return self.out

    def head(self, prefix: str) -> None:
        size = self.config["hidden_size"]
        self.matrix(f"{prefix}fc", size, 2 * size)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            self.norm(f"{prefix}{name}", size)
        self.layer(f"{prefix}layers.0.", full=True)

    def layer(self, prefix: str, full: bool) -> None:
        size = self.config["hidden_size"]
        self.norm(f"{prefix}input_layernorm", size)
        self.norm(f"{prefix}post_attention_layernorm", size)
        if full:
            self.attention(f"{prefix}self_attn.")
        else:
            self.gated_delta_net(f"{prefix}linear_attn.")
        if "num_experts" in self.config:
            self.moe(f"{prefix}mlp.")
        else:
            self.mlp(f"{prefix}mlp.", self.config["intermediate_size"])

    def attention(self, prefix: str) -> None:
        c = self.config
        size, dim = c["hidden_size"], c["head_dim"]
        self.matrix(f"{prefix}q_proj", 2 * c["num_attention_heads"] * dim, size)
        for name in "kv":
            self.matrix(f"{prefix}{name}_proj", c["num_key_value_heads"] * dim, size)
        self.matrix(f"{prefix}o_proj", size, c["num_attention_heads"] * dim)
        for name in "qk":
            self.norm(f"{prefix}{name}_norm", dim)

    def gated_delta_net(self, prefix: str) -> None:
        c = self.config
        size, heads = c["hidden_size"], c["linear_num_value_heads"]
        keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        values = heads * c["linear_value_head_dim"]
        if self.layout.family == "qwen3_next":
            self.matrix(f"{prefix}in_proj_qkvz", 2 * keys + 2 * values, size)
            self.matrix(f"{prefix}in_proj_ba", 2 * heads, size)
        else:
            self.matrix(f"{prefix}in_proj_qkv", 2 * keys + values, size)
            self.matrix(f"{prefix}in_proj_z", values, size)
            self.matrix(f"{prefix}in_proj_b", heads, size)
            self.matrix(f"{prefix}in_proj_a", heads, size)
        width = c["linear_conv_kernel_dim"]
        self.put(f"{prefix}conv1d.weight", self.draw(2 * keys + values, 1, width) * 0.5)
        self.put(f"{prefix}A_log", np.log(self.random.uniform(0.5, 4.0, heads)))
        self.put(f"{prefix}dt_bias", self.draw(heads))
        self.put(f"{prefix}norm.weight", 1.0 + 0.1 * self.draw(c["linear_value_head_dim"]))
        self.matrix(f"{prefix}out_proj", size, values)

    def moe(self, prefix: str) -> None:
        c = self.config
        size, inner = c["hidden_size"], c["moe_intermediate_size"]
        self.matrix(f"{prefix}gate", c["num_experts"], size)
        self.matrix(f"{prefix}shared_expert_gate", 1, size)
        self.mlp(f"{prefix}shared_expert.", c["shared_expert_intermediate_size"])
        gates, ups, downs = [], [], []
        for _ in range(c["num_experts"]):
            gates.append(self.draw(inner, size) / np.sqrt(size))
            ups.append(self.draw(inner, size) / np.sqrt(size))
            downs.append(self.draw(size, inner) / np.sqrt(inner))
        # mlx-lm knows one expert layout for the trunk of each family; the head may have either.
        stacked = self.layout.stacked_experts
        if stacked and not (self.layout.family == "qwen3_next" and not prefix.startswith("mtp")):
            joined = [np.concatenate(pair) for pair in zip(gates, ups)]
            self.put(f"{prefix}experts.gate_up_proj", np.stack(joined))
            self.put(f"{prefix}experts.down_proj", np.stack(downs))
            return
        for index, (gate, up, down) in enumerate(zip(gates, ups, downs)):
            self.put(f"{prefix}experts.{index}.gate_proj.weight", gate)
            self.put(f"{prefix}experts.{index}.up_proj.weight", up)
            self.put(f"{prefix}experts.{index}.down_proj.weight", down)

    def mlp(self, prefix: str, inner: int) -> None:
        size = self.config["hidden_size"]
        self.matrix(f"{prefix}gate_proj", inner, size)
        self.matrix(f"{prefix}up_proj", inner, size)
        self.matrix(f"{prefix}down_proj", size, inner)

    def matrix(self, name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        self.put(f"{name}.weight", self.draw(rows, columns) * scale / np.sqrt(columns))

    def norm(self, name: str, size: int) -> None:
        # Zero-centred, with a mean like that of real checkpoints.
        self.put(f"{name}.weight", 0.3 + 0.2 * self.draw(size))

    def draw(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape)

    def put(self, name: str, value: np.ndarray) -> None:
        self.out[name] = value.astype(np.float32)
