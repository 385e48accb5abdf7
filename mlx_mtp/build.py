"""From a loaded model to an engine."""

import argparse
import logging
import platform
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mtp import __version__
from mlx_mtp.calibration.calibrator import Calibrator
from mlx_mtp.calibration.chunks import ChunkCalibration
from mlx_mtp.calibration.cost_file import fingerprint
from mlx_mtp.config import (
    MAX_COPY_TOKENS,
    MAX_DRAFT_TOKENS,
    EngineConfig,
    check_settings,
    from_options,
)
from mlx_mtp.distributed import own_folder
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.health import Heartbeat
from mlx_mtp.engine.memory import MemoryPlan, footprint, plan_memory
from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.stats import EngineInfo, EngineStats
from mlx_mtp.engine.warmup import warm_up
from mlx_mtp.errors import UsageError
from mlx_mtp.machine import MemoryLimit
from mlx_mtp.models.files import WEIGHTS
from mlx_mtp.models.gemm.routes import digest, make_batch_invariant
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.options import wants_exact
from mlx_mtp.prefix.cache import PrefixCache
from mlx_mtp.prefix.directory import fingerprint as prefix_fingerprint
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.prefix.policy import PrefixReuse
from mlx_mtp.ranks.leader import LeaderPrefixes, LeaderRunner
from mlx_mtp.ranks.links import Link, Links
from mlx_mtp.ranks.messages import Begin
from mlx_mtp.ranks.segments import LeadStore
from mlx_mtp.sampling.params import check_draft_ids
from mlx_mtp.speculative.costs import COPY, StepCosts
from mlx_mtp.speculative.draft_policy import AdaptiveDrafts, DraftPolicy, FixedDrafts
from mlx_mtp.speculative.draft_sources import make_proposer
from mlx_mtp.speculative.drafter import DraftProposer
from mlx_mtp.speculative.ngram import NgramPool
from mlx_mtp.speculative.prefill_costs import PrefillCosts

logger = logging.getLogger(__name__)


def engine_config(model: LoadedModel, options: argparse.Namespace, **given: Any) -> EngineConfig:
    """The settings that a command line and `given` ask for, and whether the engine is exact."""
    exact = model.is_exact(wants_exact(options))
    return from_options(EngineConfig, options, exact=exact, **given)


def build_engine(
    model: LoadedModel,
    config: EngineConfig,
    tokenizer_vocab_size: int,
    eos_token_ids: tuple[int, ...],
    *,
    proposer: DraftProposer | None = None,
    cache_dir: Path | None = None,  # of step costs; None: not kept between runs
    draft_ids: Sequence[int] | None = None,  # the only tokens to draft; None: all
    memory: MemoryPlan | None = None,  # None: not limited
    store: PrefixStore | None = None,  # closed when the engine is stopped
    heartbeat: Heartbeat | None = None,
    check: bool = False,  # at its start, whether the model can answer
    links: Links | None = None,  # to the other ranks, if there are any
) -> Engine:
    """Build an engine. It speculates if its source of drafts has something to draft with.

    Ids at or above `tokenizer_vocab_size` are never sampled. `proposer` replaces the config's
    source of drafts. UsageError for a limit out of range, or wrong `draft_ids`.
    """
    check_settings(config)
    if config.exact:
        make_batch_invariant(model.model)
    vocab_size = min(tokenizer_vocab_size, model.vocab_size)
    ids = None
    if draft_ids is not None:
        ids = check_draft_ids(draft_ids, vocab_size, "draft_ids")
        is_all = len(ids) == vocab_size
        number = f"all {vocab_size}" if is_all else f"{len(ids)} of {vocab_size}"
        logger.info("Drafts come from %s tokens.", number)
        ids = None if is_all else ids
    own, wanted = None, proposer is None and "mtp" in config.drafts
    if links is not None:
        links.send(Begin(vocab_size, wanted, ids))
    if wanted:
        own = make_proposer(config.draft_source, model, ids)
    if draft_ids is not None and own is None:
        raise UsageError("draft_ids are for the MTP head, and it doesn't draft here.")
    proposer = proposer or own
    sources = (*([] if proposer is None else [config.draft_source]), *([COPY] * config.copies))
    num_draft_tokens = config.num_draft_tokens if sources else 0
    drafts: DraftPolicy
    keeper, chunks = None, PrefillCosts(config.prefill_step_size)
    if num_draft_tokens != "auto":
        drafts = FixedDrafts(num_draft_tokens)
    else:
        costs = StepCosts()
        mark = fingerprint(model, None if ids is None else len(ids), sources)
        drafts = AdaptiveDrafts(costs, 0 if proposer is None else MAX_DRAFT_TOKENS)
        keeper = Calibrator(
            costs, ChunkCalibration(chunks, config), config, cache_dir, mark, sources
        )
    info = EngineInfo(
        vocab_size=vocab_size,
        eos_token_ids=tuple(dict.fromkeys((*model.eos_token_ids, *eos_token_ids))),
        max_model_len=_max_model_len(config, model) if memory is None else memory.max_model_len,
        num_draft_tokens=num_draft_tokens,
        model_type=model.model_type,
        mtp_enabled=proposer is not None,
        max_num_seqs=config.max_num_seqs,
        prefix_cache_size=config.prefix_cache_size,
        memory={} if memory is None else memory.parts(),
        draft_sources=sources,
    )
    size, bits = config.prefix_cache_size, config.kv_cache_quantization
    make_runner, prefixes = ModelRunner, PrefixCache(size, bits, store)
    if links is not None:
        assert store is None or isinstance(store, LeadStore)
        make_runner, prefixes = LeaderRunner, LeaderPrefixes(links, size, bits, store)
    if config.copies:
        # Earlier answers are kept where earlier prompts are.
        prefixes.copies = NgramPool(config.draft_answers_size if config.prefix_cache_size else 0)
    heartbeat = heartbeat or Heartbeat()

    def make_core(totals: EngineStats) -> EngineCore:
        turn_ends = frozenset(info.eos_token_ids)
        step, exact = config.prefill_step_size, config.exact
        reuse = PrefixReuse(prefixes.tree, turn_ends, step, exact=exact)
        usage = None if memory is None else memory.usage
        prefills = PrefillScheduler(config, chunks)
        scheduler = Scheduler(config, drafts, reuse, usage, totals, prefixes.copies, prefills)
        runner = make_runner(model, proposer, vocab_size, prefixes)
        return EngineCore(scheduler, runner, overlap=config.overlap, heartbeat=heartbeat)

    checked = partial(warm_up, config, vocab_size, 1 if num_draft_tokens and proposer else 0)
    return Engine(info, make_core, heartbeat, keeper, store, checked if check else None, links)


