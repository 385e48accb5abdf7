"""The composition root: builds a model, a memory plan and an engine from a command line."""

import argparse
import logging
import queue
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import platformdirs

from mlx_mtp.calibration.calibrator import Calibrator
from mlx_mtp.calibration.cost_file import fingerprint
from mlx_mtp.calibration.exactness import decide_exact, expect_exact
from mlx_mtp.config import (
    MAX_DRAFT_TOKENS,
    MAX_HOST_DRAFTS,
    EngineConfig,
    check_settings,
    from_options,
    host_source_names,
)
from mlx_mtp.console import size_text
from mlx_mtp.convert.provide import check_head_on_hub, provide_head
from mlx_mtp.convert.source import check_format_on_hub
from mlx_mtp.embeddings import EmbeddingEngine
from mlx_mtp.engine.chunk_costs import PrefillCosts
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.health import Heartbeat
from mlx_mtp.engine.memory import MemoryPlan, footprint, plan_memory
from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.engine.prompts import Prompts
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.stats import EngineInfo, EngineStats
from mlx_mtp.engine.warmup import warm_up
from mlx_mtp.errors import EngineStoppedError, MissingHeadError, UsageError
from mlx_mtp.inspect.embeddings import embedding_directory as embedding_directory
from mlx_mtp.machine import MemoryLimit, client_text_bytes, memory_limit, wire_memory
from mlx_mtp.models.files import read_json
from mlx_mtp.models.gemm.exact import make_batch_invariant
from mlx_mtp.models.hub import resolve_model
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.options import wants_exact
from mlx_mtp.prefix.cache import PrefixCache
from mlx_mtp.prefix.disk import PrefixStore, open_store
from mlx_mtp.prefix.policy import PrefixReuse
from mlx_mtp.ranks.leader import LeaderPrefixes, LeaderRunner
from mlx_mtp.ranks.links import Link, Links
from mlx_mtp.ranks.messages import Begin
from mlx_mtp.ranks.segments import LeaderStore
from mlx_mtp.sampling.params import check_draft_vocab
from mlx_mtp.speculative.costs import HOST, MTP, StepCosts
from mlx_mtp.speculative.draft_policy import AdaptiveDrafts, DraftPolicy, FixedDrafts
from mlx_mtp.speculative.drafter import MTPDrafter
from mlx_mtp.speculative.host_sources import HostSources
from mlx_mtp.text.draft_vocab import draft_vocabulary
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.vision.images import PROCESSOR, ImageSizes

logger = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds without outputs after which `run_requests` checks the engine's health


def load(
    options: argparse.Namespace,
    *,
    enable_mtp: bool | None,
    lazy: bool = False,
    part: tuple[int, int] = (0, 1),
) -> tuple[LoadedModel, Tokenizer]:
    """Load the model and the tokenizer. With `enable_mtp` None, load the MTP head if there is one.

    `lazy` reads no weights yet; `part` is this rank and the number of ranks. Raises ModelError.
    """
    memory, with_head = getattr(options, "memory_limit", None), enable_mtp is not False
    check_format_on_hub(options.model)
    try:
        if with_head:
            check_head_on_hub(options.model)
        path = resolve_model(options.model)
        if with_head:
            provide_head(options.model, path)
        see = getattr(options, "vision", False)
        given: dict[str, Any] = {"dtype": options.dtype, "memory": memory, "see": see}
        model = load_model(path, enable_mtp=with_head, lazy=lazy, part=part, **given)
    except MissingHeadError as error:
        if enable_mtp is not None:
            raise
        why = f" (it could not be fetched: {error.__cause__})" if error.__cause__ else ""
        on_host = host_source_names(getattr(options, "drafts", "copy"))
        logger.warning(
            "%s has no MTP head%s: %s. `mlx-mtp add-mtp-weights %s` adds it, and then new text is "
            "drafted too; docs/benchmarks.md has what that brings.",
            options.model,
            why,
            "only text that occurred before is drafted" if on_host else "nothing is drafted",
            options.model,
        )
        return load(options, enable_mtp=False, lazy=lazy, part=part)
    return model, Tokenizer.load(path, getattr(options, "chat_template", None))


