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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_mtp import __version__
from mlx_mtp.banner import banner
from mlx_mtp.bench.arguments import add_bench, offline_spelling
from mlx_mtp.config import EngineConfig, ServerConfig
from mlx_mtp.connect.command import add_connect
from mlx_mtp.convert.commands import add_subcommands
from mlx_mtp.errors import BenchError, MissingHeadError, MlxMtpError, UsageError
from mlx_mtp.flags import add_flags, characters, resolve
from mlx_mtp.options import (
    ANSWER_TOKENS,
    BUNDLED_NAME,
    GENERATE_FLAGS,
    PREFIX_CACHE_DIR_SIZE,
    SERVE_FLAGS,
)
from mlx_mtp.pipes import CLOSED_PIPE_STATUS, discard, print_or_discard
from mlx_mtp.selftest.arguments import add_selftest

if TYPE_CHECKING:
    from mlx_mtp.cache.prefix_store import PrefixStore
    from mlx_mtp.engine.engine import Engine
    from mlx_mtp.engine.memory_plan import MemoryPlan
    from mlx_mtp.models.loaded import LoadedModel
    from mlx_mtp.server.tokenizer import Tokenizer


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run a command; returns the exit status."""
    # transformers would advise to install PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    parser = _parser()
    given = parser.parse_args(offline_spelling(sys.argv[1:] if argv is None else argv))
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
    add_bench(commands)
    add_selftest(commands)
    add_subcommands(commands)
    return parser


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal; then finish what has begun (see `server.serve.Server`)."""
    from mlx_mtp import backend

    _set_up_logging(options.log_level)
    _read_draft_vocab(options, may_draft=options.enable_mtp)
    _check_prefix_cache_dir(options)
    info = backend.prepare()

    from mlx_mtp.server.app import STOP_SECONDS, create_app
    from mlx_mtp.server.auth import read_keys
    from mlx_mtp.server.serve import bind, give_up, make_server, warn_if_open

    keys = read_keys(options.api_key, options.api_key_file)
    warn_if_open(options.host, options.cors_origin, has_key=bool(keys))
    # The port first: whether it is free should not be learnt after a long load.
    with bind(options.host, options.port) as sock:
        limits = _engine_config(
            options,
            max_num_seqs=options.max_num_seqs,
            calibration_seconds=options.calibration_seconds,
            kv_cache_quantization=_bits(options.kv_cache_quantization),
        )
        plans: list[tuple[MemoryPlan, PrefixStore | None]] = []

        def plan(model: LoadedModel) -> None:
            # Before the weights are read: what can't fit should not be learnt by swapping, nor
            # after a long load that a directory can't be used.
            memory = _plan_memory(model, options, limits)
            plans.append((memory, _open_prefix_store(model, options, limits, memory)))

        loaded, tokenizer = _load(
            options,
            enable_mtp=options.enable_mtp,
            before_reading=plan,
        )
        ((memory, store),) = plans
        limits = replace(limits, prefix_cache_size=memory.prefix_cache)
        engine = _engine(loaded, tokenizer, options, limits, memory, store)
        config = ServerConfig(
            model_name=options.served_model_name or _model_name(options.model),
            host=options.host,
            port=sock.getsockname()[1],
            api_keys=keys,
            allowed_hosts=options.allowed_host,
            cors_origins=options.cors_origin,
            max_body_bytes=options.max_body_size,
            max_choices=options.max_choices,
            seed=options.seed,
            reasoning_parser=options.reasoning_parser,
            tool_call_parser=options.tool_call_parser,
            max_queue=options.max_queue,
            request_timeout=options.request_timeout,
            drain_timeout=options.drain_timeout,
            body_timeout=options.body_timeout,
            max_stored_completions=options.max_stored_completions,
        )
        app = create_app(engine, tokenizer, config, loaded.generation_config)
        # What is loaded stays: collections of garbage, which stop every thread, need not walk it.
        gc.collect()
        gc.freeze()
        told = banner(config, loaded, engine.info, info, memory.lines(options.max_num_seqs))
        server = make_server(
            app, log_level=options.log_level, on_ready=lambda: print_or_discard(told)
        )
        try:
            server.run(sockets=[sock])
        finally:
            # Leaving by force, uvicorn doesn't stop the engine.
            ended = engine.stop(STOP_SECONDS)
    if not ended:
        give_up("the engine's thread hangs and can't be ended")
    return 0


def generate(options: argparse.Namespace) -> int:
    """Stream one answer to the terminal."""
    from mlx_mtp import backend

    _set_up_logging(options.log_level)
    _read_draft_vocab(options, may_draft=options.enable_mtp is not False)
    backend.prepare()

    from mlx_mtp.terminal import stream_answer

    try:
        loaded, tokenizer = _load(options, enable_mtp=options.enable_mtp is not False)
    except MissingHeadError:
        if options.enable_mtp or options.mtp_draft_vocab is not None:
            raise
        loaded, tokenizer = _load(options, enable_mtp=False)
    # One answer isn't worth a measurement; what a server or other answers measured is used.
    engine = _engine(loaded, tokenizer, options, _engine_config(options, max_num_seqs=1))
    return stream_answer(engine, tokenizer, loaded.generation_config, options, ANSWER_TOKENS)


