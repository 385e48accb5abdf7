"""What a model takes in memory when it is served: weights, and caches by tokens and rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mtp.cache.kv import rounded_capacity
from mlx_mtp.cache.memory import CacheMemory
from mlx_mtp.errors import ModelError
from mlx_mtp.models.draft_head import row_nbytes
from mlx_mtp.models.family import text_config
from mlx_mtp.models.loader import DTYPES, load_model
from mlx_mtp.units import size_text

_ROWS = (1, 16)
_TOKENS = (4096, 32768)
_DEPTHS = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights.

    Args:
        nbytes: of all of them, the head's included.
        dtype: activations have it.
        where: how `nbytes` is meant.
        lm_head_row: bytes of one token's row of lm_head; None if that can't be known.
    """

    nbytes: int
    dtype: mx.Dtype
    where: str
    lm_head_row: int | None = None


def weights_in_memory(path: Path, *, has_head: bool, dtype: str) -> Weights | None:
    """As `serve` would load them here: cast, and perhaps dequantized. No weight is read.

    Args:
        path: the model's directory.
        has_head: load it too.
        dtype: as `load_model` takes it.

    Returns:
        None if the model can't be loaded as it is. Whether it can be computed in `dtype` on this
        machine is not asked: it may be meant for another.
    """
    try:
        loaded = load_model(path, enable_mtp=has_head, dtype=dtype, lazy=True)
    except ModelError:
        return None
    nbytes = sum(value.nbytes for _, value in tree_flatten(loaded.model.parameters()))
    dtype_in_use = loaded.causal_lm.model.norm.weight.dtype
    return Weights(nbytes, dtype_in_use, "as loaded", row_nbytes(loaded))


def weights_on_disk(nbytes: int, config: Mapping[str, Any], dtype: str) -> Weights:
    """As they are stored, where more can't be known.

    Args:
        nbytes: of the files.
        config: config.json, which names the type of the activations.
        dtype: as `load_model` takes it.
    """
    sources = (text_config(config), config)
    stored = next((s[k] for s in sources for k in ("dtype", "torch_dtype") if k in s), "bfloat16")
    if dtype == "auto":
        dtype = "float32" if mx.default_device() == mx.cpu else str(stored)
    return Weights(nbytes, DTYPES.get(dtype, mx.bfloat16), "as stored")


def memory_rows(args: Any, weights: Weights, *, has_head: bool) -> dict[str, str]:
    """Labels and texts of what is printed.

    Args:
        args: mlx-lm's, of the language model.
        weights: of the model.
        has_head: it drafts.
    """
    memory = CacheMemory.of(args, has_head=has_head, itemsize=weights.dtype.size)
    name = str(weights.dtype).removeprefix("mlx.core.")
    head = f" and {memory.head_kv_per_token:,} of the head's" if has_head else ""
    rows = {
        "memory": f"{size_text(weights.nbytes)} of weights {weights.where}; computed in {name}",
        "  per token": f"{memory.kv_per_token:,} bytes of the trunk's keys and values{head}; "
        f"a row's room grows by {rounded_capacity(1)} tokens",
        "  per row": f"{memory.row:,} bytes at any length: {memory.recurrent:,} recurrent state "
        f"(float32), {memory.convolution:,} convolution, {memory.counters} counters",
    }
    depths = _DEPTHS if has_head else _DEPTHS[:1]
    windows = ", ".join(f"{memory.window(k):,} with {k}" for k in depths)
    rows["  per window"] = f"bytes in each row besides, by drafts a step: {windows}"
    depth = depths[-1]
    drafting = f" with {depth} drafts a step" if depth else ""
    if has_head and weights.lm_head_row is not None:
        rows["  draft vocab"] = f"{weights.lm_head_row:,} bytes for each token of --mtp-draft-vocab"
    rows["rows x tokens"] = f"caches{drafting}; the longest row's room is every row's"
    for count, tokens in itertools.product(_ROWS, _lengths(args)):
        # A step is launched before the one before it is read: two windows are on their way.
        caches = memory.batch(count, tokens + 2 * (depth + 1), depth)
        total = size_text(caches + weights.nbytes)
        rows[f"  {count} x {tokens:,}"] = f"{size_text(caches)}; {total} with the weights"
    return rows


def _lengths(args: Any) -> list[int]:
    longest = getattr(args, "max_position_embeddings", None) or _TOKENS[-1]
    return [tokens for tokens in _TOKENS if tokens <= longest] or [longest]
