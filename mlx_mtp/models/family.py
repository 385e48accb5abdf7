"""What a model family must say of itself, and the patch that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextAttention, Qwen3NextMLP, Qwen3NextSparseMoeBlock

from mlx_mtp.errors import UnsupportedModelError
from mlx_mtp.models.attention import RaggedAttention
from mlx_mtp.models.gated_delta_net import WindowedGatedDeltaNet


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


class Family(ABC):
    """One mlx-lm model family: how to reach its parts and how to give it a head.

    Attributes:
        model_types: values of `model_type` in config.json.
        stock_gated_delta_net: mlx-lm's layer class, which is checked before it is patched.
        windowed_gated_delta_net: ours, put in its place on the loaded instance.
    """

    model_types: tuple[str, ...]
    stock_gated_delta_net: type[nn.Module]
    windowed_gated_delta_net: type[WindowedGatedDeltaNet]

    @abstractmethod
    def classes(self, config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        """mlx-lm's model and arguments classes for this config."""

    @abstractmethod
    def causal_lm(self, model: nn.Module) -> nn.Module:
        """The module with `.model` (embed_tokens, layers, norm), `.lm_head` and `.args`."""

    @abstractmethod
    def attention_layer(self, args: Any) -> nn.Module:
        """A fresh full-attention decoder layer of this family."""

    def prepare_weights(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Mend what mlx-lm's own `sanitize` does not know of the trunk's tensors."""
        return weights

    def head_layer(self, args: Any, *, moe: bool) -> nn.Module:
        """The decoder layer of an MTP head, whose MLP need not be the trunk's kind.

        Args:
            args: the trunk's arguments.
            moe: whether the head's checkpoint has a router.
        """
        layer = self.attention_layer(args)
        layer.self_attn.__class__ = RaggedAttention
        wanted = Qwen3NextSparseMoeBlock if moe else Qwen3NextMLP
        if type(layer.mlp) is not wanted:
            layer.mlp = wanted(args) if moe else wanted(args.hidden_size, args.intermediate_size)
        return layer

    def patch(self, model: nn.Module) -> None:
        """Put the windowed layers into this instance; mlx-lm's classes stay as they are.

        Raises:
            UnsupportedModelError: mlx-lm's module is not of the shape this was written for.
        """
        trunk = self.causal_lm(model).model
        for index, layer in enumerate(trunk.layers):
            if not layer.is_linear:
                _expect(type(layer.self_attn) is Qwen3NextAttention, index, "self_attn")
                layer.self_attn.__class__ = RaggedAttention
                continue
            inner = layer.linear_attn
            _expect(type(inner) is self.stock_gated_delta_net, index, "linear_attn")
            missing = [n for n in _NEEDED if not hasattr(inner, n)]
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


def lm_logits(layer: nn.Module, hidden: mx.array) -> mx.array:
    """Logits [..., V] of post-norm hidden states [..., H] by an `output_layer` or rows of one."""
    return layer.as_linear(hidden) if hasattr(layer, "as_linear") else layer(hidden)
