"""Embeddings (Qwen3-Embedding): a text's vector is the hidden state of its last token."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_mtp.engine.stats import EngineInfo, EngineStats
from mlx_mtp.errors import CheckpointError
from mlx_mtp.models.loader import cast
from mlx_mtp.models.model import module_nbytes

STEP_TOKENS = 2048  # tokens of a forward pass


class _Model(qwen3.Model):
    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        # The original checkpoints have no lm_head, and their names lack this prefix.
        named = {"model." + name.removeprefix("model."): each for name, each in weights.items()}
        return {name: each for name, each in named.items() if "lm_head" not in name}


class EmbeddingEngine:
    """An embedding model on its own thread, with `Engine`'s interface; `launch` reads the weights.

    `dtype` and `memory` are as for `loader.load_model`, `most` is as for `memory_need`. Raises
    CheckpointError if the model can't be loaded.
    """

    unhealthy_reason = hang_reason = None

    def __init__(self, path: Path, dtype: str, memory: int, most: int | None = None) -> None:
        given: dict[str, Any] = {"model_config": {"tie_word_embeddings": True}, "lazy": True}
        given["get_model_classes"] = lambda **_: (_Model, qwen3.ModelArgs)
        try:
            model, config = load_model(path, **given)
        except Exception as error:  # Whatever mlx-lm raises, these files can't be used.
            raise CheckpointError(f"{path} can't be loaded: {error!s:.1000}") from error
        self._model: Any = model.model
        cast(model, dtype, self._model.norm.weight.dtype, memory)
        tokens, self.need = memory_need(config, weights := module_nbytes(model), most)
        self.info = EngineInfo(
            vocab_size=config["vocab_size"],
            max_model_len=tokens,
            model_type=config["model_type"],
            memory={"weights": weights, "head": 0},
            embedding_size=config["hidden_size"],
        )
        self._stats = EngineStats()
        self.threads = ThreadPoolExecutor(1, "mlx-mtp-engine")

    def embed(self, rows: Sequence[Sequence[int]], size: int) -> np.ndarray:
        """Returns the normalized vectors of a group of rows of token ids, float32 [rows, size].

        The group is one of `groups`. A vector is the first `size` elements of the hidden state,
        normalized. Call it on the engine's thread.
        """
        # Attention is causal: the padding after a row's end doesn't affect the row.
        ids = np.array([*zip_longest(*rows, fillvalue=0)], np.int32).T
        cache = make_prompt_cache(self._model)
        for start in range(0, ids.shape[1], STEP_TOKENS):
            hidden = self._model(mx.array(ids[:, start : start + STEP_TOKENS]), cache)
            mx.eval(hidden)
        ends = mx.array([len(row) - 1 - start for row in rows])
        last = hidden[mx.arange(len(rows)), ends, :size].astype(mx.float32)
        self._stats.prompt_tokens += sum(map(len, rows))
        return np.array(last / mx.maximum(mx.linalg.norm(last, axis=1, keepdims=True), 1e-12))

    @staticmethod
    def groups(rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yields groups of row indices, longest rows first: rows that fit a step, or one longer."""
        left = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        while left:
            count = max(1, STEP_TOKENS // len(rows[left[0]]))
            yield left[:count]
            left = left[count:]

    def stats(self) -> EngineStats:
        return self._stats

    def launch(self) -> None:
        """Read the weights and run a step, which compiles the kernels."""
        mx.eval(self._model.parameters())  # on the thread that created the arrays
        self.threads.submit(self.embed, [(0,)], 1).result()

    def stop(self, timeout: float | None) -> bool:
        # mlx aborts the process at exit if a thread has not cleared its streams.
        self.threads.submit(mx.clear_streams)
        self.threads.shutdown()
        return True

    # The rest of `Engine`'s interface is about answers, and there are none.
    start = expect_request = resume = cancel = lambda *_: None


def memory_need(config: Mapping[str, Any], weights: int, most: int | None) -> tuple[int, int]:
    """Returns the tokens of the longest text and the bytes of the weights, this text and a step.

    `weights` is in bytes. The text has as many tokens as the model allows, at most `most`.
    """
    tokens = min(config["max_position_embeddings"], most or math.inf)
    row = 8 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    step = 4 * STEP_TOKENS * (8 * config["hidden_size"] + 3 * config["intermediate_size"])
    return int(tokens), int(weights + row * tokens + step)
