"""The flags of `serve` and `generate`."""

from __future__ import annotations

from mlx_mtp.config import (
    MAX_DRAFT_TOKENS,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    EngineConfig,
    ServerConfig,
)
from mlx_mtp.flags import Flag, at_least, count_or_path, one_of, real, text, whole, word_or

BUNDLED_NAME = "mlx-mtp-demo"
ANSWER_TOKENS = 512
"""Most tokens that `generate` asks for by itself."""
_INT64 = 1 << 63
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug")

_ENGINE_DEFAULTS = EngineConfig()
_SERVER_DEFAULTS = ServerConfig(model_name=BUNDLED_NAME)
_MODEL_HELP = "a directory or a hub id; without it, the bundled demo model"
DRAFT_VOCAB = Flag(
    "--mtp-draft-vocab",
    "draft only the N most frequent tokens, or those of a file with one token id per line "
    "(default: all)",
    count_or_path,
    None,
    "N|FILE",
)
_ENGINE_FLAGS = (
    Flag(
        "--mtp-num-draft-tokens",
        "tokens that the MTP head drafts per step, 0 to 8; auto follows what they cost and bring",
        word_or("auto", whole(0, MAX_DRAFT_TOKENS)),
        _ENGINE_DEFAULTS.num_draft_tokens,
        "N",
    ),
    DRAFT_VOCAB,
    Flag(
        "--cache-dir",
        "where measured step costs are kept (default: the user's cache directory)",
        text,
        None,
        "DIR",
    ),
    Flag("--max-model-len", "most tokens of prompt and answer", whole(2, 1 << 31), None, "N"),
    Flag(
        "--prefill-step-size",
        "prompt tokens computed at once",
        whole(1, 1 << 20),
        _ENGINE_DEFAULTS.prefill_step_size,
        "N",
    ),
    Flag(
        "--dtype",
        "compute in auto, float32, bfloat16 or float16",
        one_of("auto", "float32", "bfloat16", "float16"),
        "auto",
    ),
)
SERVE_FLAGS = (
    Flag("model", _MODEL_HELP, text, None, "MODEL"),
    Flag("--enable-mtp", "draft with the model's own MTP head", None, False),
    *_ENGINE_FLAGS,
    Flag("--host", "address to listen on", text, _SERVER_DEFAULTS.host),
    Flag(
        "--port",
        "port to listen on; 0 takes a free one",
        whole(0, 65535),
        _SERVER_DEFAULTS.port,
        "N",
    ),
    Flag("--served-model-name", "the model's id in the API", text, None, "NAME"),
    Flag(
        "--max-num-seqs",
        "most sequences computed at once",
        whole(1, 4096),
        _ENGINE_DEFAULTS.max_num_seqs,
        "N",
    ),
    Flag(
        "--calibration-seconds",
        "time to measure step costs before the first request, where no run has; 0 doesn't",
        at_least(0.0),
        2.0,
        "X",
    ),
    Flag(
        "--seed",
        "makes the seeds of requests without one repeatable",
        whole(-_INT64, _INT64 - 1),
        None,
        "N",
    ),
    Flag(
        "--reasoning-parser",
        f"how the model writes its reasoning: {', '.join(REASONING_PARSERS)}",
        one_of(*REASONING_PARSERS),
        _SERVER_DEFAULTS.reasoning_parser,
        "NAME",
    ),
    Flag(
        "--tool-call-parser",
        f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)}",
        one_of(*TOOL_CALL_PARSERS),
        _SERVER_DEFAULTS.tool_call_parser,
        "NAME",
    ),
    Flag(
        "--max-stored-completions",
        "chat completions with store: true that are kept in memory; 0 refuses store: true",
        whole(0, 1 << 20),
        _SERVER_DEFAULTS.max_stored_completions,
        "N",
    ),
    Flag("--api-key", "clients must send it as a bearer token", text, None, "KEY"),
    Flag("--log-level", f"one of {', '.join(_LOG_LEVELS)}", one_of(*_LOG_LEVELS), "info", "LEVEL"),
)
GENERATE_FLAGS = (
    Flag("--model", _MODEL_HELP, text, None, "MODEL"),
    Flag("--enable-mtp", "draft with the MTP head (default: if the model has one)", None, None),
    *_ENGINE_FLAGS,
    Flag("--system", "a system message before the prompt", text, None, "TEXT"),
    Flag(
        "--max-tokens",
        f"most tokens to generate (default: the room in the context, at most {ANSWER_TOKENS})",
        whole(1, 1 << 31),
        None,
        "N",
    ),
    Flag("--temperature", "0 takes the most probable token", real, None, "X"),
    Flag("--top-p", "keep the most probable tokens up to this share", real, None, "X"),
    Flag("--top-k", "keep so many of the most probable tokens", whole(0, 1 << 31), None, "N"),
    Flag("--min-p", "keep tokens with this share of the most probable one", real, None, "X"),
    Flag("--repetition-penalty", "1 changes nothing", real, None, "X"),
    Flag("--presence-penalty", "0 changes nothing", real, 0.0, "X"),
    Flag("--frequency-penalty", "0 changes nothing", real, 0.0, "X"),
    Flag("--seed", "the same seed gives the same answer", whole(-_INT64, _INT64 - 1), None, "N"),
    Flag("--stop", "a text that ends the answer", text, None, "TEXT"),
    Flag(
        "--log-level", f"one of {', '.join(_LOG_LEVELS)}", one_of(*_LOG_LEVELS), "warning", "LEVEL"
    ),
)
