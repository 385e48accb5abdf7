"""The flags of `serve` and `generate`."""

from __future__ import annotations

from mlx_mtp.config import (
    DTYPE_NAMES,
    MAX_DRAFT_TOKENS,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    EngineConfig,
    ServerConfig,
)
from mlx_mtp.flags import (
    Flag,
    at_least,
    count_or_path,
    host_name,
    one_of,
    origin,
    real,
    secret,
    size,
    text,
    whole,
    word_or,
)

BUNDLED_NAME = "mlx-mtp-demo"
ANSWER_TOKENS = 512
"""Most tokens that `generate` asks for by itself."""
PREFIX_CACHE_DIR_SIZE = 16 * 10**9
"""Bytes of files that `--prefix-cache-dir` holds by itself."""
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
        one_of("auto", *DTYPE_NAMES),
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
        "--max-queue",
        "most sequences that may wait for a row; a request that brings more is refused with 429",
        whole(0, 1 << 20),
        _SERVER_DEFAULTS.max_queue,
        "N",
    ),
    Flag(
        "--request-timeout",
        "seconds that a request may wait and run; 0: any time",
        at_least(0.0),
        _SERVER_DEFAULTS.request_timeout,
        "SECONDS",
    ),
    Flag(
        "--drain-timeout",
        "seconds that requests get to finish when the server is stopped",
        at_least(0.0),
        _SERVER_DEFAULTS.drain_timeout,
        "SECONDS",
    ),
    Flag(
        "--body-timeout",
        "seconds that a request's body may take to come",
        at_least(0.1),
        _SERVER_DEFAULTS.body_timeout,
        "SECONDS",
    ),
    Flag(
        "--prefix-cache-size",
        "memory for the prefixes of earlier prompts and answers, as 8GB or 512MB; 0 keeps none "
        "(default: a quarter of what the weights leave, at most 8GB)",
        size,
        None,
        "SIZE",
    ),
    Flag(
        "--prefix-cache-dir",
        "a directory of its own where they are kept on the disk as well, in clear, so that they "
        "survive a restart (default: nowhere)",
        text,
        None,
        "DIR",
    ),
    Flag(
        "--prefix-cache-dir-size",
        "most that the files there take (default: 16GB)",
        size,
        None,
        "SIZE",
    ),
    Flag(
        "--memory-limit",
        "most memory for weights, caches and all else, such as 48GB (default: what there is)",
        size,
        None,
        "SIZE",
    ),
    Flag(
        "--kv-cache-quantization",
        "store those prefixes in none, 8 or 4 bits; below none, answers may differ in the last "
        "digit",
        one_of("none", "8", "4"),
        "none",
        "BITS",
    ),
    Flag(
        "--calibration-seconds",
        "most time to measure step costs before the first request; 0 doesn't",
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
    Flag(
        "--api-key",
        "clients must send it as a bearer token; other users of this machine may see it here, but "
        "neither in the variable nor in --api-key-file",
        secret,
        None,
        "KEY",
    ),
    Flag("--api-key-file", "a file with one such key per line", text, None, "FILE"),
    Flag(
        "--allowed-host",
        "another name that clients may call this server by; * for any (repeatable)",
        host_name,
        (),
        "NAME",
        repeated=True,
    ),
    Flag(
        "--cors-origin",
        "a web page that may call this server, like https://chat.example; * for any (repeatable)",
        origin,
        (),
        "ORIGIN",
        repeated=True,
    ),
    Flag(
        "--max-body-size",
        "longest request body, in bytes",
        whole(1, 1 << 30),
        _SERVER_DEFAULTS.max_body_bytes,
        "N",
    ),
    Flag(
        "--max-choices", "largest n of a request", whole(1, 128), _SERVER_DEFAULTS.max_choices, "N"
    ),
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
