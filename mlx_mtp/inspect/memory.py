"""The memory that a served model takes, by the plan that `serve` makes when it starts."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_mtp.cache.layout import GROWTH
from mlx_mtp.cache.specs import CacheMemory
from mlx_mtp.config import MAX_DRAFT_TOKENS, MAX_HOST_DRAFTS, EngineConfig
from mlx_mtp.console import size_text
from mlx_mtp.engine.memory import Footprint, default_plan, footprint
from mlx_mtp.errors import ModelError, UsageError
from mlx_mtp.inspect.found import FoundModel
from mlx_mtp.machine import MemoryLimit
from mlx_mtp.models.family import text_config
from mlx_mtp.models.loader import DTYPES, load_model
from mlx_mtp.server.generation.inputs import model_defaults
from mlx_mtp.text.tokenizer import Tokenizer

_ROWS = (1, 16)
_TOKENS = (4096, 32768)
_DEPTHS = (0, 1, 2, 3, MAX_DRAFT_TOKENS)


class Demand(NamedTuple):
    """The memory that a model needs."""

    footprint: Footprint  # with the maximum number of drafts per step
    dtype: mx.Dtype  # of the activations
    where: str  # "as loaded" or "as stored": how the weights are counted
    allowed: int  # maximum tokens that the model allows
    lm_head_row: int | None = None  # bytes of a token's row of lm_head; None: unknown
    refusal: str | None = None  # the known reason why `serve` would not load the model


def memory_demand(
    found: FoundModel, dtype: str, ranks: int = 1, *, enable_mtp: bool = True
) -> Demand:
    """Returns the demand of a model as `serve` loads it, or by file sizes if it can't be loaded.

    The head that the model has, or that `serve` fetches, is included unless `enable_mtp` is false.
    With several ranks, this is the demand of each. Raises UsageError if the model can't be split
    among the ranks.
    """
    has_head = enable_mtp and (found.head is not None or found.head_bytes > 0)
    refusal = found.refusal
    if found.directory is not None:
        options: dict[str, Any] = {"enable_mtp": has_head, "dtype": dtype, "part": (0, ranks)}
        try:
            model = load_model(found.directory, lazy=True, **options)
            most = EngineConfig().max_image_tokens
            shape = footprint(model, MAX_HOST_DRAFTS, image_tokens=most)
            row = model.row_nbytes()
            refusal = _refusal(model.path, model.generation_config)
            return Demand(shape, model.dtype, "as loaded", model.max_model_len, row, refusal)
        except ModelError as error:
            refusal = str(error)
    target, in_use = found.target, stored_dtype(found.target.config, dtype)
    layers = tuple(spec.part(ranks) for spec in target.family.layer_specs(target.args))
    # Each rank has the whole embedding. Its bits are unknown: count it as unquantized.
    whole = int(target.args.vocab_size) * int(target.args.hidden_size) * in_use.size
    whole = min(whole, found.trunk[0]) if ranks > 1 else 0
    shape = Footprint(
        weights=whole + (found.trunk[0] - whole) // ranks,
        head=found.head_bytes // ranks if has_head else 0,
        caches=CacheMemory(layers, has_head, in_use.size),
        depth=MAX_HOST_DRAFTS,
        vocab_size=int(target.args.vocab_size),
    )
    allowed = getattr(target.args, "max_position_embeddings", None) or _TOKENS[0]
    return Demand(shape, in_use, "as stored", int(allowed), refusal=refusal)


def _refusal(path: Path, generation_config: dict[str, Any]) -> str | None:
    try:
        Tokenizer.load(path)
        model_defaults(generation_config)
    except ModelError as error:
        return str(error)
    return None


def stored_dtype(config: Mapping[str, Any], dtype: str) -> mx.Dtype:
    """Returns the type of activations by config.json alone, for `dtype` as in `load_model`."""
    sources = (text_config(config), config)
    stored = next((s[k] for s in sources for k in ("dtype", "torch_dtype") if k in s), "bfloat16")
    if dtype == "auto":
        dtype = "float32" if mx.default_device() == mx.cpu else str(stored)
    return DTYPES.get(dtype, mx.bfloat16)


def fit_rows(demand: Demand, limit: MemoryLimit) -> dict[str, str]:
    """Returns rows on whether the model fits, and up to which context, or why it can't be served.

    The rows map labels to texts.
    """
    if demand.refusal is not None:
        return {"fits": f"no, it can't be served. {demand.refusal}"}
    try:
        planned = default_plan(demand.footprint, limit, demand.allowed)
    except UsageError as error:
        return {"fits": f"no. {error}"}
    whole = f" of the model's {demand.allowed:,}" if planned.reduced else ""
    return {
        "fits": f"yes, in {size_text(limit.nbytes)} ({limit.source}): context up to "
        f"{planned.max_model_len:,}{whole} tokens",
        "  shares": planned.shares(),
        "  at once": planned.rows_at_once(EngineConfig().max_num_seqs),
    }


def memory_rows(demand: Demand) -> dict[str, str]:
    """Returns rows, from labels to texts, on the memory that each part takes."""
    shape, caches = demand.footprint, demand.footprint.caches
    name = str(demand.dtype).removeprefix("mlx.core.")
    weights = shape.weights + shape.head
    head = f" and {caches.head_kv_per_token:,} of the head's" if caches.has_head else ""
    depths = _DEPTHS if caches.has_head else _DEPTHS[:1]
    windows = ", ".join(f"{caches.window_bytes(k):,} with {k}" for k in depths)
    states = ", ".join(f"{nbytes:,} {what}" for what, nbytes in caches.states.items())
    rows = {
        "memory": f"{size_text(weights)} of weights {demand.where}; computed in {name}",
        "  per token": f"{caches.kv_per_token:,} bytes of the trunk's keys and values{head}, "
        f"allocated in steps of a quarter, {GROWTH} tokens or more",
        "  per row": f"{sum(caches.states.values()):,} bytes at any length: {states}",
        "  per window": f"bytes more per row while it decodes, by drafts a step: {windows}",
    }
    if shape.vision:
        rows["  vision"] = (
            f"{size_text(shape.vision)} for the tower, the largest image in it, and rows of images"
        )
    if caches.has_head and demand.lm_head_row is not None:
        rows["  draft vocab"] = f"{demand.lm_head_row:,} bytes for each token of --mtp-draft-vocab"
    rows["rows x tokens"] = (
        f"what serve sets aside for rows of a length, with up to {shape.depth} drafts a step"
    )
    lengths = [tokens for tokens in _TOKENS if tokens <= demand.allowed] or [demand.allowed]
    for count, tokens in itertools.product(_ROWS, lengths):
        taken = count * shape.row_bytes(tokens)
        chunk = shape.chunk_bytes(EngineConfig().prefill_step_size, tokens)
        total = size_text(taken + chunk + weights)
        rows[f"  {count} x {tokens:,}"] = (
            f"{size_text(taken)}; {total} with a prefill chunk and the weights"
        )
    return rows
