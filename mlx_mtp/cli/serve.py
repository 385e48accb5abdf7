"""The command `mlx-mtp serve`, and the banner that it prints when it is ready."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from mlx_mtp.config import HOST_DRAFTS, EngineConfig, ServerConfig, from_options
from mlx_mtp.console import labelled, say, width_of
from mlx_mtp.options import (
    BUNDLED_NAME,
    SAMPLING_DEFAULTS,
    SERVE_FLAGS,
    check_serve,
    wants_head,
)
from mlx_mtp.prepare import prepare_command
from mlx_mtp.running import RunningServer, announced
from mlx_mtp.settings import add_settings, resolve

if TYPE_CHECKING:
    from mlx_mtp.engine.stats import EngineInfo
    from mlx_mtp.models.model import LoadedModel
    from mlx_mtp.server.app import Server

logger = logging.getLogger(__name__)

_OPTIMISTIC = (
    "drafts with {:g} times the probability of the token drawn are accepted too: answers are not "
    "those of plain decoding"
)
SEEING_BODY_BYTES = 64 << 20  # --max-body-size of a model that sees images
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where this machine reaches such a host
CLOSED_PIPE_STATUS = 141  # as a shell reports SIGPIPE


def add_serve(commands: Any) -> None:
    """Register `serve`."""
    parser = commands.add_parser("serve", help="serve a model with the OpenAI API")
    add_settings(parser, *SERVE_FLAGS)
    parser.set_defaults(run=_serve, environ=None)


def _serve(given: argparse.Namespace) -> int:
    return serve(resolve(given, SERVE_FLAGS, given.environ))


def serve(
    options: argparse.Namespace, on_ready: Callable[[Server, int], object] | None = None
) -> int:
    """Serve until a signal, and then finish the running requests (see `server.app.Server`).

    Once ready, print a banner, or call `on_ready` with the server and its port.
    """
    check_serve(options)
    given = {key: getattr(options, key) for key in SAMPLING_DEFAULTS}
    sampling = {key: value for key, value in given.items() if value is not None}
    info = prepare_command(options, options.log_level)

    from mlx_mtp import build
    from mlx_mtp.distributed import world
    from mlx_mtp.ranks.launch import connect_ranks, follow_rank_zero, watch
    from mlx_mtp.server.app import bind, create_app, give_up, make_server, run_server
    from mlx_mtp.server.http.access import read_keys, warn_if_open

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
    # The port comes first: nobody should wait for a long load to learn that it is in use.
    with bind(options.host, options.port) as sock, contextlib.ExitStack() as stack:
        loaded, tokenizer = load()
        links = connect_ranks(options, loaded)
        plan = build.plan_engine(loaded, options, links)
        limits, memory, store = plan.config, plan.memory, plan.store
        kept = prefixes_text(limits)
        if store is not None:
            kept += f"; up to {store.max_bytes / 1e9:.2f} GB in {store.path}"
        loaded.load_weights()
        engine = build.engine(loaded, tokenizer, options, plan, links)
        if links is not None:
            watch(engine, links)
        # Images take more room than texts.
        sees = engine.info.images is not None and "max_body_size" not in options.given
        seeing: Any = {"max_body_bytes": SEEING_BODY_BYTES} if sees else {}
        name, *others = options.served_model_name or [model_name(options.model)]
        config = from_options(
            ServerConfig,
            options,
            model_name=name,
            other_names=tuple(others),
            port=sock.getsockname()[1],
            api_keys=keys,
            sampling=sampling,
            model_bytes=sum(f.stat().st_size for f in loaded.path.glob("[!.]*.safetensors")),
            max_held_bytes=memory.bytes_by_use()["texts"] * 8 // 9,
            # The bundled model's files are a part of this program.
            text_workers=loaded.path if options.model or options.request_chat_template else None,
            **seeing,
        )
        app = create_app(engine, tokenizer, config, loaded.generation_config)
        # Garbage collections, which stop all threads, need not visit what is loaded for good.
        gc.collect()
        gc.freeze()
        engine.launch()  # raises if the model can't answer
        shares, answers = memory.lines(options.max_num_seqs), answers_text(limits, loaded)
        width = width_of(sys.stdout)
        off = {source: off_text(options, source) for source in ("mtp", *HOST_DRAFTS)}
        text = banner(config, loaded, engine.info, str(info), shares, kept, answers, off, width)

        def ready() -> None:
            if on_ready is not None:
                on_ready(server, config.port)
                return
            stack.enter_context(announced(_entry(config, loaded, engine.info, memory.limit.nbytes)))
            _announce(text)

        server = make_server(app, log_level=options.log_level, on_ready=ready)
        if not run_server(server, sock, engine.stop):
            give_up("the engine's thread hangs and can't be ended")
    return 0


def _entry(
    config: ServerConfig, loaded: LoadedModel, engine: EngineInfo, memory_limit: int
) -> RunningServer:
    """What `mlx-mtp ps` and other commands learn of this server."""
    return RunningServer(
        pid=os.getpid(),
        url=_url(_LOCAL.get(config.host, config.host), config.port),
        models=[config.model_name, *config.other_names],
        directory=str(loaded.path.absolute()),
        needs_key=bool(config.api_keys),
        max_model_len=engine.max_model_len,
        weights=engine.memory["weights"] + engine.memory["head"],
        memory_limit=memory_limit,
        started=time.time(),
    )


def model_name(model: str | None) -> str:
    """The default of --served-model-name: the hub id, or the directory's name."""
    if model is None:
        return BUNDLED_NAME
    # A link is not resolved: the user chose its name.
    if not os.path.isdir(model):
        return model
    # A name that is not UTF-8 could not be sent.
    return os.path.basename(os.path.abspath(model)).encode(errors="replace").decode()


