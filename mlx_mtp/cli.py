"""The command line: the only place where the parts are put together.

Everything heavy (mlx, transformers, FastAPI) is imported inside the commands, so that --help and
mistakes on the command line answer at once, and mlx finds its backend prepared.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mlx_mtp import __version__, parts
from mlx_mtp.banner import banner
from mlx_mtp.bench.arguments import add_bench, add_selftest, settle_offline
from mlx_mtp.command_line import CommandParser
from mlx_mtp.connect.command import add_connect
from mlx_mtp.convert.commands import add_subcommands
from mlx_mtp.errors import BenchError, MissingHeadError, MlxMtpError
from mlx_mtp.flag_checks import check_generate, check_serve, needs_head
from mlx_mtp.flags import add_flags, characters, resolve
from mlx_mtp.generate_options import GENERATE_FLAGS
from mlx_mtp.inspect.command import add_inspect
from mlx_mtp.options import SERVE_FLAGS
from mlx_mtp.pipes import CLOSED_PIPE_STATUS, discard, print_or_discard


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
    """Serve until a signal; then finish what has begun (see `server.serve.Server`)."""
    from mlx_mtp import backend

    _set_up_logging(options.log_level)
    check_serve(options)
    parts.read_draft_vocab(options)
    info = backend.prepare()

    from mlx_mtp.server.app import STOP_SECONDS, create_app
    from mlx_mtp.server.auth import read_keys
    from mlx_mtp.server.serve import bind, give_up, make_server, run, warn_if_open

    keys = read_keys(options.api_key, options.api_key_file)
    warn_if_open(options.host, options.cors_origin, has_key=bool(keys))
    # The port first: whether it is free should not be learnt after a long load.
    with bind(options.host, options.port) as sock:
        limits = parts.engine_config(
            options,
            max_num_seqs=options.max_num_seqs,
            calibration_seconds=options.calibration_seconds,
            kv_cache_quantization=parts.bits(options.kv_cache_quantization),
        )
        limit = parts.memory_limit(options)
        loaded, tokenizer = parts.load(
            options, enable_mtp=options.enable_mtp, memory=limit.nbytes, lazy=True
        )
        # Before the weights are read: what can't fit should not be learnt by swapping, nor
        # after a long load that a directory can't be used.
        memory = parts.plan_memory(loaded, options, limits, limit)
        store = parts.open_prefix_store(loaded, options, limits, memory)
        loaded.read()
        limits = replace(limits, prefix_cache_size=memory.prefix_cache)
        engine = parts.engine(loaded, tokenizer, options, limits, memory, store)
        config = parts.server_config(options, sock.getsockname()[1], keys)
        app = create_app(engine, tokenizer, config, loaded.generation_config)
        # What is loaded stays: collections of garbage, which stop every thread, need not walk it.
        gc.collect()
        gc.freeze()
        told = banner(config, loaded, engine.info, info, memory.lines(options.max_num_seqs))
        server = make_server(
            app, log_level=options.log_level, on_ready=lambda: print_or_discard(told)
        )
        ended = run(server, sock, lambda: engine.stop(STOP_SECONDS))
    if not ended:
        give_up("the engine's thread hangs and can't be ended")
    return 0


def generate(options: argparse.Namespace) -> int:
    """Stream one answer to the terminal."""
    from mlx_mtp import backend

    _set_up_logging(options.log_level)
    check_generate(options)
    parts.read_draft_vocab(options)
    backend.prepare()

    from mlx_mtp.terminal import stream_answer

    try:
        loaded, tokenizer = parts.load(options, enable_mtp=options.enable_mtp is not False)
    except MissingHeadError:
        if needs_head(options):
            raise
        loaded, tokenizer = parts.load(options, enable_mtp=False)
    # One answer isn't worth a measurement; what a server or other answers measured is used.
    engine = parts.engine(loaded, tokenizer, options, parts.engine_config(options, max_num_seqs=1))
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
    loaded, tokenizer = parts.load(options, enable_mtp=True)
    draft_ids = parts.draft_ids(loaded, tokenizer, wanted)
    return commands.run_offline(options, loaded, tokenizer, str(info), draft_ids)


def selftest(options: argparse.Namespace) -> int:
    """Check this machine and print a table for a report."""
    from mlx_mtp import backend
    from mlx_mtp.bench.report import check_writable

    check_writable(options.json)
    _set_up_logging("warning")
    if options.dtype == "float32":
        # Who asks for float32 wants its digits; mlx reads this once, at its first product.
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
    info = backend.prepare()
    loaded, tokenizer = parts.load(options, enable_mtp=True)

    from mlx_mtp.selftest.commands import run_selftest

    return run_selftest(options, loaded, tokenizer, str(info))


def _set_up_logging(level: str) -> None:
    # Ours alone: at the level info other libraries tell of each request they make.
    logging.basicConfig(format="%(levelname)s: %(name)s: %(message)s")
    logging.getLogger("mlx_mtp").setLevel(level.upper())
