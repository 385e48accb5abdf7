"""The flags that `serve` and `generate` share; `bench` and `selftest` have some of them too."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_mtp.config import DTYPE_NAMES, MAX_DRAFT_TOKENS, EngineConfig
from mlx_mtp.flags import Flag, choices, count_or_path, one_of, text, whole, word_or

MODEL, MTP, MEMORY = "model", "multi-token prediction", "memory and prefix cache"
"""Headings of the help."""
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
_DTYPES = ("auto", *DTYPE_NAMES)


_ENGINE_DEFAULTS = EngineConfig()
MODEL_HELP = "a directory, or a hub id such as org/name"
MODEL_DEFAULT = "the bundled demo model"
MODEL_ARGUMENT = Flag(
    "model", MODEL_HELP, text, None, "MODEL", group=MODEL, default_text=MODEL_DEFAULT
)
DRAFT_VOCAB = Flag(
    "--mtp-draft-vocab",
    "draft only from the N most frequent tokens, or from the token ids in FILE, one per line",
    count_or_path,
    None,
    "N|FILE",
    group=MTP,
    default_text="all tokens",
)
DTYPE = Flag(
    "--dtype",
    "type to compute in; auto: as stored; float32 on a CPU",
    one_of(*_DTYPES),
    "auto",
    choices(*_DTYPES),
    group=MODEL,
)
MAX_MODEL_LEN = Flag(
    "--max-model-len",
    "most tokens of prompt and answer together",
    whole(2, 1 << 31),
    None,
    "N",
    group=MODEL,
    default_text="the model's limit",
)
NUM_DRAFT_TOKENS = Flag(
    "--mtp-num-draft-tokens",
    f"tokens to draft per step, 0 to {MAX_DRAFT_TOKENS}; auto follows measured cost and acceptance",
    word_or("auto", whole(0, MAX_DRAFT_TOKENS)),
    _ENGINE_DEFAULTS.num_draft_tokens,
    "N|auto",
    group=MTP,
)
CACHE_DIR = Flag(
    "--cache-dir",
    "directory for measured step costs",
    text,
    None,
    "DIR",
    group=MTP,
    default_text="the user's cache directory",
)
PREFILL_STEP_SIZE = Flag(
    "--prefill-step-size",
    "most prompt tokens computed in one step; running streams wait for one such step at a time",
    whole(1, 1 << 20),
    _ENGINE_DEFAULTS.prefill_step_size,
    "N",
    group=MEMORY,
)


def add_options(parser: argparse.ArgumentParser, *flags: Flag) -> None:
    """Add flags that have no environment variables, as `bench` and `selftest` have them."""
    for flag in flags:
        default = f" (default: {flag.shown_default})" if flag.shown_default else ""
        more: dict[str, Any] = {"action": "append"} if flag.repeated else {}
        if not flag.name.startswith("-"):
            more["nargs"] = "?"
        more.update(type=flag.parse, default=flag.default, metavar=flag.metavar)
        parser.add_argument(flag.name, help=flag.help + default, **more)


def log_level(default: str, group: str | None) -> Flag:
    """--log-level with its default and heading."""
    return Flag(
        "--log-level",
        "what to log",
        one_of(*_LOG_LEVELS),
        default,
        choices(*_LOG_LEVELS),
        group=group,
    )