def banner(
    config: ServerConfig,
    loaded: LoadedModel,
    engine: EngineInfo,
    backend: str,
    memory: Sequence[str],
    prefixes: str,
    answers: str,
    off: Mapping[str, str],
    width: int | None = None,  # of the terminal
) -> str:
    """The text that `serve` prints: addresses, settings, a curl command to try, and how to stop.

    `memory` are the lines of the plan; `prefixes`, `answers` and, for each source of drafts, `off`
    are texts of the three functions below. Rows are wrapped to `width`.
    """
    from mlx_mtp.distributed import own_address

    unused, depth = ", ".join(loaded.unused_kernels), engine.num_draft_tokens
    local = _LOCAL.get(config.host, config.host)
    drafts = f"{depth} drafts per step"
    if depth == "auto":
        drafts = "drafts follow measured cost and acceptance"
    rows = {
        "address": _url(local, config.port),
        "network": local != config.host and _url(own_address(config.host), config.port),
        "model": f"{config.model_name} ({loaded.model_type}, {loaded.path})",
        "ranks": loaded.num_ranks > 1 and f"{loaded.num_ranks}, each with a part",
        "MTP": f"on, {drafts}; head from {loaded.head_source}"
        if engine.mtp_enabled
        else off["mtp"],
        **{
            word: text if name in engine.draft_sources else off[name]
            for name, (word, text) in HOST_DRAFTS.items()
        },
        "images": seen_text(config, engine),
        "optimistic": config.optimistic and _OPTIMISTIC.format(config.optimistic),
        "backend": backend,
        "kernels": unused and f"slower code in place of {unused}; see the warnings",
        "prefixes": prefixes,
        "answers": answers,
        "memory": "\n".join(memory),
    }
    curl = [f"curl {rows['address']}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if config.api_keys:
        # Only the variable's name, as this text ends up in logs and on shared screens.
        curl.append('-H "Authorization: Bearer $MLX_MTP_API_KEY"')
    messages = json.dumps([{"role": "user", "content": "Tell me a story."}])
    body = f'{{"model": {json.dumps(config.model_name)},\n       "messages": {messages}}}'
    curl.append(f"-d {shlex.quote(body)}")
    command = " \\\n  ".join(curl)
    page = " A browser finds a chat at the address." if config.page else ""
    ready = f"Ready.{page} Ctrl-C stops the server."
    shown = {name: str(text) for name, text in rows.items() if text}
    return f"\n{labelled(shown, width, '  ')}\n\n{command}\n\n{ready}\n"


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def prefixes_text(config: EngineConfig) -> str:
    """A sentence on the prefixes that are kept in memory."""
    if not config.prefix_cache_size:
        return "not kept (--prefix-cache-size is 0)"
    text = f"up to {config.prefix_cache_size / 1e9:.2f} GB of earlier prompts and answers are kept"
    if (bits := config.kv_cache_quantization) is not None:
        text += f", in {bits} bits: answers that reuse them may differ slightly"
    return text


def answers_text(config: EngineConfig, loaded: LoadedModel) -> str:
    """A sentence on when the same request with the same seed gets the same answer."""
    same = "the same with MTP on or off, beside any other requests, from a cold or a warm cache"
    if config.exact and loaded.can_be_exact:
        return f"{same}, to the bit (--exact)"
    if loaded.dtype.size == 4:
        return f"{same}, but for ties of rounding (float32)"
    return "may part where two tokens are about as good: 16-bit sums depend on what runs beside"


def seen_text(config: ServerConfig, engine: EngineInfo) -> str:
    """What the model sees; empty if it sees nothing."""
    if engine.images is None:
        return ""
    return (
        f"up to {config.max_images} a request, each of up to {engine.images.most_tokens:,} tokens"
    )


def off_text(options: argparse.Namespace, source: str) -> str:
    """A sentence on why a source drafts nothing, if it is off, and on where that is said."""
    if source not in options.drafts.split(","):
        key, why = "drafts", f"--drafts {options.drafts}"
    elif source != "mtp":
        key = "mtp_num_draft_tokens"
        why = f"--mtp-num-draft-tokens {options.mtp_num_draft_tokens}"
    elif options.enable_mtp is False:
        key, why = "enable_mtp", "--no-enable-mtp"
    else:
        return "off: the model has no head"
    place = options.given.get(key)
    return f"off: {why} (from {place})" if place else f"off: {why}"


def _announce(text: str) -> None:
    try:
        say(text)
    except OSError as error:  # as in `mlx-mtp serve | head`, or on a full disk
        discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            logger.warning("The banner can't be written: %s", error)


def discard(*streams: TextIO) -> None:
    """Redirect streams to /dev/null, as Python flushes them once more at its exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(null, stream.fileno())
    os.close(null)
