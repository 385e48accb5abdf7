"""What a client of the engine needs to know of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_mtp.config import DraftTokens


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Of one engine, for as long as it lives.

    Args:
        vocab_size: token ids are below this.
        eos_token_ids: ids that end a sequence unless it ignores them.
        max_model_len: most tokens of prompt and answer together.
        num_draft_tokens: drafts per step where a request doesn't say; 0 when MTP is off.
        model_type: as in config.json.
        mtp_enabled: there is a source of drafts.
        max_num_seqs: rows that are computed at once.
        prefix_cache_size: bytes that the prefix cache may take; 0: there is none.
        kv_cache_quantization: bits of the KV in it; None: as it is.
        prefix_cache_dir: where it is kept on the disk as well; None: nowhere.
        prefix_cache_dir_size: bytes that the files may take.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_draft_tokens: DraftTokens
    model_type: str
    mtp_enabled: bool
    max_num_seqs: int
    prefix_cache_size: int = 0
    kv_cache_quantization: int | None = None
    prefix_cache_dir: Path | None = None
    prefix_cache_dir_size: int = 0