def load_embeddings(
    options: argparse.Namespace,
) -> tuple[EmbeddingEngine, Tokenizer, Path, MemoryLimit, int]:
    """Load an embedding model.

    Returns its engine, tokenizer, directory, memory limit, and the bytes of memory for the bodies
    and answers of requests. Raises UsageError if the model exceeds the limit.
    """
    path, limit = resolve_model(options.model), memory_limit(options.memory_limit)
    engine = EmbeddingEngine(path, options.dtype, limit.nbytes, options.max_model_len)
    if engine.need > limit.nbytes:
        need, room = size_text(engine.need), f"{size_text(limit.nbytes)} ({limit.source})"
        message = f"{options.model} needs {need} of {room}: --max-model-len lowers it."
        raise UsageError(message)
    wire_memory(limit)
    return engine, Tokenizer.load(path), path, limit, client_text_bytes(limit.nbytes)


class EnginePlan(NamedTuple):
    """An engine's settings, memory plan and disk store, decided before any weight is read."""

    config: EngineConfig
    memory: MemoryPlan
    store: PrefixStore | None


def plan_engine(
    model: LoadedModel, options: argparse.Namespace, links: Links | Link | None = None
) -> EnginePlan:
    """Plan an engine for `serve`, and open its disk store.

    Raises UsageError if the model can't fit or --prefix-cache-dir can't be used.
    """
    config = engine_config(model, options)
    limit = memory_limit(options.memory_limit, None if links is None else links.memory)
    wire_memory(limit)
    vocab, cache = options.mtp_draft_vocab, options.prefix_cache_size
    num_draft_ids = len(vocab) if isinstance(vocab, tuple) else vocab
    # If exact, chunks are not shortened to --max-decode-pause, so the step size stays small.
    longer_steps = options.prefill_step_size is None and not config.exact
    memory = plan_for(model, config, limit, num_draft_ids, cache, longer_steps)
    config = replace(
        config, prefix_cache_size=memory.prefix_cache, prefill_step_size=memory.prefill_step_size
    )
    store = None
    if options.prefix_cache_dir is not None:
        path, size = Path(options.prefix_cache_dir).expanduser(), options.prefix_cache_dir_size
        make = partial(LeaderStore, links) if isinstance(links, Links) else PrefixStore
        store = open_store(model, config, options.dtype, path, size, make)
    return EnginePlan(config, memory, store)


def engine(
    model: LoadedModel,
    tokenizer: Tokenizer,
    options: argparse.Namespace,
    plan: EnginePlan | None = None,
    links: Links | None = None,
) -> Engine:
    """Build an engine for a command line; without a plan it runs one sequence at a time."""
    if plan is None:
        # One answer is too short to calibrate for: use the step costs that a server measured.
        config = settled(model, options, engine_config(model, options, max_num_seqs=1))
    else:
        config = plan.config
    return build_engine(
        model,
        config,
        tokenizer.vocab_size,
        tokenizer.eos_token_ids,
        cache_dir=_cache_dir(options),
        draft_ids=draft_ids(model, tokenizer, options),
        check=True,
        memory=None if plan is None else plan.memory,
        store=None if plan is None else plan.store,
        links=links,
    )


def draft_ids(
    model: LoadedModel, tokenizer: Tokenizer, options: argparse.Namespace
) -> tuple[int, ...] | None:
    """Returns the token ids of --mtp-draft-vocab, or None for all tokens."""
    if options.mtp_draft_vocab is None:
        return None
    size = min(tokenizer.vocab_size, model.vocab_size)
    return draft_vocabulary(options.mtp_draft_vocab, tokenizer, size)


def engine_config(model: LoadedModel, options: argparse.Namespace, **given: Any) -> EngineConfig:
    """Returns the settings of a command line and of `given`, with the expected value of `exact`."""
    exact = expect_exact(model, wants_exact(options), _cache_dir(options))
    return from_options(EngineConfig, options, exact=exact, **given)


def settled(model: LoadedModel, options: argparse.Namespace, config: EngineConfig) -> EngineConfig:
    """Returns the settings with `exact` decided by a check of the model, unless a flag decides it.

    `engine_config` can expect True where the check decides False; a plan for True fits both.
    """
    exact = config.exact and decide_exact(model, wants_exact(options), _cache_dir(options))
    return replace(config, exact=exact)


