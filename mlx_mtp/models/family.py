"""A model family: its layers, and how mlx-lm's model is patched."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP, Qwen3NextSparseMoeBlock

from mlx_mtp.cache.specs import AttentionSpec, LayerSpec, hybrid_layers
from mlx_mtp.errors import UnsupportedModelError
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.layers import RaggedAttention, Sections, SplitLayer, WindowedGatedDeltaNet
from mlx_mtp.models.spans import Span, spans_of

_SECTIONS = (11, 11, 10)  # M-RoPE frequencies of time, row and column in the published models


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model's part of a config.json."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


@dataclass(frozen=True)
class Family:
    """One mlx-lm model family: its layers, and how to reach and patch its parts.

    The methods are common to Qwen's hybrids of attention and GatedDeltaNet.
    """

    model_types: tuple[str, ...]  # in config.json; each is also the name of mlx-lm's module
    decoder_layer: type[SplitLayer]  # direct subclass of mlx-lm's
    gated_delta_net: type[WindowedGatedDeltaNet]  # direct subclass of mlx-lm's layer
    # Converts tensors of the target model that mlx-lm's own `sanitize` does not handle.
    prepare_weights: Callable[[dict[str, mx.array]], dict[str, mx.array]] = lambda weights: weights
    # The head's quantization, as in config.json, if the model's own does not suit a head.
    head_quantization: Mapping[str, Any] | None = None

    def layer_specs(self, args: Any) -> list[LayerSpec]:
        return hybrid_layers(args)

    def classes(self, config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        return module.Model, module.ModelArgs

    def causal_lm(self, model: nn.Module) -> nn.Module:
        """Returns the module with `.model` (embed_tokens, layers, norm), `.lm_head` and `.args`."""
        return model.get("language_model", model)

    def make_head(self, args: Any, *, moe: bool) -> MTPHead:
        """Returns an MTP head without weights; with `moe` its MLP is a mixture of experts."""
        layer = self.decoder_layer(args, args.full_attention_interval - 1)
        layer.self_attn.__class__ = RaggedAttention
        if moe and type(layer.mlp) is not Qwen3NextSparseMoeBlock:
            layer.mlp = Qwen3NextSparseMoeBlock(args)
        if not moe and type(layer.mlp) is not Qwen3NextMLP:
            layer.mlp = Qwen3NextMLP(args.hidden_size, args.intermediate_size)
        return MTPHead(layer, args.hidden_size, args.rms_norm_eps)

    def set_sections(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        """Set the M-RoPE sections of all attention layers, the head's included."""
        rope = text_config(config).get("rope_parameters") or {}
        _, rows, columns = rope.get("mrope_section") or _SECTIONS
        layers = [*self.causal_lm(model).model.layers, *model.get("mtp", {}).get("layers", [])]
        for layer in layers:
            if "self_attn" in layer:
                layer.self_attn.sections = Sections(rows, columns)

    def next_norms(self, model: nn.Module) -> list[nn.Module]:
        """Returns the norm that follows each layer."""
        trunk = self.causal_lm(model).model
        return [*(layer.input_layernorm for layer in trunk.layers[1:]), trunk.norm]

    def spans(self, model: nn.Module) -> list[Span]:
        """Returns the spans of a patched model's layers, kept until `gemm.exact` drops them."""
        trunk = self.causal_lm(model).model
        if "_spans" not in vars(trunk):
            vars(trunk)["_spans"] = [*spans_of(trunk.layers, self.next_norms(model))]
        spans: list[Span] = vars(trunk)["_spans"]
        return spans

    def patch(self, model: nn.Module) -> None:
        """Change the classes of this instance's layers to this package's.

        Raises UnsupportedModelError if mlx-lm's layers are not the expected ones.
        """
        causal_lm = self.causal_lm(model)
        layers = zip(causal_lm.model.layers, self.layer_specs(causal_lm.args), strict=True)
        for index, (layer, spec) in enumerate(layers):
            is_attention = isinstance(spec, AttentionSpec)
            mixer = RaggedAttention if is_attention else self.gated_delta_net
            name = "self_attn" if is_attention else "linear_attn"
            for what, module, ours in (
                (f"Layer {index}'s {name}", layer[name], mixer),
                (f"Layer {index}", layer, self.decoder_layer),
            ):
                if type(module) not in ours.__bases__:
                    raise UnsupportedModelError(
                        f"{what} is not the module that this version of mlx-mtp patches. The "
                        "installed mlx-lm is newer or older than the tested range: install "
                        "mlx-lm>=0.32.2,<0.33."
                    )
                module.__class__ = ours
