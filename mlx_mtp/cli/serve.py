"""The command `mlx-mtp serve` with one model."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from mlx_mtp.cli.banner import (
    announced_alone,
    answers_text,
    banner,
    embeddings_banner,
    off_text,
    prefixes_text,
)
from mlx_mtp.config import HOST_DRAFTS, SEEING_BODY_BYTES, ServerConfig, from_options
from mlx_mtp.console import say, width_of
from mlx_mtp.options import SAMPLING_DEFAULTS, check_serve, model_name, wants_head
from mlx_mtp.prepare import prepare_command

if TYPE_CHECKING:
    from pathlib import Path

    from mlx_mtp.server.serving import Server

logger = logging.getLogger(__name__)

CLOSED_PIPE_STATUS = 141  # as a shell reports SIGPIPE


def serve(
    options: argparse.Namespace, on_ready: Callable[[Server, int], object] | None = None
) -> int:
    """Serve until a signal, and then finish the running requests (see `server.serving.Server`).

    Once ready, print a banner, or call `on_ready` with the server and its port. Returns the exit
    status.
    """
    from mlx_mtp.server.adopted import adopted

    if (parent := adopted()) is None:  # Otherwise the parent has checked the flags.
        check_serve(options)
    given = {key: getattr(options, key) for key in SAMPLING_DEFAULTS}
    sampling = {key: value for key, value in given.items() if value is not None}
    info = prepare_command(options, options.log_level)

    from mlx_mtp import build
    from mlx_mtp.distributed import world
    from mlx_mtp.ranks.launch import connect_ranks, follow_rank_zero
    from mlx_mtp.server.app import create_app
    from mlx_mtp.server.http.access import read_keys, warn_if_open
    from mlx_mtp.server.serving import bind, give_up, make_server, run_server

    part = rank, _ = world()[:2]  # waits for the other ranks
    load = partial(build.load, options, enable_mtp=wants_head(options), lazy=True, part=part)
    if rank:
        loaded, _ = load()
        links: Any = connect_ranks(options, loaded)
        return follow_rank_zero(loaded, links, build.plan_engine(loaded, options, links).store)
    keys = read_keys(options.api_key, options.api_key_file)
    warn_if_open(options.host, options.cors_origin, has_key=bool(keys))
    if options.mtp_optimistic:
        logger.warning("Answers differ from plain decoding's (--mtp-optimistic).")
    if options.log_prompts:
        logger.warning("The log gets the text of every prompt (--log-prompts).")
    # Bind the port before the long load, so that a port in use is reported immediately.
    with (
        parent.sock if parent else bind(options.host, options.port) as sock,
        contextlib.ExitStack() as stack,
    ):
        if build.embedding_directory(options.model) is not None:
            model = _embedding_model(options, str(info))
        else:
            model = _chat_model(options, load, str(info))
        engine = model.engine
        # Bodies with images are larger than those with text alone.
        sees = engine.info.images is not None and "max_body_size" not in options.given
        seeing: Any = {"max_body_bytes": SEEING_BODY_BYTES} if sees else {}
        name, *others = options.served_model_name or [model_name(options.model)]
        config = from_options(
            ServerConfig,
            options,
            model_name=name,
            other_names=tuple(others),
            port=0 if parent else sock.getsockname()[1],
            api_keys=keys,
            parent_keys=parent and parent.num_keys,
            sampling=sampling,
            model_bytes=sum(f.stat().st_size for f in model.path.glob("[!.]*.safetensors")),
            max_held_bytes=model.text_bytes * 8 // 9,
            # The bundled model's files are a part of this program, and so are trusted.
            text_workers=model.path if options.model or options.request_chat_template else None,
            **seeing,
        )
        app = create_app(engine, model.tokenizer, config, model.generation_config)
        # Garbage collections stop all threads: exclude the objects that live until the end.
        gc.collect()
        gc.freeze()
        engine.launch()  # raises if the model can't answer
        text = model.banner(config)

        def ready() -> None:
            if on_ready is not None:
                on_ready(server, config.port)
                return
            if parent is None:
                stack.enter_context(
                    announced_alone(config, model.path, engine.info, model.memory_limit)
                )
            _announce(text)

        server = make_server(app, log_level=options.log_level, on_ready=ready)
        if not run_server(server, sock, engine.stop):
            give_up("the engine's thread hangs and can't be ended")
    return 0


class _Served(NamedTuple):
    """A loaded chat or embedding model, with what is needed to serve it."""

    engine: Any
    tokenizer: Any
    path: Path
    generation_config: Mapping[str, Any]
    memory_limit: int  # bytes
    text_bytes: int  # bytes of memory for the bodies and answers of requests
    banner: Callable[[ServerConfig], str]


def _chat_model(options: argparse.Namespace, load: Callable[[], Any], backend: str) -> _Served:
    from mlx_mtp import build
    from mlx_mtp.ranks.launch import connect_ranks, watch

    loaded, tokenizer = load()
    links: Any = connect_ranks(options, loaded)
    plan = build.plan_engine(loaded, options, links)
    memory, store = plan.memory, plan.store
    kept = prefixes_text(plan.config)
    if store is not None:
        kept += f"; up to {store.max_bytes / 1e9:.2f} GB in {store.path}"
    loaded.load_weights()
    limits = build.settled(loaded, options, plan.config)
    engine = build.engine(loaded, tokenizer, options, plan._replace(config=limits), links)
    if links is not None:
        watch(engine, links)

    def text(config: ServerConfig) -> str:
        shares, answers = memory.lines(options.max_num_seqs), answers_text(limits, loaded)
        off = {source: off_text(options, source) for source in ("mtp", *HOST_DRAFTS)}
        width = width_of(sys.stdout)
        return banner(config, loaded, engine.info, backend, shares, kept, answers, off, width)

    nbytes = memory.bytes_by_use()["texts"]
    defaults, limit = loaded.generation_config, memory.limit.nbytes
    return _Served(engine, tokenizer, loaded.path, defaults, limit, nbytes, text)


def _embedding_model(options: argparse.Namespace, backend: str) -> _Served:
    from mlx_mtp import build

    engine, tokenizer, path, limit, nbytes = build.load_embeddings(options)

    def text(config: ServerConfig) -> str:
        return embeddings_banner(config, engine.info, path, backend)

    return _Served(engine, tokenizer, path, {}, limit.nbytes, nbytes, text)


def _announce(text: str) -> None:
    try:
        say(text)
    except OSError as error:  # as in `mlx-mtp serve | head`, or on a full disk
        discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            logger.warning("The banner can't be written: %s", error)


def discard(*streams: TextIO) -> None:
    """Redirect streams to /dev/null, as Python flushes them once more when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(null, stream.fileno())
    os.close(null)