def _cache_dir(options: argparse.Namespace) -> Path:
    return Path(options.cache_dir or platformdirs.user_cache_path("mlx-mtp")).expanduser()


def build_engine(
    model: LoadedModel,
    config: EngineConfig,
    tokenizer_vocab_size: int,
    eos_token_ids: tuple[int, ...],
    *,
    drafter: MTPDrafter | None = None,
    cache_dir: Path | None = None,  # for step costs; None: they are not kept
    draft_ids: Sequence[int] | None = None,  # ids of tokens that the head may draft; None: all
    memory: MemoryPlan | None = None,  # None: not limited
    store: PrefixStore | None = None,  # closed when the engine is stopped
    heartbeat: Heartbeat | None = None,
    check: bool = False,  # check at the start that the model can answer
    links: Links | None = None,  # to the other ranks, if there are any
) -> Engine:
    """Build an engine without starting it. Only this function joins optional features to the core.

    Token ids at or above `tokenizer_vocab_size` are never sampled. `drafter` replaces the model's
    MTP head. Raises UsageError if a setting is out of range or `draft_ids` are invalid.
    """
    check_settings(config)
    if config.exact:
        make_batch_invariant(model.model, model.dtype)
    vocab_size = min(tokenizer_vocab_size, model.vocab_size)
    ids = None if draft_ids is None else _vocabulary(draft_ids, vocab_size)
    if ids is not None:
        ids = tuple(token for token in ids if token not in model.image_token_ids) or ids
    uses_head = drafter is None and "mtp" in config.drafts and model.head is not None
    # The vision tower's parts don't change its results, so the limit also applies with --exact.
    prompts = Prompts(model, config.max_decode_pause / 1e3)
    if links is not None:
        links.send(Begin(vocab_size, uses_head, ids))
    if uses_head:
        drafter = MTPDrafter(model, ids)
    if draft_ids is not None and not uses_head:
        raise UsageError("draft_ids are for the MTP head, and it doesn't draft here.")
    sources = (*([] if drafter is None else [MTP]), *config.host_sources)
    num_draft_tokens = config.num_draft_tokens if sources else 0
    drafts: DraftPolicy
    calibrator, chunks = None, PrefillCosts(config.prefill_step_size)
    if num_draft_tokens == "auto":
        costs, kinds = StepCosts(), {MTP if source == MTP else HOST for source in sources}
        mark = fingerprint(model, None if ids is None else len(ids), sources)
        drafts = AdaptiveDrafts(costs, 0 if drafter is None else MAX_DRAFT_TOKENS)
        calibrator = Calibrator(costs, chunks, config, cache_dir, mark, kinds)
    else:
        drafts = FixedDrafts(num_draft_tokens)
    info = EngineInfo(
        vocab_size=vocab_size,
        eos_token_ids=tuple(dict.fromkeys((*model.eos_token_ids, *eos_token_ids))),
        max_model_len=_max_model_len(config, model) if memory is None else memory.max_model_len,
        num_draft_tokens=num_draft_tokens,
        model_type=model.model_type,
        mtp_enabled=drafter is not None,
        max_num_seqs=config.max_num_seqs,
        prefix_cache_size=config.prefix_cache_size,
        memory={} if memory is None else memory.bytes_by_use(),
        draft_sources=sources,
        images=image_sizes(model, config.max_image_tokens),
        never_sampled=model.image_token_ids,
    )
    size, bits = config.prefix_cache_size, config.kv_cache_quantization
    make_runner, prefixes = ModelRunner, PrefixCache(size, bits, store)
    if links is not None:
        assert store is None or isinstance(store, LeaderStore)
        make_runner, prefixes = LeaderRunner, LeaderPrefixes(links, size, bits, store)
    # Without a prefix cache, earlier answers are not kept either.
    room = config.draft_answers_size if config.prefix_cache_size else 0
    host_sources = HostSources(config.host_sources, room)
    heartbeat = heartbeat or Heartbeat()

    def make_core(totals: EngineStats) -> EngineCore:
        # Tokens that end an answer also end the messages of a prompt.
        ends, step = frozenset(info.eos_token_ids), config.prefill_step_size
        reuse = PrefixReuse(prefixes.tree, ends, step, exact=config.exact)
        usage = None if memory is None else memory.usage
        prefills = PrefillScheduler(config, chunks)
        scheduler = Scheduler(config, drafts, reuse, usage, totals, host_sources, prefills)
        runner = make_runner(model, drafter, vocab_size, prefixes, host_sources.clear, prompts)
        return EngineCore(scheduler, runner, overlap=config.overlap, heartbeat=heartbeat)

    warm = partial(warm_up, config, vocab_size, 1 if num_draft_tokens and drafter else 0)
    ranks = links or Links()
    engine = Engine(
        info,
        make_core,
        heartbeat,
        calibrator,
        warm if check else None,
        disk_stats=dict if store is None else store.stats,
        can_restart=not ranks.all,  # The other ranks can't be restarted.
        on_failure=ranks.fail,
        on_stop=[*([] if store is None else [store.close]), ranks.close],
    )
    if store is not None:
        store.on_read = engine.wake
    return engine


