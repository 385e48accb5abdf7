"""The flags of the commands that take settings, and which flags exclude each other."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mlx_mtp.config import (
    DTYPE_NAMES,
    HOST_DRAFTS,
    SEED,
    EngineConfig,
    RouterConfig,
    ServerConfig,
    flags_of,
    host_source_names,
)
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import Flag, byte_size, count_or_path, integer, nonempty_text, real, secret

BUNDLED_NAME = "mlx-mtp-demo"
ANSWER_TOKENS = 512
"""Maximum tokens of an answer of `generate` without --max-tokens."""
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
_HEADINGS = (
    *("model", "multi-token prediction", "server", "memory and prefix cache", "limits"),
    *("security", "formats", None, "sampling"),
)

_MODEL_HELP = (
    "a directory, a hub id such as org/name, or a name such as qwen3.6-35b; auto: the best that "
    "fits; also as --model"
)
MODEL_FLAG = Flag(
    "model: model MODEL", _MODEL_HELP, nonempty_text, default_text="the bundled demo model"
)
DTYPE = Flag(
    "model: --dtype",
    "type to compute in; auto: as stored; float32 on a CPU",
    ("auto", *DTYPE_NAMES),
    default="auto",
)
DRAFT_VOCAB = Flag(
    "multi-token prediction: --mtp-draft-vocab N|FILE",
    "draft only from the N most frequent tokens, or from the token ids in FILE, one per line",
    count_or_path,
    default_text="all tokens",
)
_CACHE_DIR = Flag(
    "multi-token prediction: --cache-dir DIR",
    "directory for what is measured: step costs, and on a Mac exactness",
    nonempty_text,
    default_text="the user's cache directory",
)
_ENABLE_MTP = Flag(
    "multi-token prediction: --enable-mtp",
    "draft with the model's own MTP head",
    default_text="on if the model has one",
)
_LOG_LEVEL = Flag("server: --log-level", "what to log", _LOG_LEVELS, default="info")
_LOG_FORMAT = Flag(
    "server: --log-format",
    "how to write the log: short lines, or an object with all fields on each line",
    ("text", "json"),
    default="text",
)
_LOG_FILE = Flag(
    "server: --log-file FILE",
    "file for the log; beyond 10 MB it becomes FILE.1, and three such files are kept",
    nonempty_text,
    default_text="standard error",
)


def _in_order(*flags: Flag) -> tuple[Flag, ...]:
    return tuple(sorted(flags, key=lambda flag: _HEADINGS.index(flag.group)))


RANDOMNESS = "randomness; 0 always takes the most probable token"
_OF_MODEL = "the model's generation_config.json"
_SAMPLING = tuple(
    Flag(f"sampling: {usage}", help, parse, default_text=_OF_MODEL)
    for usage, help, parse in (
        ("--temperature X", RANDOMNESS, real),
        ("--top-p X", "keep the most probable tokens that add up to this probability", real),
        (
            "--top-k N",
            "keep only this many of the most probable tokens; 0 or -1: all",
            integer(-1, 1 << 31),
        ),
        ("--min-p X", "keep tokens at least this likely relative to the most probable one", real),
        ("--repetition-penalty X", "above 1, make repeated tokens less likely", real),
    )
)
_PENALTIES = (
    Flag(
        "sampling: --presence-penalty X",
        "lower the score of every token that the answer has already",
        real,
        default=0.0,
    ),
    Flag(
        "sampling: --frequency-penalty X",
        "the same, once for each time that the token occurs",
        real,
        default=0.0,
    ),
)
_MAX_TOKENS = Flag("sampling: --max-tokens N", "most tokens to generate", integer(1, 1 << 31))
_DEFAULTS = (*_SAMPLING, *_PENALTIES, replace(_MAX_TOKENS, default_text="what the context has"))
SAMPLING_DEFAULTS = tuple(flag.key for flag in _DEFAULTS)
"""Keys of the flags of `serve` that set defaults for requests; also fields of `SamplingParams`."""


SERVE_FLAGS = _in_order(
    MODEL_FLAG,
    Flag(
        "model: --served-model-name NAME",
        "the model's id in the API, or one of several (repeatable)",
        nonempty_text,
        default=(),
        repeated=True,
        default_text="the hub id or the directory's name",
    ),
    DTYPE,
    _ENABLE_MTP,
    Flag(
        "memory and prefix cache: --memory-limit SIZE",
        "most memory to use for weights, caches and everything else, such as 48GB",
        byte_size,
        default_text="what the machine has",
    ),
    *flags_of(EngineConfig),
    DRAFT_VOCAB,
    _CACHE_DIR,
    Flag(
        "memory and prefix cache: --prefix-cache-dir DIR",
        "directory that keeps the prefix cache across restarts; prompts and answers are stored "
        "there unencrypted",
        nonempty_text,
        default_text="none",
    ),
    Flag(
        "memory and prefix cache: --prefix-cache-dir-size SIZE",
        "most disk space to use in --prefix-cache-dir",
        byte_size,
        default=16 * 10**9,
        default_text="16GB",
    ),
    Flag(
        "security: --api-key KEY",
        "key that clients must send; other users of this machine can see it on the command "
        "line, but not in the environment variable or in --api-key-file",
        secret,
        default_text="none",
    ),
    Flag(
        "security: --api-key-file FILE",
        "file with API keys, one per line",
        nonempty_text,
        default_text="none",
    ),
    *flags_of(ServerConfig),
    *_DEFAULTS,
    *flags_of(RouterConfig),
    _LOG_LEVEL,
    _LOG_FORMAT,
    _LOG_FILE,
)
_ENGINE = {flag.name: flag for flag in flags_of(EngineConfig)}
EXACT = replace(
    _ENGINE["--exact"],
    usage="model: --exact",
    default_text="on CUDA, where kernels serve all weights",
)
GENERATE_FLAGS = _in_order(
    MODEL_FLAG,
    replace(_ENGINE["--max-model-len"], default_text="the model's limit"),
    DTYPE,
    replace(_ENGINE["--prefill-step-size"], usage="model: --prefill-step-size N"),
    EXACT,
    _ENABLE_MTP,
    _ENGINE["--mtp-num-draft-tokens"],
    DRAFT_VOCAB,
    _CACHE_DIR,
    Flag("--system TEXT", "system message to put before the prompt", nonempty_text),
    replace(
        _MAX_TOKENS,
        usage="--max-tokens N",
        default_text=f"what the context has room for, at most {ANSWER_TOKENS}",
    ),
    Flag("--stop TEXT", "text that ends the answer", nonempty_text),
    replace(_LOG_LEVEL, usage="--log-level", default="warning"),
    *_SAMPLING,
    *_PENALTIES,
    Flag("sampling: --seed N", "the same seed gives the same answer", SEED, default_text="random"),
)
_OF_CHAT: dict[str, dict[str, str]] = {
    "model": {
        "usage": "model: model MODEL|URL",
        "help": "a directory, a hub id, a name such as qwen3.6-35b, auto, or the address of a "
        "running server; also as --model",
    },
    "max_tokens": {"default_text": "what the context has room for"},
}
CHAT_FLAGS = (
    *(replace(flag, **_OF_CHAT.get(flag.key, {})) for flag in GENERATE_FLAGS),  # type: ignore[arg-type]
    Flag("--api-key KEY", "the running server's API key, if it has one", secret),
)
CLIENT_KEY = Flag("--api-key KEY", "the server's API key, if it has one", secret)
COMMAND_FLAGS: Mapping[str, Sequence[Flag]] = {
    "serve": SERVE_FLAGS,
    "generate": GENERATE_FLAGS,
    "chat": CHAT_FLAGS,
    "launch": (CLIENT_KEY,),
    "connect": (CLIENT_KEY,),
    "top": (CLIENT_KEY,),
    "bench": (CLIENT_KEY,),
}
"""The flags of each command that an environment variable or the settings file can set."""
_SAMPLED = [flag.key for flag in GENERATE_FLAGS if flag.group == "sampling"]
SAMPLING = ("max_tokens", "stop", *_SAMPLED)
"""Keys of the flags whose values are fields of a request under the same names."""

_INEXACT = ("--max-decode-pause", "--kv-cache-quantization")
_OF_HEAD = ("--mtp-num-draft-tokens", "--mtp-draft-vocab")


def check_serve(options: argparse.Namespace) -> None:
    """Raise UsageError for flags of `serve` that have no effect or exclude each other."""
    drafts, depth, in_use = options.drafts, options.mtp_num_draft_tokens, _in_use(options)
    is_fixed, uses_head, cache_size = depth != "auto", "mtp" in drafts, options.prefix_cache_size
    names = host_source_names(drafts)
    on_host = names and not is_fixed
    check_generate(options, *([] if on_host else ["--calibration-seconds", "--mtp-optimistic"]))

    def at_fault(wrong: object, *flags: str) -> list[str]:
        return [flag for flag in flags if wrong and flag in in_use]

    # The error messages, each with the flags at fault; a message names the first of its flags.
    faults = {
        "{flag} asks for the head's drafts, and --drafts {drafts} for none.": at_fault(
            not uses_head, "--enable-mtp"
        ),
        "{flag} {drafts} asks for the head's drafts: leave out --no-enable-mtp.": at_fault(
            uses_head and options.enable_mtp is False, "--drafts"
        ),
        "{flag} is for the MTP head's drafts, and --drafts {drafts} has none.": at_fault(
            not uses_head, *_OF_HEAD[not is_fixed :]
        ),
        "--mtp-num-draft-tokens {depth} is a number of the head's drafts, and {flag} {drafts} asks "
        "for {host}: leave one of them out.": at_fault(is_fixed and names, "--drafts"),
        "{flag} is for --mtp-num-draft-tokens auto, and that is {depth}: leave one of them "
        "out.": at_fault(is_fixed, "--calibration-seconds"),
        "{flag} is for drafts, and --drafts none has none.": at_fault(
            drafts == "none", "--mtp-optimistic", "--calibration-seconds"
        ),
        "{flag} is for drafts that are copied: it needs --drafts with copy, --mtp-num-draft-tokens "
        "auto and a prefix cache.": at_fault(
            not on_host or cache_size == 0, "--draft-answers-size"
        ),
        "{flag} is for several API keys: it needs --api-key-file.": at_fault(
            options.api_key_file is None, "--share-prefixes"
        ),
        "{flag} lets tokens depend on what runs beside a request or is cached, and --exact does "
        "not: leave one of them out.": at_fault(options.exact, *_INEXACT),
        "{flag} keeps on the disk what the prefix cache has, and --prefix-cache-size 0 turns that "
        "off: leave one of them out.": at_fault(cache_size == 0, "--prefix-cache-dir"),
        "{flag} stores in {bits} bits what the prefix cache has, and --prefix-cache-size 0 turns "
        "that off: leave one of them out.": at_fault(cache_size == 0, "--kv-cache-quantization"),
    }
    for fault, flags in faults.items():
        if flags:
            values = {"drafts": drafts, "depth": depth, "bits": options.kv_cache_quantization}
            values["host"] = HOST_DRAFTS[names[0]][0] if names else ""
            raise _conflict(options, fault.format(flag=flags[0], **values))
    if options.prefix_cache_dir is None and "prefix_cache_dir_size" in options.given:
        raise _conflict(
            options, "--prefix-cache-dir-size needs --prefix-cache-dir, which is not given."
        )
    if options.prefix_cache_dir is not None and options.prefix_cache_dir_size == 0:
        raise _conflict(
            options,
            "--prefix-cache-dir-size 0 leaves no room: leave --prefix-cache-dir out, or give it a "
            "size.",
        )


def check_generate(options: argparse.Namespace, *more: str) -> None:
    """Raise UsageError for flags of the MTP head, and for `more`, if MTP is off."""
    in_use = _in_use(options) if options.enable_mtp is False else ()
    for flag in (*_OF_HEAD, *more):
        if flag in in_use:
            raise _conflict(
                options,
                f"{flag} is for the MTP head's drafts, but MTP is off: leave out --no-enable-mtp.",
            )


def wants_head(options: argparse.Namespace) -> bool | None:
    """Returns True if flags need the MTP head, False if they exclude it, None if it is optional."""
    if "mtp" not in getattr(options, "drafts", "mtp"):
        return False
    return not _in_use(options).isdisjoint(_OF_HEAD) or options.enable_mtp


def wants_exact(options: argparse.Namespace) -> bool | None:
    """Returns the value of `EngineConfig.exact` that flags ask for; None if they leave it open."""
    exact: bool | None = options.exact
    return False if exact is None and not _in_use(options).isdisjoint(_INEXACT) else exact


def _in_use(options: argparse.Namespace) -> set[str]:
    given = (key for key in options.given if getattr(options, key) not in (None, 0))
    return {f"--{key.replace('_', '-')}" for key in given}


def is_short_name(name: str | None) -> bool:
    """Returns True for a MODEL that is neither a hub id, which has a slash, nor a path."""
    return bool(name) and "/" not in str(name) and not Path(str(name)).expanduser().exists()


def model_name(model: str | None) -> str:
    """Returns the default of --served-model-name: the hub id, or the directory's name."""
    if model is None:
        return BUNDLED_NAME
    # Links are not resolved: the user chose the link's name.
    if not os.path.isdir(model):
        return model
    # A name that is not UTF-8 can't be sent to clients.
    return os.path.basename(os.path.abspath(model)).encode(errors="replace").decode()


def _conflict(options: argparse.Namespace, message: str) -> UsageError:
    """Returns the error for flags that exclude each other, with the source of those not typed."""
    named = {name.replace("-", "_") for name in re.findall(r"--(?:no-)?([a-z-]+)", message)}
    found = {key: source for key, source in options.given.items() if source and key in named}
    if found:
        sources = [f"--{key.replace('_', '-')} is from {source}" for key, source in found.items()]
        message = f"{message.removesuffix('.')} ({'; '.join(sources)})."
    return UsageError(message)
