"""The command line: the only place where the parts are put together.

Everything heavy (mlx, transformers, FastAPI) is imported inside the commands, so that --help and
mistakes on the command line answer at once, and mlx finds its backend prepared.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlx_mtp import __version__
from mlx_mtp.config import (
    DEFAULT_DRAFT_TOKENS,
    MAX_DRAFT_TOKENS,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    EngineConfig,
    ServerConfig,
)
from mlx_mtp.connect.command import add_connect
from mlx_mtp.convert.commands import add_subcommands
from mlx_mtp.errors import MissingHeadError, MlxMtpError
from mlx_mtp.flags import Flag, add_flags, characters, one_of, real, resolve, text, whole
from mlx_mtp.pipes import CLOSED_PIPE_STATUS, discard, print_or_discard

if TYPE_CHECKING:
    from mlx_mtp.backend import BackendInfo
    from mlx_mtp.engine.engine import Engine
    from mlx_mtp.models.loaded import LoadedModel
    from mlx_mtp.server.tokenizer import Tokenizer

BUNDLED_NAME = "mlx-mtp-demo"
ANSWER_TOKENS = 512
"""Most tokens that `generate` asks for by itself."""
_INT64 = 1 << 63
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug")

_ENGINE_DEFAULTS = EngineConfig()
_SERVER_DEFAULTS = ServerConfig(model_name=BUNDLED_NAME)
_MODEL_HELP = "a directory or a hub id; without it, the bundled demo model"
_ENGINE_FLAGS = (
    Flag(
        "--mtp-num-draft-tokens",
        "tokens that the MTP head drafts per step",
        whole(1, MAX_DRAFT_TOKENS),
        DEFAULT_DRAFT_TOKENS,
        "N",
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


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run a command; returns the exit status."""
    # transformers would advise to install PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        if given.command == "serve":
            return serve(resolve(given, SERVE_FLAGS, environ))
        if given.command == "generate":
            return generate(resolve(given, GENERATE_FLAGS, environ))
        return int(given.run(given))
    except MlxMtpError as error:
        print(f"mlx-mtp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        discard(sys.stdout, sys.stderr)
        return CLOSED_PIPE_STATUS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-mtp",
        description="Serve Qwen3-Next and Qwen3.5+ models with their multi-token-prediction head.",
        epilog="Each flag of serve and generate may also come from an environment variable: "
        "--port is MLX_MTP_PORT.",
    )
    parser.add_argument("--version", action="version", version=f"mlx-mtp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serving = commands.add_parser("serve", help="serve a model with the OpenAI API")
    add_flags(serving, SERVE_FLAGS)
    generating = commands.add_parser("generate", help="stream one answer to the terminal")
    generating.add_argument("prompt", help="what to ask", type=characters)
    add_flags(generating, GENERATE_FLAGS)
    add_connect(commands)
    add_subcommands(commands)
    return parser


def serve(options: argparse.Namespace) -> int:
    """Serve until ctrl-C."""
    from mlx_mtp import backend

    _set_up_logging(options.log_level)
    info = backend.prepare()

    from mlx_mtp.server.app import create_app
    from mlx_mtp.server.serve import bind, make_server

    # The port first: whether it is free should not be learnt after a long load.
    with bind(options.host, options.port) as sock:
        loaded, tokenizer = _load(options, enable_mtp=options.enable_mtp)
        engine = _engine(loaded, tokenizer, options, options.max_num_seqs)
        config = ServerConfig(
            model_name=options.served_model_name or _model_name(options.model),
            host=options.host,
            port=sock.getsockname()[1],
            api_key=options.api_key,
            seed=options.seed,
            reasoning_parser=options.reasoning_parser,
            tool_call_parser=options.tool_call_parser,
        )
        app = create_app(engine, tokenizer, config, loaded.generation_config)
        banner = _banner(config, loaded, engine.info.num_draft_tokens, info)
        server = make_server(
            app, log_level=options.log_level, on_ready=lambda: print_or_discard(banner)
        )
        try:
            server.run(sockets=[sock])
        finally:
            # Leaving by force, uvicorn doesn't stop the engine.
            engine.stop()
    return 0


def generate(options: argparse.Namespace) -> int:
    """Stream one answer to the terminal."""
    from mlx_mtp import backend

    _set_up_logging(options.log_level)
    backend.prepare()

    from mlx_mtp.terminal import stream_answer

    try:
        loaded, tokenizer = _load(options, enable_mtp=options.enable_mtp is not False)
    except MissingHeadError:
        if options.enable_mtp:
            raise
        loaded, tokenizer = _load(options, enable_mtp=False)
    engine = _engine(loaded, tokenizer, options, max_num_seqs=1)
    return stream_answer(engine, tokenizer, loaded.generation_config, options, ANSWER_TOKENS)


def _load(options: argparse.Namespace, *, enable_mtp: bool) -> tuple[LoadedModel, Tokenizer]:
    from mlx_mtp.models.hub import resolve_model
    from mlx_mtp.models.loader import load_model
    from mlx_mtp.server.tokenizer import Tokenizer

    path = resolve_model(options.model)
    loaded = load_model(path, enable_mtp=enable_mtp, dtype=options.dtype)
    return loaded, Tokenizer.load(path)


def _engine(
    loaded: LoadedModel, tokenizer: Tokenizer, options: argparse.Namespace, max_num_seqs: int
) -> Engine:
    from mlx_mtp.engine.build import build_engine

    config = EngineConfig(
        num_draft_tokens=options.mtp_num_draft_tokens if loaded.head_source else 0,
        max_num_seqs=max_num_seqs,
        max_model_len=options.max_model_len,
        prefill_step_size=options.prefill_step_size,
    )
    return build_engine(loaded, config, tokenizer.vocab_size, tokenizer.eos_token_ids)


def _set_up_logging(level: str) -> None:
    # Ours alone: at the level info other libraries tell of each request they make.
    logging.basicConfig(format="%(levelname)s: %(name)s: %(message)s")
    logging.getLogger("mlx_mtp").setLevel(level.upper())


def _model_name(model: str | None) -> str:
    if model is None:
        return BUNDLED_NAME
    return os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model


def _banner(config: ServerConfig, loaded: LoadedModel, depth: int, info: BackendInfo) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{config.port}"
    drafts = f"{depth} tokens per step, head from {loaded.head_source}"
    message = {"role": "user", "content": "Tell me a story."}
    body = json.dumps({"model": config.model_name, "messages": [message]})
    curl = [f"curl {address}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if config.api_key:
        # By its variable's name: what is printed here ends up in logs and on shared screens.
        curl.append('-H "Authorization: Bearer $MLX_MTP_API_KEY"')
    curl.append(f"-d {shlex.quote(body)}")
    return (
        f"\n  address  {address}\n"
        f"  model    {config.model_name} ({loaded.model_type}, {loaded.path})\n"
        f"  backend  {info}\n"
        f"  drafts   {drafts if depth else 'none (--enable-mtp turns MTP on)'}\n\n"
        + " \\\n  ".join(curl)
        + "\n"
    )