def image_sizes(model: LoadedModel, most_tokens: int) -> ImageSizes | None:
    """Returns the sizes in which a model takes images; None if it takes none.

    Raises ModelError if the image processor's configuration is invalid.
    """
    if model.tower is None:
        return None
    shape, given = model.tower.shape, model.config.get("preprocessor_config")
    processor = given or read_json(model.path / PROCESSOR, default={})
    sides = shape.patch_size, shape.spatial_merge_size
    return ImageSizes.of(*sides, processor, most_tokens, model.image_token_ids[0])


def _vocabulary(draft_ids: Sequence[int], vocab_size: int) -> tuple[int, ...] | None:
    """Check the ids of the tokens that the head may draft; returns None if they are all tokens."""
    ids = check_draft_vocab(draft_ids, vocab_size, "draft_ids")
    is_all = len(ids) == vocab_size
    number = f"all {vocab_size}" if is_all else f"{len(ids)} of {vocab_size}"
    logger.info("Drafts come from %s tokens.", number)
    return None if is_all else ids


def plan_for(
    model: LoadedModel,
    config: EngineConfig,
    limit: MemoryLimit,
    num_draft_ids: int | None = None,
    prefix_cache: int | None = 0,
    longer_steps: bool = False,
) -> MemoryPlan:
    """Divide the memory for a model (see `plan_memory`); reads no weight."""
    depth = 0
    if config.host_sources:
        depth = MAX_HOST_DRAFTS
    elif model.head is not None and "mtp" in config.drafts:
        count = config.num_draft_tokens
        depth = MAX_DRAFT_TOKENS if count == "auto" else count
    return plan_memory(
        footprint(model, depth, num_draft_ids, config.max_image_tokens),
        limit,
        allowed=_max_model_len(config, model),
        max_model_len=config.max_model_len,
        prefill_step_size=config.prefill_step_size,
        longer_steps=longer_steps,
        prefix_cache=prefix_cache,
    )


def _max_model_len(config: EngineConfig, model: LoadedModel) -> int:
    length, most = config.max_model_len, model.max_model_len
    if length is not None and not 2 <= length <= most:
        raise UsageError(f"--max-model-len is {length}; this model allows 2 to {most}.")
    return length or most


def run_requests(
    engine: Engine, requests: Iterable[Request]
) -> Iterator[tuple[float, RequestOutput]]:
    """Start the engine and run requests to their end; for callers without an event loop.

    Yields the time (`perf_counter`, seconds) of each delivery, and the output. Raises the error
    with which a request ends, or EngineStoppedError.
    """
    delivered = queue.SimpleQueue[tuple[float, Sequence[RequestOutput]]]()
    engine.start(lambda outputs: delivered.put((perf_counter(), outputs)))
    left = 0
    for request in requests:
        engine.submit(request)
        left += 1
    while left:
        reason = engine.unhealthy_reason
        try:
            at, outputs = delivered.get(timeout=PATIENCE)
        except queue.Empty:
            # `reason` was read before the wait, so a dying engine's last outputs have arrived.
            if reason is not None:
                raise EngineStoppedError(f"The engine has stopped: {reason}") from None
            continue
        for output in outputs:
            if output.error is not None:
                raise output.error
            left -= output.finish_reason is not None
            yield at, output
