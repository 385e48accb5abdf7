"""A loaded model as the engine sees it: a trunk, perhaps a head, and the caches they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.errors import ModelError, UsageError
from mlx_mtp.models import few_rows
from mlx_mtp.models.family import Family, lm_logits, output_layer, text_config
from mlx_mtp.models.head import MTPHead


@dataclass(frozen=True)
class LoadedModel:
    """The patched mlx-lm instance and what its files say.

    Args:
        path: its directory.
        config: config.json.
        generation_config: generation_config.json, empty if there is none.
        model: mlx-lm's model, patched, with the head as its `mtp` if one was loaded.
        family: how to reach its parts.
        head_source: where the head came from; None without one.
        slow_few_rows: as `few_rows.are_slow` has it.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    model: nn.Module
    family: Family
    head_source: str | None
    slow_few_rows: bool

    @property
    def model_type(self) -> str:
        """As in config.json."""
        return str(self.config["model_type"])

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of config.json."""
        return text_config(self.config)

    @property
    def max_model_len(self) -> int:
        """Most positions the model was made for."""
        return int(self.text_config.get("max_position_embeddings", 4096))

    def check(self) -> None:
        """Check what config.json and generation_config.json say of lengths and token ids.

        Raises:
            ModelError: names the value.
        """
        longest = self.text_config.get("max_position_embeddings", 4096)
        if not isinstance(longest, int) or longest < 2:
            raise ModelError(
                f"{self.path}: max_position_embeddings is {longest!r}, but must be 2 or more."
            )
        for source in (self.generation_config, self.config, self.text_config):
            value = source.get("eos_token_id")
            for token in value if isinstance(value, list) else [value]:
                if token is not None and not _is_token_id(token, self.vocab_size):
                    raise ModelError(
                        f"{self.path}: eos_token_id names {token!r}, but this model's token ids "
                        f"are 0 to {self.vocab_size - 1}."
                    )

    def read(self) -> None:
        """Read the weights, which else are read when they are first used.

        Raises:
            UsageError: this machine can't compute in their type.
        """
        parameters = self.model.parameters()
        if mx.default_device() == mx.cpu:
            for name, value in tree_flatten(parameters):
                if ".switch_mlp." in name and value.dtype in (mx.bfloat16, mx.float16):
                    dtype = str(value.dtype).rpartition(".")[2]
                    raise UsageError(
                        f"--dtype {dtype} can't be used here: on the CPU mlx runs a mixture of "
                        "experts only in float32. Use --dtype float32 or auto."
                    )
        mx.eval(parameters)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        return int(self.causal_lm.args.vocab_size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence, as generation_config.json or else config.json names them."""
        for source in (self.generation_config, self.config, self.text_config):
            value = source.get("eos_token_id")
            if isinstance(value, int):
                return (value,)
            if isinstance(value, list) and value:
                return tuple(value)
        return ()

    @property
    def causal_lm(self) -> nn.Module:
        """The language model inside."""
        return self.family.causal_lm(self.model)

    @property
    def head(self) -> MTPHead | None:
        """The MTP head, if it was loaded."""
        return None if self.head_source is None else self.model.get("mtp")

    def without_head(self) -> LoadedModel:
        """The same weights, to be decoded plainly."""
        return replace(self, head_source=None)

    def make_cache(self, batch_size: int) -> BatchCache:
        """Empty caches for the trunk's layers."""
        layers: list[RaggedKVCache | GatedDeltaCache] = [
            GatedDeltaCache(batch_size, layer.linear_attn.conv_kernel_size)
            if layer.is_linear
            else RaggedKVCache(batch_size)
            for layer in self.causal_lm.model.layers
        ]
        return BatchCache(layers, batch_size)

    def hidden(self, tokens: mx.array, cache: BatchCache) -> mx.array:
        """Post-norm hidden states [B, T, H] of token ids [B, T], for which the cache has begun."""
        batch, length = tokens.shape
        more = self.window_length(batch, length) - length
        if more:
            tokens = mx.pad(tokens, [(0, 0), (0, more)])
            cache.reserve_more(more)
        hidden = self.causal_lm.model(tokens.reshape(1, -1), cache)
        return hidden.reshape(*tokens.shape, -1)[:, :length]

    def logits(self, hidden: mx.array, layer: nn.Module | None = None) -> mx.array:
        """[B, T, V] from post-norm hidden states [B, T, H], the trunk's or the head's.

        Args:
            hidden: post-norm hidden states.
            layer: stands in for lm_head, with other outputs than V (`models/draft_head.py`).
        """
        if layer is None:
            layer = output_layer(self.causal_lm)
        rows = hidden.reshape(-1, hidden.shape[-1])
        count = rows.shape[0]
        if self.slow_few_rows:
            rows = few_rows.filled(rows)
        logits = lm_logits(layer, rows)[:count]
        return logits.reshape(*hidden.shape[:2], -1)

    def window_length(self, batch_size: int, length: int) -> int:
        """Positions a row that a window of `length` is run as (see `few_rows`)."""
        has_experts = getattr(self.causal_lm.args, "num_experts", 0) > 0
        # Of experts the added rows would cost more than the others save.
        if has_experts or not self.slow_few_rows:
            return length
        return few_rows.window_length(batch_size, length)

    def embed(self, tokens: mx.array) -> mx.array:
        """The trunk's embedding of token ids: [..., H]."""
        return self.causal_lm.model.embed_tokens(tokens)


def _is_token_id(value: object, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size
