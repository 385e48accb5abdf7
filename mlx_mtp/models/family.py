"""What a model family says of itself, and how mlx-lm's instance of it is patched."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextAttention, Qwen3NextMLP, Qwen3NextSparseMoeBlock

from mlx_mtp.cache.specs import AttentionSpec, GatedDeltaSpec, LayerSpec, MLPSpec
from mlx_mtp.errors import UnsupportedModelError
from mlx_mtp.kernels.window import Shape
from mlx_mtp.models.layers import RaggedAttention, WindowedGatedDeltaNet


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


class Family:
    """One mlx-lm model family: its layers, and how to reach and patch its parts.

    What is defined here is common to Qwen's hybrids of attention and GatedDeltaNet. A family of
    another kind overrides `layer_specs`, `head_layer` and `patch`.

    Attributes:
        model_types: values of `model_type` in config.json, each also the name of mlx-lm's module.
        decoder_layer: mlx-lm's decoder layer.
        stock_gated_delta_net: mlx-lm's layer class, which is checked before it is patched.
        windowed_gated_delta_net: ours, put in its place on the loaded instance.
    """

    model_types: tuple[str, ...]
    decoder_layer: type[nn.Module]
    stock_gated_delta_net: type[nn.Module]
    windowed_gated_delta_net: type[WindowedGatedDeltaNet]

    def layer_specs(self, args: Any) -> list[LayerSpec]:
        """The trunk's layers in their order, from mlx-lm's arguments of the language model."""
        mlp = MLPSpec(args.hidden_size, getattr(args, "intermediate_size", 0))
        if getattr(args, "num_experts", 0):
            used = args.num_experts_per_tok
            inner = used * args.moe_intermediate_size + args.shared_expert_intermediate_size
            mlp = MLPSpec(args.hidden_size, inner, args.num_experts, used)
        heads = args.num_attention_heads, args.num_key_value_heads
        attention = AttentionSpec(mlp, *heads, args.head_dim)
        keys = args.linear_num_key_heads, args.linear_key_head_dim
        values = args.linear_num_value_heads, args.linear_value_head_dim
        linear = GatedDeltaSpec(mlp, Shape(*keys, *values, args.linear_conv_kernel_dim))
        numbers = range(1, args.num_hidden_layers + 1)
        return [linear if n % args.full_attention_interval else attention for n in numbers]

    def classes(self, config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        """mlx-lm's model and arguments classes for this config."""
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        return module.Model, module.ModelArgs

    def causal_lm(self, model: nn.Module) -> nn.Module:
        """The module with `.model` (embed_tokens, layers, norm), `.lm_head` and `.args`."""
        return model.get("language_model", model)

    def prepare_weights(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Fix up tensors of the trunk that mlx-lm's own `sanitize` does not handle."""
        return weights

    def head_layer(self, args: Any, *, moe: bool) -> nn.Module:
        """A fresh decoder layer for an MTP head, whose MLP may be of another kind than the trunk's.

        Args:
            args: the trunk's arguments.
            moe: whether the head's checkpoint has a router.
        """
        layer = self.decoder_layer(args, args.full_attention_interval - 1)
        layer.self_attn.__class__ = RaggedAttention
        wanted = Qwen3NextSparseMoeBlock if moe else Qwen3NextMLP
        if type(layer.mlp) is not wanted:
            layer.mlp = wanted(args) if moe else wanted(args.hidden_size, args.intermediate_size)
        return layer

    def patch(self, model: nn.Module) -> None:
        """Put our layers into this instance; mlx-lm's classes stay as they are.

        Raises:
            UnsupportedModelError: mlx-lm's module is not of the shape this was written for.
        """
        causal_lm = self.causal_lm(model)
        layers = zip(causal_lm.model.layers, self.layer_specs(causal_lm.args), strict=True)
        for index, (layer, spec) in enumerate(layers):
            if isinstance(spec, AttentionSpec):
                _expect(type(layer.self_attn) is Qwen3NextAttention, index, "self_attn")
                layer.self_attn.__class__ = RaggedAttention
                continue
            inner = layer.linear_attn
            _expect(type(inner) is self.stock_gated_delta_net, index, "linear_attn")
            missing = [name for name in _NEEDED if not hasattr(inner, name)]
            _expect(not missing, index, f"linear_attn (no {', '.join(missing)})")
            inner.__class__ = self.windowed_gated_delta_net


_NEEDED = (
    *("conv1d", "conv_kernel_size", "key_dim", "num_k_heads", "num_v_heads"),
    *("head_k_dim", "head_v_dim", "A_log", "dt_bias", "norm", "out_proj"),
)


def _expect(condition: bool, index: int, what: str) -> None:
    if not condition:
        raise UnsupportedModelError(
            f"Layer {index}'s {what} is not the module that this version of mlx-mtp patches. "
            "The installed mlx-lm is newer or older than the tested range: "
            "install mlx-lm>=0.32.2,<0.33."
        )


def output_layer(causal_lm: nn.Module) -> nn.Module:
    """The trunk's lm_head, or the embedding that it is tied to."""
    if causal_lm.args.tie_word_embeddings:
        return causal_lm.model.embed_tokens
    return causal_lm.lm_head
