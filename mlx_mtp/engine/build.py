"""From a loaded model to an engine."""

from __future__ import annotations

from mlx_mtp.config import MAX_DRAFT_TOKENS, EngineConfig
from mlx_mtp.engine.engine import Engine, EngineInfo
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.errors import UsageError
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.speculative.depth import DepthPolicy, FixedDepth
from mlx_mtp.speculative.proposer import MTPProposer, Proposer


def build_engine(
    model: LoadedModel,
    config: EngineConfig,
    tokenizer_vocab_size: int,
    eos_token_ids: tuple[int, ...],
    *,
    proposer: Proposer | None = None,
    depth: DepthPolicy | None = None,
) -> Engine:
    """Put an engine together. It speculates if the model was loaded with its head.

    Args:
        model: as `load_model` gave it.
        config: limits and depth.
        tokenizer_vocab_size: ids at or above it (padding of the embedding) are never sampled.
        eos_token_ids: of the tokenizer; the model's own are added.
        proposer: another source of drafts than the head.
        depth: another choice of depth than the config's fixed one.

    Raises:
        UsageError: a limit is out of range.
    """
    if not 0 <= config.num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise UsageError(
            f"num_draft_tokens is {config.num_draft_tokens}; it must be 0 to {MAX_DRAFT_TOKENS}."
        )
    for name in ("max_num_seqs", "prefill_step_size"):
        if getattr(config, name) < 1:
            raise UsageError(f"{name} is {getattr(config, name)}; it must be 1 or more.")
    if proposer is None and model.head is not None:
        proposer = MTPProposer(model)
    num_draft_tokens = config.num_draft_tokens if proposer is not None else 0
    vocab_size = min(tokenizer_vocab_size, model.vocab_size)
    info = EngineInfo(
        vocab_size=vocab_size,
        eos_token_ids=tuple(dict.fromkeys((*model.eos_token_ids, *eos_token_ids))),
        max_model_len=_max_model_len(config, model),
        num_draft_tokens=num_draft_tokens,
        model_type=model.model_type,
    )
    return Engine(
        info,
        config,
        lambda: ModelRunner(model, proposer, vocab_size),
        depth or FixedDepth(num_draft_tokens),
    )


def _max_model_len(config: EngineConfig, model: LoadedModel) -> int:
    if config.max_model_len is None:
        return model.max_model_len
    if not 2 <= config.max_model_len <= model.max_model_len:
        raise UsageError(
            f"max_model_len is {config.max_model_len}; "
            f"this model allows 2 to {model.max_model_len}."
        )
    return config.max_model_len
