"""Models that make embeddings (Qwen3-Embedding): a text's vector is its last token's state."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_mtp.errors import CheckpointError
from mlx_mtp.models.loader import cast
from mlx_mtp.models.model import module_nbytes

STEP_TOKENS = 2048  # that are computed at once


class _Model(qwen3.Model):
    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        # The originals are saved without lm_head, and without this prefix.
        named = {"model." + name.removeprefix("model."): each for name, each in weights.items()}
        return {name: each for name, each in named.items() if "lm_head" not in name}


class EmbeddingModel:
    """A model whose weights are not read yet. `dtype` and `memory` are as for `loader.load_model`.

    `max_tokens` are the most of a text, None: what the model allows. Raises CheckpointError.
    """

    def __init__(self, path: Path, dtype: str, memory: int, max_tokens: int | None = None) -> None:
        given: dict[str, Any] = {"model_config": {"tie_word_embeddings": True}, "lazy": True}
        given["get_model_classes"] = lambda **_: (_Model, qwen3.ModelArgs)
        try:
            model, self.config = load_model(path, **given)
        except Exception as error:  # Whatever mlx-lm raises, these files can't be used.
            raise CheckpointError(f"{path} can't be loaded: {error!s:.1000}") from error
        self._model: nn.Module = model.model
        cast(model, dtype, self._model.norm.weight.dtype, memory)
        self.size, self.nbytes = int(self.config["hidden_size"]), module_nbytes(model)
        self.max_tokens, self.need = memory_need(self.config, self.nbytes, max_tokens)

    def load_weights(self) -> None:
        mx.eval(self._model.parameters())

    def __call__(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """The vectors of a group of rows of token ids (`groups`), float32 [rows, size].

        They are not normalized.
        """
        lengths = np.array([len(row) for row in rows])
        # Attention is causal: what follows a row's end changes nothing in it.
        ids = np.zeros((len(rows), lengths.max()), np.int32)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
        cache = make_prompt_cache(self._model) if ids.shape[1] > STEP_TOKENS else None
        for start in range(0, ids.shape[1], STEP_TOKENS):
            hidden = self._model(mx.array(ids[:, start : start + STEP_TOKENS]), cache)
            mx.eval(hidden)
        last = hidden[mx.arange(len(rows)), mx.array(lengths - 1 - start)]
        return np.array(last.astype(mx.float32))


def groups(rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Divide rows by length: the indices of those that take one step, or of one longer row."""
    group: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
        if group and (len(group) + 1) * len(rows[index]) > STEP_TOKENS:
            yield group
            group = []
        group.append(index)
    yield group


def memory_need(config: Mapping[str, Any], weights: int, given: int | None) -> tuple[int, int]:
    """The most tokens of a text, and the bytes that a model takes: weights, such a text, a step."""
    most = int(config["max_position_embeddings"])
    tokens = min(most, given or most)
    row = 8 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    step = 4 * STEP_TOKENS * (8 * config["hidden_size"] + 3 * config["intermediate_size"])
    return tokens, int(weights + row * tokens + step)