def prefix_store(
    model: LoadedModel,
    config: EngineConfig,
    dtype: str,
    path: Path,
    max_bytes: int,
    links: Links | Link | None = None,  # to the other ranks, if there are any
) -> PrefixStore:
    """Open a directory of prefixes; UsageError if that can't be used. No weight is read."""
    if not config.prefix_cache_size:
        raise UsageError(f"--prefix-cache-dir {path}: prefix_cache_size is 0, so nothing is kept.")
    device = mx.device_info()
    packages = [f"{each.name} {each.version}" for each in metadata.distributions()]
    mark = prefix_fingerprint(
        model.config,
        model.path.glob(WEIGHTS),
        head=model.head_source,
        draft_source=config.draft_source,
        kv_bits=config.kv_cache_quantization,
        dtype=dtype,
        exact=config.exact,
        # With a bound of pauses the lengths follow time in any case; and memory, on a GPU.
        prefill_step_size=config.prefill_step_size
        if config.exact or not config.max_decode_pause
        else None,
        device=[mx.default_device(), device.get("device_name"), device.get("architecture")],
        platform=[platform.system(), platform.machine()],
        # CUDA's libraries choose by themselves how they compute a product.
        packages=sorted(each for each in packages if each.startswith(("mlx", "nvidia-"))),
        version=__version__,
    )
    make = partial(LeadStore, links) if isinstance(links, Links) else PrefixStore
    # Bits depend on what was measured when the model was loaded, which is still to come.
    chosen = partial(digest, model.model) if config.exact else str
    return make(own_folder(path), mark, max_bytes, choices=chosen)


def plan_for(
    model: LoadedModel,
    config: EngineConfig,
    limit: MemoryLimit,
    num_draft_ids: int | None = None,
    prefix_cache: int | None = 0,
    longer_steps: bool = False,
) -> MemoryPlan:
    """Share out the memory for a model (see `plan_memory`); no weight is read."""
    wanted, depth = config.num_draft_tokens, 0
    if config.copies:
        depth = MAX_COPY_TOKENS
    elif model.head is not None and "mtp" in config.drafts:
        depth = MAX_DRAFT_TOKENS if wanted == "auto" else wanted
    return plan_memory(
        footprint(model, depth, num_draft_ids),
        limit,
        allowed=_max_model_len(config, model),
        wanted=config.max_model_len,
        prefill_step_size=config.prefill_step_size,
        longer_steps=longer_steps,
        prefix_cache=prefix_cache,
    )


def _max_model_len(config: EngineConfig, model: LoadedModel) -> int:
    wanted, most = config.max_model_len, model.max_model_len
    if wanted is not None and not 2 <= wanted <= most:
        raise UsageError(f"max_model_len is {wanted}; this model allows 2 to {most}.")
    return wanted or most
