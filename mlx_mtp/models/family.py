"""What a model family says of itself, and the layers that mlx-lm's instance is patched with."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextAttention, Qwen3NextMLP, Qwen3NextSparseMoeBlock

from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.packing import Packing
from mlx_mtp.cache.specs import AttentionSpec, GatedDeltaSpec, LayerSpec, MLPSpec
from mlx_mtp.errors import UnsupportedModelError
from mlx_mtp.kernels.window import Convolution, Projected, Shape
from mlx_mtp.models.few_rows import project
from mlx_mtp.models.head import MTPHead


class RaggedAttention(Qwen3NextAttention):
    """Runs a window of all rows on a `RaggedKVCache`. With any other cache it is mlx-lm's own."""

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """All rows as one, [1, N, H] to [1, N, H], so that a projection is one product."""
        if not isinstance(cache, RaggedKVCache):
            return super().__call__(x, mask, cache)
        doubled, *entries = project(x, self.q_proj, self.k_proj, self.v_proj)
        self._write(entries, cache, cache.packing)
        return self._attend(doubled, cache, cache.packing)

    def write(self, x: mx.array, cache: RaggedKVCache, packing: Packing) -> None:
        """Write the keys and values of a pass's tokens [1, N, H]."""
        self._write(project(x, self.k_proj, self.v_proj), cache, packing)

    def attend(self, x: mx.array, cache: RaggedKVCache, packing: Packing) -> mx.array:
        """Attention of tokens [1, N, H] whose keys and values have been written."""
        return self._attend(self.q_proj(x), cache, packing)

    def _write(self, entries: list[mx.array], cache: RaggedKVCache, packing: Packing) -> None:
        keys, values = entries
        shape = (keys.shape[1], self.num_key_value_heads, self.head_dim)
        keys = self._rotated(self.k_norm(keys.reshape(shape)), packing)
        cache.write(packing, keys, values.reshape(shape))

    def _attend(self, doubled: mx.array, cache: RaggedKVCache, packing: Packing) -> mx.array:
        """From q_proj's queries and gates."""
        by_head = doubled.reshape(doubled.shape[1], self.num_attention_heads, -1)
        queries, gate = mx.split(by_head, 2, axis=-1)
        queries = self._rotated(self.q_norm(queries), packing)
        attended = cache.attend(packing, queries, self.scale)
        return self.o_proj((attended * mx.sigmoid(gate)).reshape(*doubled.shape[:2], -1))

    def _rotated(self, x: mx.array, packing: Packing) -> mx.array:
        """Queries or keys [N, heads, D] at the tokens' positions."""
        return self.rope(x[:, :, None], offset=packing.positions).squeeze(2)


class WindowedGatedDeltaNet(nn.Module):
    """Mixin over an mlx-lm GatedDeltaNet class that runs windows on a `GatedDeltaCache`."""

    def project(self, x: mx.array) -> tuple[Projected, mx.array]:
        """The input projections of [1, N, H], all [N, ..], and the output's gate z [N, Hv, Dv]."""
        raise NotImplementedError

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, GatedDeltaCache):
            return super().__call__(x, mask, cache)
        projected, z = self.project(x)
        rows = Projected(*map(cache.packing.rows, projected))
        outputs = cache.run(rows, Convolution(self.conv1d.weight, self.A_log, self.dt_bias))
        normed = self.norm(cache.packing.flat(outputs), z)
        return self.out_proj(normed.reshape(*x.shape[:2], -1))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


@dataclass(frozen=True)
class Family:
    """One mlx-lm model family: its layers, and how to reach and patch its parts.

    What is defined here is common to Qwen's hybrids of attention and GatedDeltaNet.
    """

    model_types: tuple[str, ...]  # in config.json; each is also the name of mlx-lm's module
    decoder_layer: type[nn.Module]  # mlx-lm's
    gated_delta_net: type[WindowedGatedDeltaNet]  # direct subclass of mlx-lm's layer
    # Fixes up tensors of the trunk that mlx-lm's own `sanitize` does not handle.
    prepare_weights: Callable[[dict[str, mx.array]], dict[str, mx.array]] = lambda weights: weights

    def layer_specs(self, args: Any) -> list[LayerSpec]:
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
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        return module.Model, module.ModelArgs

    def causal_lm(self, model: nn.Module) -> nn.Module:
        """The module with `.model` (embed_tokens, layers, norm), `.lm_head` and `.args`."""
        return model.get("language_model", model)

    def make_head(self, args: Any, *, moe: bool) -> MTPHead:
        """A head with nothing in it, whose MLP may be of another kind than the trunk's."""
        layer = self.decoder_layer(args, args.full_attention_interval - 1)
        layer.self_attn.__class__ = RaggedAttention
        wanted = Qwen3NextSparseMoeBlock if moe else Qwen3NextMLP
        if type(layer.mlp) is not wanted:
            layer.mlp = wanted(args) if moe else wanted(args.hidden_size, args.intermediate_size)
        return MTPHead(layer, args.hidden_size, args.rms_norm_eps)

    def patch(self, model: nn.Module) -> None:
        """Put our layers into this instance; UnsupportedModelError if mlx-lm's are others."""
        causal_lm = self.causal_lm(model)
        layers = zip(causal_lm.model.layers, self.layer_specs(causal_lm.args), strict=True)
        for index, (layer, spec) in enumerate(layers):
            is_attention = isinstance(spec, AttentionSpec)
            ours = RaggedAttention if is_attention else self.gated_delta_net
            name = "self_attn" if is_attention else "linear_attn"
            inner = layer[name]
            if type(inner) not in ours.__bases__:
                raise UnsupportedModelError(
                    f"Layer {index}'s {name} is not the module that this version of mlx-mtp "
                    "patches. The installed mlx-lm is newer or older than the tested range: "
                    "install mlx-lm>=0.32.2,<0.33."
                )
            inner.__class__ = ours