def bench(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Measure a server, two of them, or the engine alone."""
    from mlx_mtp.bench import commands

    if options.what != "offline":
        return commands.run_http(options, environ)
    from mlx_mtp.server.draft_vocab import read_wanted

    commands.check(options)
    wanted = read_wanted(options.mtp_draft_vocab)
    from mlx_mtp import backend

    _set_up_logging("warning")
    info = backend.prepare()
    loaded, tokenizer = _load(options, enable_mtp=True)
    draft_ids = _draft_ids(loaded, tokenizer, wanted)
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
    loaded, tokenizer = _load(options, enable_mtp=True)

    from mlx_mtp.selftest.commands import run_selftest

    return run_selftest(options, loaded, tokenizer, str(info))


def _load(
    options: argparse.Namespace,
    *,
    enable_mtp: bool,
    before_reading: Callable[[LoadedModel], None] = lambda _: None,
) -> tuple[LoadedModel, Tokenizer]:
    from mlx_mtp.models.hub import resolve_model
    from mlx_mtp.models.loader import load_model
    from mlx_mtp.server.tokenizer import Tokenizer

    path = resolve_model(options.model)
    loaded = load_model(
        path, enable_mtp=enable_mtp, dtype=options.dtype, before_reading=before_reading
    )
    return loaded, Tokenizer.load(path)


def _plan_memory(
    model: LoadedModel, options: argparse.Namespace, config: EngineConfig
) -> MemoryPlan:
    from mlx_mtp.engine.build import plan_for
    from mlx_mtp.engine.memory_plan import MemoryLimit, machine_memory, wire_memory

    limit = machine_memory()
    if options.memory_limit is not None:
        limit = MemoryLimit(options.memory_limit, "--memory-limit")
    wanted = options.mtp_draft_vocab
    num_draft_ids = len(wanted) if isinstance(wanted, tuple) else wanted
    plan = plan_for(model, config, limit, num_draft_ids, options.prefix_cache_size)
    wire_memory(limit)
    return plan


def _check_prefix_cache_dir(options: argparse.Namespace) -> None:
    """Refuse flags that contradict each other, before anything is loaded."""
    flag, of_size = "--prefix-cache-dir", "--prefix-cache-dir-size"
    if options.prefix_cache_dir is None:
        if options.prefix_cache_dir_size is not None:
            raise UsageError(f"{of_size} is for {flag}, which is not given.")
    elif options.prefix_cache_size == 0:
        raise UsageError(
            f"{flag} keeps on the disk what the prefix cache has, and --prefix-cache-size 0 turns "
            "that off: leave one of them out."
        )
    elif options.prefix_cache_dir_size == 0:
        raise UsageError(f"{of_size} 0 leaves no room: leave {flag} out, or give it a size.")


def _open_prefix_store(
    model: LoadedModel, options: argparse.Namespace, config: EngineConfig, memory: MemoryPlan
) -> PrefixStore | None:
    from mlx_mtp.engine.build import prefix_store

    if options.prefix_cache_dir is None:
        return None
    config = replace(config, prefix_cache_size=memory.prefix_cache)
    size = options.prefix_cache_dir_size or PREFIX_CACHE_DIR_SIZE
    path = Path(options.prefix_cache_dir).expanduser()
    return prefix_store(model, config, options.dtype, path, size)


def _read_draft_vocab(options: argparse.Namespace, *, may_draft: bool) -> None:
    """Read the file, if one is given: what is wrong with it should not be learnt after a load."""
    from mlx_mtp.server.draft_vocab import FLAG, read_wanted

    if options.mtp_draft_vocab is None:
        return
    if not may_draft:
        raise UsageError(f"{FLAG} is for the MTP head's drafts, and MTP is off: add --enable-mtp.")
    options.mtp_draft_vocab = read_wanted(options.mtp_draft_vocab)


def _draft_ids(
    loaded: LoadedModel, tokenizer: Tokenizer, wanted: int | tuple[int, ...] | None
) -> tuple[int, ...] | None:
    from mlx_mtp.server.draft_vocab import draft_vocabulary

    if wanted is None:
        return None
    return draft_vocabulary(wanted, tokenizer, min(tokenizer.vocab_size, loaded.vocab_size))


def _engine(
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    options: argparse.Namespace,
    config: EngineConfig,
    memory: MemoryPlan | None = None,
    store: PrefixStore | None = None,
) -> Engine:
    import platformdirs

    from mlx_mtp.engine.build import build_engine

    cache_dir = Path(options.cache_dir or platformdirs.user_cache_path("mlx-mtp"))
    return build_engine(
        loaded,
        config,
        tokenizer.vocab_size,
        tokenizer.eos_token_ids,
        cache_dir=cache_dir,
        draft_ids=_draft_ids(loaded, tokenizer, options.mtp_draft_vocab),
        memory=memory,
        store=store,
    )


def _engine_config(options: argparse.Namespace, **limits: Any) -> EngineConfig:
    """With what both commands have flags for."""
    return EngineConfig(
        num_draft_tokens=options.mtp_num_draft_tokens,
        max_model_len=options.max_model_len,
        prefill_step_size=options.prefill_step_size,
        **limits,
    )


def _bits(quantization: str) -> int | None:
    return None if quantization == "none" else int(quantization)


def _set_up_logging(level: str) -> None:
    # Ours alone: at the level info other libraries tell of each request they make.
    logging.basicConfig(format="%(levelname)s: %(name)s: %(message)s")
    logging.getLogger("mlx_mtp").setLevel(level.upper())


def _model_name(model: str | None) -> str:
    if model is None:
        return BUNDLED_NAME
    return os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model
