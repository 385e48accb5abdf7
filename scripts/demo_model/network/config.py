"""Sizes of the models, and their config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from demo_model.chat import ToolFormat
from demo_model.tokenizer import END_ID, MAX_LENGTH, PAD_ID, VOCAB_SIZE


@dataclass(frozen=True)
class ModelConfig:
    """One model's shape. Names are those of the published config.json.

    Args:
        family: "qwen3_next" (mixture of experts) or "qwen3_5" (dense).
        tool_format: of its chat template.
    """

    family: str
    tool_format: ToolFormat
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    num_experts: int = 0
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 128
    vocab_size: int = VOCAB_SIZE
    partial_rotary_factor: float = 0.25
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-6

    def is_full_attention(self, layer: int) -> bool:
        """Whether the layer attends; the others have a recurrent state."""
        return (layer + 1) % self.full_attention_interval == 0


PRESETS = {
    "moe": ModelConfig(
        "qwen3_next",
        "hermes",
        hidden_size=256,
        num_hidden_layers=8,
        intermediate_size=512,
        num_experts=16,
    ),
    "dense": ModelConfig(
        "qwen3_5", "xml", hidden_size=192, num_hidden_layers=8, intermediate_size=384
    ),
}


def smaller(config: ModelConfig) -> ModelConfig:
    """The same family in a size that a CPU trains in a minute."""
    return replace(
        config,
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        full_attention_interval=2,
        num_experts=4 if config.num_experts else 0,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def text_config(config: ModelConfig) -> dict[str, Any]:
    """What the text model's classes read."""
    shared = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "full_attention_interval": config.full_attention_interval,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "linear_value_head_dim": config.linear_value_head_dim,
        "max_position_embeddings": MAX_LENGTH,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": PAD_ID,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    return {**shared, **(_next_only(config) if config.num_experts else _dense_only(config))}


def _next_only(config: ModelConfig) -> dict[str, Any]:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_nextn_predict_layers": 1,
        "output_router_logits": False,
        "partial_rotary_factor": config.partial_rotary_factor,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "use_sliding_window": False,
    }


def _dense_only(config: ModelConfig) -> dict[str, Any]:
    kinds = ("linear_attention", "full_attention")
    layers = [kinds[config.is_full_attention(i)] for i in range(config.num_hidden_layers)]
    return {
        "dtype": "bfloat16",
        "layer_types": layers,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "partial_rotary_factor": config.partial_rotary_factor,
            "rope_theta": config.rope_theta,
            "rope_type": "default",
        },
    }


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The file, as published checkpoints have it."""
    if config.family == "qwen3_next":
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "torch_dtype": "bfloat16",
            **text_config(config),
        }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "eos_token_id": END_ID,
        "model_type": "qwen3_5",
        "pad_token_id": PAD_ID,
        "text_config": text_config(config),
        "tie_word_embeddings": False,
    }
