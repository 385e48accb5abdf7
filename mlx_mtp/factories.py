"""What several commands need first (backend, model, tokenizer, engine), from a command line."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_mtp import backend, logs
from mlx_mtp.config import EngineConfig
from mlx_mtp.errors import MissingHeadError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine
    from mlx_mtp.models.model import LoadedModel
    from mlx_mtp.text.tokenizer import Tokenizer


def prepare(options: argparse.Namespace, log_level: str = "warning") -> backend.BackendInfo:
    """Set up logging, read the file of --mtp-draft-vocab and prepare mlx's backend."""
    from mlx_mtp.text.draft_vocab import read_draft_vocab

    logs.set_up(log_level, getattr(options, "log_format", "text"))
    if "mtp_draft_vocab" in options:
        options.mtp_draft_vocab = read_draft_vocab(options.mtp_draft_vocab)
    return backend.prepare()


def load(
    options: argparse.Namespace,
    *,
    enable_mtp: bool | None,
    lazy: bool = False,
    part: tuple[int, int] = (0, 1),
) -> tuple[LoadedModel, Tokenizer]:
    """Load model and tokenizer; with `enable_mtp` None the model has its head if there is one."""
    from mlx_mtp.convert.source import check_head_on_hub
    from mlx_mtp.models.hub import resolve_model
    from mlx_mtp.models.loader import load_model
    from mlx_mtp.text.tokenizer import Tokenizer

    memory, with_head = getattr(options, "memory_limit", None), enable_mtp is not False
    try:
        if with_head:
            check_head_on_hub(options.model)
        path = resolve_model(options.model)
        model = load_model(
            path,
            enable_mtp=with_head,
            dtype=options.dtype,
            memory=memory,
            lazy=lazy,
            part=part,
        )
    except MissingHeadError:
        if enable_mtp is not None:
            raise
        told = (
            "%s has no MTP head: %s. `mlx-mtp add-mtp-weights %s` adds it, and then new text is "
            "drafted too; docs/benchmarks.md has what that brings."
        )
        copies = "copy" in getattr(options, "drafts", "copy")
        what = "only text that occurred before is drafted" if copies else "nothing is drafted"
        logger.warning(told, options.model, what, options.model)
        return load(options, enable_mtp=False, lazy=lazy, part=part)
    return model, Tokenizer.load(path)


def draft_ids(
    loaded: LoadedModel, tokenizer: Tokenizer, options: argparse.Namespace
) -> tuple[int, ...] | None:
    """Token ids of --mtp-draft-vocab; None for all tokens."""
    from mlx_mtp.text.draft_vocab import draft_vocabulary

    if options.mtp_draft_vocab is None:
        return None
    size = min(tokenizer.vocab_size, loaded.vocab_size)
    return draft_vocabulary(options.mtp_draft_vocab, tokenizer, size)


def engine(
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    options: argparse.Namespace,
    config: EngineConfig | None = None,
    **more: Any,
) -> Engine:
    """Build an engine that is not started yet, by default for one sequence at a time."""
    import platformdirs

    from mlx_mtp.build import build_engine, engine_config

    return build_engine(
        loaded,
        # No calibration for one answer: the costs that a server measured are used.
        config or engine_config(loaded, options, max_num_seqs=1),
        tokenizer.vocab_size,
        tokenizer.eos_token_ids,
        cache_dir=Path(options.cache_dir or platformdirs.user_cache_path("mlx-mtp")),
        draft_ids=draft_ids(loaded, tokenizer, options),
        check=True,
        **more,
    )
