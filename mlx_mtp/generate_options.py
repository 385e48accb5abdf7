"""The flags of `generate`."""

from __future__ import annotations

from dataclasses import replace

from mlx_mtp.engine_options import (
    CACHE_DIR,
    DRAFT_VOCAB,
    DTYPE,
    MAX_MODEL_LEN,
    MODEL,
    MODEL_DEFAULT,
    MODEL_HELP,
    MTP,
    NUM_DRAFT_TOKENS,
    PREFILL_STEP_SIZE,
    log_level,
)
from mlx_mtp.flags import Flag, real, text, whole

ANSWER_TOKENS = 512
"""Most tokens that `generate` asks for by itself."""
_INT64 = 1 << 63
_SAMPLING = "sampling"
_OF_MODEL = "the model's generation_config.json"

GENERATE_FLAGS = (
    Flag("--model", MODEL_HELP, text, None, "MODEL", group=MODEL, default_text=MODEL_DEFAULT),
    MAX_MODEL_LEN,
    DTYPE,
    replace(PREFILL_STEP_SIZE, help="most prompt tokens computed in one step", group=MODEL),
    Flag(
        "--enable-mtp",
        "draft with the model's own MTP head",
        None,
        None,
        group=MTP,
        default_text="if it has one",
    ),
    NUM_DRAFT_TOKENS,
    DRAFT_VOCAB,
    CACHE_DIR,
    Flag("--system", "system message to put before the prompt", text, None, "TEXT"),
    Flag(
        "--max-tokens",
        "most tokens to generate",
        whole(1, 1 << 31),
        None,
        "N",
        default_text=f"what the context has room for, at most {ANSWER_TOKENS}",
    ),
    Flag("--stop", "text that ends the answer", text, None, "TEXT"),
    log_level("warning", None),
    Flag(
        "--temperature",
        "randomness; 0 always takes the most probable token",
        real,
        None,
        "X",
        group=_SAMPLING,
        default_text=_OF_MODEL,
    ),
    Flag(
        "--top-p",
        "keep the most probable tokens that add up to this probability",
        real,
        None,
        "X",
        group=_SAMPLING,
        default_text=_OF_MODEL,
    ),
    Flag(
        "--top-k",
        "keep only this many of the most probable tokens; 0 or -1: all",
        whole(-1, 1 << 31),
        None,
        "N",
        group=_SAMPLING,
        default_text=_OF_MODEL,
    ),
    Flag(
        "--min-p",
        "keep tokens at least this likely relative to the most probable one",
        real,
        None,
        "X",
        group=_SAMPLING,
        default_text=_OF_MODEL,
    ),
    Flag(
        "--repetition-penalty",
        "above 1, make repeated tokens less likely",
        real,
        None,
        "X",
        group=_SAMPLING,
        default_text=_OF_MODEL,
    ),
    Flag(
        "--presence-penalty",
        "lower the score of every token that the answer has already",
        real,
        0.0,
        "X",
        group=_SAMPLING,
    ),
    Flag(
        "--frequency-penalty",
        "the same, once for each time that it occurs",
        real,
        0.0,
        "X",
        group=_SAMPLING,
    ),
    Flag(
        "--seed",
        "the same seed gives the same answer",
        whole(-_INT64, _INT64 - 1),
        None,
        "N",
        group=_SAMPLING,
        default_text="random",
    ),
)
