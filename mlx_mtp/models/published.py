"""Published models of the supported families: names on the hub and shapes, no weights.

Shapes come from the originals' config.json files, names from public programs that load them. They
were not looked up on the hub; `mlx-mtp inspect NAME` does that.
"""

from typing import Any, NamedTuple

GROUP_SIZE = 64
"""Weights that share a scale in the published quantizations."""
BITS = (4, 8)
"""Bits per weight of the published quantizations of each model."""

_GDN: dict[str, Any] = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_ROPE: dict[str, Any] = {
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
}


def _expert_fields(count: int, used: int, size: int = 512) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": size,
        "intermediate_size": size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_5(
    hidden: int, layers: int, heads: tuple[int, int], value_heads: int, **more: Any
) -> dict[str, Any]:
    """`heads` are attention's, of queries and of keys; `value_heads` are GatedDeltaNet's."""
    model_type = "qwen3_5_moe" if "num_experts" in more else "qwen3_5"
    sizes = {"vocab_size": 248320, "hidden_size": hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    inner = {**_GDN, **_ROPE, **sizes, "linear_num_value_heads": value_heads, **more}
    return {"model_type": model_type, "text_config": {"model_type": f"{model_type}_text", **inner}}


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_DENSE_27B = _qwen3_5(5120, 64, (24, 4), 48, intermediate_size=17408)
_MOE_35B = _qwen3_5(2048, 40, (16, 2), 32, **_expert_fields(256, 8))
_NEXT_80B: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    **_GDN,
    **_expert_fields(512, 10),
    "intermediate_size": 5120,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": _qwen3_5(1024, 24, (8, 2), 16, intermediate_size=3584, **_TIED),
    "Qwen3.5-2B": _qwen3_5(2048, 24, (8, 2), 16, intermediate_size=6144, **_TIED),
    "Qwen3.5-4B": _qwen3_5(2560, 32, (16, 4), 32, intermediate_size=9216, **_TIED),
    "Qwen3.5-9B": _qwen3_5(4096, 32, (16, 4), 32, intermediate_size=12288),
    "Qwen3.5-27B": _DENSE_27B,
    "Qwen3.6-27B": _DENSE_27B,
    "Qwen3.8-27B": _DENSE_27B,
    "Qwen3.5-35B-A3B": _MOE_35B,
    "Qwen3.6-35B-A3B": _MOE_35B,
    "Qwen3-Next-80B-A3B-Instruct": _NEXT_80B,
    "Qwen3-Next-80B-A3B-Thinking": _NEXT_80B,
    "Qwen3.5-122B-A10B": _qwen3_5(3072, 48, (32, 2), 64, **_expert_fields(256, 8, 1024)),
    "Qwen3.5-397B-A17B": _qwen3_5(4096, 60, (32, 2), 64, **_expert_fields(512, 10, 1024)),
}
"""config.json by name, smallest model first."""
_INFIX = {name: "MLX-" for name in SHAPES if name.endswith(("-0.8B", "-2B", "-4B", "-9B"))}


class PublishedQuant(NamedTuple):
    """A quantization on the hub."""

    name: str  # of its original, without the organisation
    bits: int

    @property
    def repo_id(self) -> str:
        return f"mlx-community/{self.name}-{_INFIX.get(self.name, '')}{self.bits}bit"


RELEASES = tuple(PublishedQuant(name, bits) for name in SHAPES for bits in BITS)
_DERIVED = {"prism-ml/Ternary-Bonsai-2-27B-mlx-2bit": "Qwen3.8-27B"}
_WITH_HEAD_ALONE = (
    *("Qwen3.5-4B", "Qwen3.5-9B"),
    *("Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3.8-27B"),
)
_NAMES = {each.repo_id: each.name for each in RELEASES} | _DERIVED


source_of = {repo_id: f"Qwen/{name}" for repo_id, name in _NAMES.items()}.get
"""The original of a published quantization or derivative; None if it isn't in the table."""
head_repo_of = {
    repo_id: f"mlx-community/{name}-MTP-bf16"
    for repo_id, name in _NAMES.items()
    if name in _WITH_HEAD_ALONE
}.get
"""The repository of its head alone, unquantized; None if it isn't known to have one."""
