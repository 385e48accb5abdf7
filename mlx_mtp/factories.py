"""Makes what the commands work with (model, tokenizer, engine) from a parsed command line.

Everything heavy is imported inside the functions: see `cli`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_mtp.config import EngineConfig
from mlx_mtp.options import BUNDLED_NAME, PREFIX_CACHE_DIR_SIZE

if TYPE_CHECKING:
    from mlx_mtp.cache.prefix_store import PrefixStore
    from mlx_mtp.engine.engine import Engine
    from mlx_mtp.engine.memory import MemoryPlan
    from mlx_mtp.machine import MemoryLimit
    from mlx_mtp.models.loaded import LoadedModel
    from mlx_mtp.server.tokenizer import Tokenizer


def load(
    options: argparse.Namespace, *, enable_mtp: bool, memory: int | None = None, lazy: bool = False
) -> tuple[LoadedModel, Tokenizer]:
    """Load model and tokenizer; `memory` and `lazy` are arguments of `load_model`."""
    if enable_mtp and options.model is not None:
        from mlx_mtp.convert.source import check_head_on_hub

        check_head_on_hub(options.model)
    from mlx_mtp.models.hub import resolve_model
    from mlx_mtp.models.loader import load_model
    from mlx_mtp.server.tokenizer import Tokenizer

    path = resolve_model(options.model)
    loaded = load_model(path, enable_mtp=enable_mtp, dtype=options.dtype, memory=memory, lazy=lazy)
    return loaded, Tokenizer.load(path)


def memory_limit(options: argparse.Namespace) -> MemoryLimit:
    """The bytes of --memory-limit, or of the machine."""
    from mlx_mtp.machine import MemoryLimit, machine_memory

    given = options.memory_limit
    return machine_memory() if given is None else MemoryLimit(given, "--memory-limit")


def plan_memory(
    model: LoadedModel, options: argparse.Namespace, config: EngineConfig, limit: MemoryLimit
) -> MemoryPlan:
    """Share the memory out before any weight is read."""
    from mlx_mtp.engine.build import plan_for
    from mlx_mtp.machine import wire_memory

    wanted = options.mtp_draft_vocab
    num_draft_ids = len(wanted) if isinstance(wanted, tuple) else wanted
    plan = plan_for(model, config, limit, num_draft_ids, options.prefix_cache_size)
    wire_memory(limit)
    return plan


def open_prefix_store(
    model: LoadedModel, options: argparse.Namespace, config: EngineConfig
) -> PrefixStore | None:
    """Open the prefix cache on disk, if there is a --prefix-cache-dir."""
    from mlx_mtp.engine.build import prefix_store

    if options.prefix_cache_dir is None:
        return None
    size = options.prefix_cache_dir_size or PREFIX_CACHE_DIR_SIZE
    path = Path(options.prefix_cache_dir).expanduser()
    return prefix_store(model, config, options.dtype, path, size)


def read_draft_vocab(options: argparse.Namespace) -> None:
    """Replace the path of --mtp-draft-vocab by the file's ids, before anything is loaded."""
    from mlx_mtp.server.draft_vocab import read_wanted

    options.mtp_draft_vocab = read_wanted(options.mtp_draft_vocab)


def draft_ids(
    loaded: LoadedModel, tokenizer: Tokenizer, wanted: int | tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Token ids of the draft vocabulary; None for all tokens."""
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
    """Build an engine that is not started yet."""
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


def model_name(model: str | None) -> str:
    """The served model's id without --served-model-name: the hub's, or the directory's name."""
    if model is None:
        return BUNDLED_NAME
    # Not resolved: the user chose the name of a link.
    return os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model
