"""From a loaded model to an engine."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import mlx.core as mx

from mlx_mtp import __version__
from mlx_mtp.cache.prefix_keys import fingerprint as prefix_fingerprint
from mlx_mtp.cache.prefix_store import PrefixStore
from mlx_mtp.config import MAX_DRAFT_TOKENS, DraftTokens, EngineConfig
from mlx_mtp.engine.cost_keeper import CostKeeper, fingerprint
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.heartbeat import Heartbeat
from mlx_mtp.engine.info import EngineInfo
from mlx_mtp.engine.memory import MemoryPlan, footprint, plan_memory
from mlx_mtp.engine.prefix import PrefixCache
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.errors import UsageError
from mlx_mtp.machine import MemoryLimit
from mlx_mtp.models.draft_head import DraftHead
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.speculative.controller import DepthController
from mlx_mtp.speculative.cost_store import CostStore
from mlx_mtp.speculative.costs import StepCosts
from mlx_mtp.speculative.depth import DepthPolicy, FixedDepth
from mlx_mtp.speculative.draft_vocab import check_ids
from mlx_mtp.speculative.proposer import MTPProposer, Proposer

logger = logging.getLogger(__name__)


def build_engine(
    model: LoadedModel,
    config: EngineConfig,
    tokenizer_vocab_size: int,
    eos_token_ids: tuple[int, ...],
    *,
    proposer: Proposer | None = None,
    depth: DepthPolicy | None = None,
    cache_dir: Path | None = None,
    draft_ids: Sequence[int] | None = None,
    memory: MemoryPlan | None = None,
    store: PrefixStore | None = None,
    heartbeat: Heartbeat | None = None,
) -> Engine:
    """Put an engine together. It speculates if the model was loaded with its head.

    Args:
        model: as `load_model` gave it.
        config: limits and depth.
        tokenizer_vocab_size: ids at or above it (padding of the embedding) are never sampled.
        eos_token_ids: of the tokenizer; the model's own are added.
        proposer: another source of drafts than the head.
        depth: another choice of depth than the config's.
        cache_dir: where measured step costs are kept between runs; None: nowhere.
        draft_ids: the only tokens that the head may draft, in any order; None: all.
        memory: how the memory is shared out; None: it is not watched.
        store: of `prefix_store`, where the prefix cache is kept on the disk as well; the engine
            closes it when it is stopped.
        heartbeat: tells whether a step hangs; None: with its usual patience.

    Raises:
        UsageError: a limit is out of range, or `draft_ids` are wrong or not for a head.
    """
    _check_limits(config)
    vocab_size = min(tokenizer_vocab_size, model.vocab_size)
    draft_head = None
    if draft_ids is not None:
        if proposer is not None or model.head is None:
            raise UsageError("draft_ids are for the MTP head, and it doesn't draft here.")
        draft_head = _draft_head(model, check_ids(draft_ids, vocab_size, "draft_ids"), vocab_size)
    if proposer is None and model.head is not None:
        proposer = MTPProposer(model, draft_head)
    num_draft_tokens = config.num_draft_tokens if proposer is not None else 0
    keeper = None
    if depth is None:
        num_ids = None if draft_head is None else draft_head.ids.size
        depth, keeper = _depth_policy(num_draft_tokens, model, num_ids, cache_dir)
    info = EngineInfo(
        vocab_size=vocab_size,
        eos_token_ids=tuple(dict.fromkeys((*model.eos_token_ids, *eos_token_ids))),
        max_model_len=max_model_len(config, model) if memory is None else memory.max_model_len,
        num_draft_tokens=num_draft_tokens,
        model_type=model.model_type,
        mtp_enabled=proposer is not None,
        max_num_seqs=config.max_num_seqs,
        prefix_cache_size=config.prefix_cache_size,
        kv_cache_quantization=config.kv_cache_quantization,
        prefix_cache_dir=None if store is None else store.path,
        prefix_cache_dir_size=0 if store is None else store.max_bytes,
    )
    prefixes = prefix_cache(config, store)
    return Engine(
        info,
        config,
        lambda: ModelRunner(model, proposer, vocab_size, prefixes),
        depth,
        keeper,
        heartbeat,
        prefixes=prefixes,
        memory=None if memory is None else memory.admission(),
        store=store,
    )


def prefix_store(
    model: LoadedModel, config: EngineConfig, dtype: str, path: Path, max_bytes: int
) -> PrefixStore:
    """Open a directory of prefixes; what is there of another model or setting is removed.

    Args:
        model: whose they are; its weights need not have been read yet.
        config: of the engine.
        dtype: that it is loaded with.
        path: of the directory.
        max_bytes: of all files.

    Raises:
        UsageError: the directory can't be used, or there would be no cache to keep in it.
    """
    if not config.prefix_cache_size:
        raise UsageError(f"--prefix-cache-dir {path}: prefix_cache_size is 0, so nothing is kept.")
    device = mx.device_info()
    try:
        mark = prefix_fingerprint(
            model.config,
            model.path.glob("*.safetensors"),
            head=model.head_source,
            kv_bits=config.kv_cache_quantization,
            dtype=dtype,
            prefill_step_size=config.prefill_step_size,
            device=[mx.default_device(), device.get("device_name"), device.get("architecture")],
            platform=[platform.system(), platform.machine()],
            mlx=metadata.version("mlx"),
            version=__version__,
        )
    except OSError as error:
        raise UsageError(
            f"--prefix-cache-dir needs to know the model's files, but {error.filename} can't be "
            f"read: {error.strerror}."
        ) from None
    return PrefixStore(path, mark, max_bytes)


def prefix_cache(config: EngineConfig, store: PrefixStore | None = None) -> PrefixCache | None:
    """The prefix cache that a config asks for, with what its store has.

    Raises:
        UsageError: its size or its bits are out of range.
    """
    size, bits = config.prefix_cache_size, config.kv_cache_quantization
    if size < 0:
        raise UsageError(f"prefix_cache_size is {size}; it must be 0 or more bytes.")
    if bits not in (None, 4, 8):
        raise UsageError(f"kv_cache_quantization is {bits!r}; it must be None, 8 or 4.")
    return PrefixCache(size, bits, store) if size else None


def plan_for(
    model: LoadedModel,
    config: EngineConfig,
    limit: MemoryLimit,
    num_draft_ids: int | None = None,
    prefix_cache: int | None = 0,
) -> MemoryPlan:
    """How memory would be shared out for a model, which need not have been read yet.

    Args:
        model: with its head if that drafts.
        config: limits and depth.
        limit: of all.
        num_draft_ids: size of a reduced draft vocabulary.
        prefix_cache: most bytes of the prefix cache; None: a share of what there is.

    Raises:
        UsageError: it can't fit, or a limit is out of range.
    """
    allowed = max_model_len(config, model)
    auto = config.num_draft_tokens == "auto"
    depth = MAX_DRAFT_TOKENS if auto else int(config.num_draft_tokens)
    return plan_memory(
        footprint(model, depth, num_draft_ids),
        limit,
        allowed=allowed,
        wanted=config.max_model_len,
        prefill_step_size=config.prefill_step_size,
        prefix_cache=prefix_cache,
    )


def _draft_head(model: LoadedModel, ids: tuple[int, ...], vocab_size: int) -> DraftHead | None:
    """Rows of lm_head to draft with; None where it is all of them."""
    if len(ids) == vocab_size:
        logger.info("Drafts come from all %d tokens.", vocab_size)
        return None
    head = DraftHead(model, ids)
    logger.info(
        "Drafts come from %d of %d tokens; their copy of lm_head's rows takes %.1f MB.",
        len(ids),
        vocab_size,
        head.nbytes / 1e6,
    )
    return head


def _depth_policy(
    num_draft_tokens: DraftTokens,
    model: LoadedModel,
    num_draft_ids: int | None,
    cache_dir: Path | None,
) -> tuple[DepthPolicy, CostKeeper | None]:
    """The policy that a depth asks for, and the keeper of what it learns."""
    if num_draft_tokens != "auto":
        return FixedDepth(num_draft_tokens), None
    costs = StepCosts(MAX_DRAFT_TOKENS)
    mark = fingerprint(model, num_draft_ids)
    kept = CostStore(cache_dir, mark) if cache_dir is not None else None
    return DepthController(costs), CostKeeper(costs, kept)


def _check_limits(config: EngineConfig) -> None:
    depth = config.num_draft_tokens
    if depth != "auto" and (type(depth) is not int or not 0 <= depth <= MAX_DRAFT_TOKENS):
        raise UsageError(
            f'num_draft_tokens is {depth!r}; it must be "auto" or 0 to {MAX_DRAFT_TOKENS}.'
        )
    for name in ("max_num_seqs", "prefill_step_size"):
        if getattr(config, name) < 1:
            raise UsageError(f"{name} is {getattr(config, name)}; it must be 1 or more.")


def max_model_len(config: EngineConfig, model: LoadedModel) -> int:
    """Most tokens of prompt and answer, as the model allows and the config wants.

    Raises:
        UsageError: the config wants more than the model allows.
    """
    if config.max_model_len is None:
        return model.max_model_len
    if not 2 <= config.max_model_len <= model.max_model_len:
        raise UsageError(
            f"max_model_len is {config.max_model_len}; "
            f"this model allows 2 to {model.max_model_len}."
        )
    return config.max_model_len
