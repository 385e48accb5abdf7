"""The command line: the one module that puts all parts together.

Everything heavy (mlx, transformers, FastAPI) is imported inside the commands, so that --help and
command-line errors answer at once, and mlx finds its backend prepared.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mlx_mtp import __version__, factories
from mlx_mtp.banner import banner
from mlx_mtp.bench.arguments import add_bench, add_selftest, settle_offline
from mlx_mtp.config import EngineConfig, ServerConfig, from_options
from mlx_mtp.connect.command import add_connect
from mlx_mtp.console import CLOSED_PIPE_STATUS, CommandParser, discard, print_or_discard
from mlx_mtp.convert.commands import add_subcommands
from mlx_mtp.errors import BenchError, MissingHeadError, MlxMtpError
from mlx_mtp.flags import add_flags, characters, resolve
from mlx_mtp.inspect.command import add_inspect
from mlx_mtp.options import (
    GENERATE_FLAGS,
    SERVE_FLAGS,
    check_generate,
    check_serve,
    needs_head,
)


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run a command; returns the exit status."""
    # transformers advises to install PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        if given.command == "serve":
            return serve(resolve(given, SERVE_FLAGS, environ))
        if given.command == "generate":
            return generate(resolve(given, GENERATE_FLAGS, environ))
        if given.command == "bench":
            return bench(given, environ)
        if given.command == "selftest":
            return selftest(given)
        return int(given.run(given))
    except MlxMtpError as error:
        print(f"mlx-mtp: {error}", file=sys.stderr)
        return 1 if isinstance(error, BenchError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        discard(sys.stdout, sys.stderr)
        return CLOSED_PIPE_STATUS


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
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
    add_bench(commands)
    add_selftest(commands)
    add_inspect(commands)
    add_subcommands(commands)
    return parser


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal; then finish the running requests (see `server.serve.Server`)."""
    from mlx_mtp import backend

    _set_up_logging(options.log_level)
    check_serve(options)
    factories.read_draft_vocab(options)
    info = backend.prepare()

    from mlx_mtp.server.access import read_keys, warn_if_open
    from mlx_mtp.server.serve import bind, create_app, give_up, make_server, run

    keys = read_keys(options.api_key, options.api_key_file)
    warn_if_open(options.host, options.cors_origin, has_key=bool(keys))
    # The port first: the user should not wait for a long load to learn that it is in use.
    with bind(options.host, options.port) as sock:
        limit = factories.memory_limit(options)
        loaded, tokenizer = factories.load(
            options, enable_mtp=options.enable_mtp, memory=limit.nbytes, lazy=True
        )
        # What can't fit, or a directory that can't be used, is an error before weights are read.
        limits = from_options(EngineConfig, options, prefix_cache_size=0)
        memory = factories.plan_memory(loaded, options, limits, limit)
        limits = replace(limits, prefix_cache_size=memory.prefix_cache)
        store = factories.open_prefix_store(loaded, options, limits)
        loaded.read()
        engine = factories.engine(loaded, tokenizer, options, limits, memory, store)
        config = from_options(
            ServerConfig,
            options,
            model_name=options.served_model_name or factories.model_name(options.model),
            port=sock.getsockname()[1],
            api_keys=keys,
        )
        app = create_app(engine, tokenizer, config, loaded.generation_config)
        # What is loaded stays: garbage collections, which stop every thread, need not visit it.
        gc.collect()
        gc.freeze()
        text = banner(config, loaded, engine.info, info, memory.lines(options.max_num_seqs))
        server = make_server(
            app, log_level=options.log_level, on_ready=lambda: print_or_discard(text)
        )
        ended = run(server, sock, engine.stop)
    if not ended:
        give_up("the engine's thread hangs and can't be ended")
    return 0


def generate(options: argparse.Namespace) -> int:
    """Stream one answer to the terminal."""
    from mlx_mtp import backend

    _set_up_logging(options.log_level)
    check_generate(options)
    factories.read_draft_vocab(options)
    backend.prepare()

    from mlx_mtp.terminal import stream_answer

    try:
        loaded, tokenizer = factories.load(options, enable_mtp=options.enable_mtp is not False)
    except MissingHeadError:
        if needs_head(options):
            raise
        loaded, tokenizer = factories.load(options, enable_mtp=False)
    # No calibration for one answer: the costs that a server measured are used.
    config = from_options(EngineConfig, options, max_num_seqs=1)
    engine = factories.engine(loaded, tokenizer, options, config)
    return stream_answer(engine, tokenizer, loaded.generation_config, options)


def bench(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Measure a server, two of them, or the engine alone."""
    from mlx_mtp.bench import commands

    if options.what != "offline":
        return commands.run_http(options, environ)
    from mlx_mtp.server.draft_vocab import read_wanted

    settle_offline(options)
    commands.check(options)
    wanted = read_wanted(options.mtp_draft_vocab)
    from mlx_mtp import backend

    _set_up_logging("warning")
    info = backend.prepare()
    loaded, tokenizer = factories.load(options, enable_mtp=True)
    draft_ids = factories.draft_ids(loaded, tokenizer, wanted)
    return commands.run_offline(options, loaded, tokenizer, str(info), draft_ids)


def selftest(options: argparse.Namespace) -> int:
    """Check this machine and print a table for a report."""
    from mlx_mtp import backend
    from mlx_mtp.bench.report import check_writable

    check_writable(options.json)
    _set_up_logging("warning")
    if options.dtype == "float32":
        # TF32 would round float32 products; mlx reads this at its first product.
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
    info = backend.prepare()
    loaded, tokenizer = factories.load(options, enable_mtp=True)

    from mlx_mtp.selftest.commands import run_selftest

    return run_selftest(options, loaded, tokenizer, str(info))


def _set_up_logging(level: str) -> None:
    # Only this package's: at level info other libraries log every HTTP request they make.
    logging.basicConfig(format="%(levelname)s: %(name)s: %(message)s")
    logging.getLogger("mlx_mtp").setLevel(level.upper())
