"""The parts that `serve` and `generate` put together, made from the command line's options.

Everything heavy is imported when it is needed: see `cli`.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_mtp.config import EngineConfig, ServerConfig
from mlx_mtp.options import BUNDLED_NAME, PREFIX_CACHE_DIR_SIZE

if TYPE_CHECKING:
    from mlx_mtp.cache.prefix_store import PrefixStore
    from mlx_mtp.engine.engine import Engine
    from mlx_mtp.engine.memory import MemoryPlan
    from mlx_mtp.machine import MemoryLimit
    from mlx_mtp.models.loaded import LoadedModel
    from mlx_mtp.server.tokenizer import Tokenizer


def load(
    options: argparse.Namespace,
    *,
    enable_mtp: bool,
    memory: int | None = None,
    lazy: bool = False,
) -> tuple[LoadedModel, Tokenizer]:
    """The model and its tokenizer; `memory` and `lazy` are those of `load_model`."""
    if enable_mtp and options.model is not None:
        from mlx_mtp.convert.hub_head import check_head_on_hub

        check_head_on_hub(options.model)
    from mlx_mtp.models.hub import resolve_model
    from mlx_mtp.models.loader import load_model
    from mlx_mtp.server.tokenizer import Tokenizer

    path = resolve_model(options.model)
    loaded = load_model(path, enable_mtp=enable_mtp, dtype=options.dtype, memory=memory, lazy=lazy)
    return loaded, Tokenizer.load(path)


def memory_limit(options: argparse.Namespace) -> MemoryLimit:
    """What may be used: what --memory-limit says, or what the machine has."""
    from mlx_mtp.machine import MemoryLimit, machine_memory

    given = options.memory_limit
    return machine_memory() if given is None else MemoryLimit(given, "--memory-limit")


def plan_memory(
    model: LoadedModel, options: argparse.Namespace, config: EngineConfig, limit: MemoryLimit
) -> MemoryPlan:
    """How the memory will be shared out, before any weight is read."""
    from mlx_mtp.engine.build import plan_for
    from mlx_mtp.machine import wire_memory

    wanted = options.mtp_draft_vocab
    num_draft_ids = len(wanted) if isinstance(wanted, tuple) else wanted
    plan = plan_for(model, config, limit, num_draft_ids, options.prefix_cache_size)
    wire_memory(limit)
    return plan


def open_prefix_store(
    model: LoadedModel, options: argparse.Namespace, config: EngineConfig, memory: MemoryPlan
) -> PrefixStore | None:
    """The prefix cache on disk, if one is wanted."""
    from mlx_mtp.engine.build import prefix_store

    if options.prefix_cache_dir is None:
        return None
    config = replace(config, prefix_cache_size=memory.prefix_cache)
    size = options.prefix_cache_dir_size or PREFIX_CACHE_DIR_SIZE
    path = Path(options.prefix_cache_dir).expanduser()
    return prefix_store(model, config, options.dtype, path, size)


def read_draft_vocab(options: argparse.Namespace) -> None:
    """Read the file, if one is given: what is wrong with it should not be learnt after a load."""
    from mlx_mtp.server.draft_vocab import read_wanted

    options.mtp_draft_vocab = read_wanted(options.mtp_draft_vocab)


def draft_ids(
    loaded: LoadedModel, tokenizer: Tokenizer, wanted: int | tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The draft vocabulary that --mtp-draft-vocab asks for; None: all tokens."""
    from mlx_mtp.server.draft_vocab import draft_vocabulary

    if wanted is None:
        return None
    return draft_vocabulary(wanted, tokenizer, min(tokenizer.vocab_size, loaded.vocab_size))


def engine(
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    options: argparse.Namespace,
    config: EngineConfig,
    memory: MemoryPlan | None = None,
    store: PrefixStore | None = None,
) -> Engine:
    """An engine that has not begun."""
    import platformdirs

    from mlx_mtp.engine.build import build_engine

    cache_dir = Path(options.cache_dir or platformdirs.user_cache_path("mlx-mtp"))
    return build_engine(
        loaded,
        config,
        tokenizer.vocab_size,
        tokenizer.eos_token_ids,
        cache_dir=cache_dir,
        draft_ids=draft_ids(loaded, tokenizer, options.mtp_draft_vocab),
        memory=memory,
        store=store,
    )


def engine_config(options: argparse.Namespace, **limits: Any) -> EngineConfig:
    """With what both commands have flags for."""
    return EngineConfig(
        num_draft_tokens=options.mtp_num_draft_tokens,
        max_model_len=options.max_model_len,
        prefill_step_size=options.prefill_step_size,
        **limits,
    )


def server_config(options: argparse.Namespace, port: int, keys: tuple[str, ...]) -> ServerConfig:
    """What the server's flags say; the port is the one that was bound."""
    return ServerConfig(
        model_name=options.served_model_name or model_name(options.model),
        host=options.host,
        port=port,
        api_keys=keys,
        allowed_hosts=options.allowed_host,
        cors_origins=options.cors_origin,
        max_body_bytes=options.max_body_size,
        max_choices=options.max_choices,
        seed=options.seed,
        reasoning_parser=options.reasoning_parser,
        tool_call_parser=options.tool_call_parser,
        max_queue=options.max_queue,
        request_timeout=options.request_timeout,
        drain_timeout=options.drain_timeout,
        body_timeout=options.body_timeout,
        max_stored_completions=options.max_stored_completions,
    )


def model_name(model: str | None) -> str:
    """The id that clients see where none is given: a directory's own name, or the hub's."""
    if model is None:
        return BUNDLED_NAME
    # Not resolved: a link's own name is the one that was chosen.
    return os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model


def bits(quantization: str) -> int | None:
    """Of --kv-cache-quantization; None: nothing is quantized."""
    return None if quantization == "none" else int(quantization)
