"""The command `mlx-mtp serve`, and what it prints when it is ready."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mlx_mtp import factories
from mlx_mtp.config import EngineConfig, ServerConfig, from_options
from mlx_mtp.console import labelled, say, width_of
from mlx_mtp.options import BUNDLED_NAME, check_serve, wants_head

if TYPE_CHECKING:
    from mlx_mtp.engine.memory import MemoryPlan
    from mlx_mtp.engine.stats import EngineInfo
    from mlx_mtp.models.model import LoadedModel
    from mlx_mtp.server.app import Server

logger = logging.getLogger(__name__)

_OPTIMISTIC = (
    "drafts with {:g} times the probability of the token drawn are accepted too: answers are not "
    "those of plain decoding"
)
CLOSED_PIPE_STATUS = 141  # As a shell reports SIGPIPE.


def serve(
    options: argparse.Namespace, on_ready: Callable[[Server, int], object] | None = None
) -> int:
    """Serve until a signal; then finish the running requests (see `server.serve.Server`).

    When it is ready it prints a banner, or calls `on_ready` with the server and its port.
    """
    check_serve(options)
    info = factories.prepare(options, options.log_level)

    from mlx_mtp.ranks.launch import follow_rank_zero, join, part, watch
    from mlx_mtp.server.app import bind, create_app, give_up, make_server, run
    from mlx_mtp.server.http.access import read_keys, warn_if_open

    own = part()
    load = partial(factories.load, options, enable_mtp=wants_head(options), lazy=True, part=own)
    if own[0]:
        loaded, _ = load()
        parts = _parts(options, loaded, join(options, loaded))
        return follow_rank_zero(loaded, parts["links"], parts["store"])
    keys = read_keys(options.api_key, options.api_key_file)
    warn_if_open(options.host, options.cors_origin, has_key=bool(keys))
    if options.mtp_optimistic:
        logger.warning("Answers differ from plain decoding's (--mtp-optimistic).")
    if options.log_prompts:
        logger.warning("The log gets the text of every prompt (--log-prompts).")
    # The port first: the user should not wait for a long load to learn that it is in use.
    with bind(options.host, options.port) as sock:
        loaded, tokenizer = load()
        parts = _parts(options, loaded, join(options, loaded))
        limits, memory, store = parts["config"], parts["memory"], parts["store"]
        kept = prefixes_text(limits)
        if store is not None:
            kept += f"; up to {store.max_bytes / 1e9:.2f} GB in {store.path}"
        loaded.load_weights()
        engine = factories.engine(loaded, tokenizer, options, **parts)
        if parts["links"] is not None:
            watch(engine, parts["links"])
        name, *others = options.served_model_name or [model_name(options.model)]
        config = from_options(
            ServerConfig,
            options,
            model_name=name,
            other_names=tuple(others),
            port=sock.getsockname()[1],
            api_keys=keys,
            max_held_bytes=memory.parts()["texts"] * 8 // 9,
            # The bundled model's own files are a part of this program.
            text_workers=loaded.path if options.model or options.request_chat_template else None,
        )
        app = create_app(engine, tokenizer, config, loaded.generation_config)
        # What is loaded stays: garbage collections, which stop every thread, need not visit it.
        gc.collect()
        gc.freeze()
        engine.launch()  # Where it can't answer there is nothing to serve.
        plan, answers = memory.lines(options.max_num_seqs), answers_text(limits, loaded)
        width = width_of(sys.stdout)
        text = banner(config, loaded, engine.info, str(info), plan, kept, answers, width)

        def ready() -> None:
            on_ready(server, config.port) if on_ready else _announce(text)

        server = make_server(app, log_level=options.log_level, on_ready=ready)
        if not run(server, sock, engine.stop):
            give_up("the engine's thread hangs and can't be ended")
    return 0


def _parts(options: argparse.Namespace, loaded: LoadedModel, links: Any) -> dict[str, Any]:
    """What the engine of any rank is built with, but for the model.

    What can't fit, or a directory that can't be used, is an error before weights are read.
    """
    from mlx_mtp.build import engine_config, prefix_store

    limits, store = engine_config(loaded, options), None
    memory = plan_memory(loaded, options, limits, None if links is None else links.memory)
    limits = replace(
        limits,
        prefix_cache_size=memory.prefix_cache,
        prefill_step_size=memory.prefill_step_size,
    )
    if options.prefix_cache_dir is not None:
        path, size = Path(options.prefix_cache_dir).expanduser(), options.prefix_cache_dir_size
        store = prefix_store(loaded, limits, options.dtype, path, size, links)
    return {"config": limits, "memory": memory, "store": store, "links": links}


def plan_memory(
    model: LoadedModel,
    options: argparse.Namespace,
    config: EngineConfig,
    least: int | None = None,  # bytes that any of several ranks has
) -> MemoryPlan:
    """Share the memory out before any weight is read."""
    from mlx_mtp.build import plan_for
    from mlx_mtp.ranks.launch import use_memory

    vocab, limit = options.mtp_draft_vocab, use_memory(options.memory_limit, least)
    num_draft_ids = len(vocab) if isinstance(vocab, tuple) else vocab
    # Chunks that are not cut to a pause stay short.
    longer_steps = options.prefill_step_size is None and not config.exact
    cache = options.prefix_cache_size
    return plan_for(model, config, limit, num_draft_ids, cache, longer_steps)


def model_name(model: str | None) -> str:
    """The served model's id without --served-model-name: the hub's, or the directory's name."""
    if model is None:
        return BUNDLED_NAME
    # Not resolved: the user chose the name of a link.
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
    width: int | None = None,  # of the terminal
) -> str:
    """Addresses, model, backend, memory plan (its lines), a curl command to try, how to stop.

    `prefixes` says which are kept, and where; `answers`, on what they depend.
    """
    from mlx_mtp.distributed import own_address

    unused = ", ".join(loaded.unused_kernels)
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    depth = engine.num_draft_tokens
    drafts = (
        "drafts follow measured cost and acceptance"
        if depth == "auto"
        else f"{depth} drafts per step"
    )
    others = (
        {} if local == config.host else {"network": _url(own_address(config.host), config.port)}
    )
    rows = {
        "address": _url(local, config.port),
        **others,
        "model": f"{config.model_name} ({loaded.model_type}, {loaded.path})",
        **({"ranks": f"{loaded.num_ranks}, each with a part"} if loaded.num_ranks > 1 else {}),
        "MTP": f"on, {drafts}; head from {loaded.head_source}"
        if engine.mtp_enabled
        else "off: --no-enable-mtp, --drafts, or the model has no head",
        "copies": "text that occurred in the prompt or an earlier answer is drafted"
        if "copy" in engine.draft_sources
        else "off: --drafts, or a fixed number of drafts",
        **({"optimistic": _OPTIMISTIC.format(config.optimistic)} if config.optimistic else {}),
        "backend": backend,
        **({"kernels": f"slower code in place of {unused}; see the warnings"} if unused else {}),
        "prefixes": prefixes,
        "answers": answers,
        "memory": "\n".join(memory),
    }
    curl = [f"curl {rows['address']}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if config.api_keys:
        # Only the variable's name: this text ends up in logs and on shared screens.
        curl.append('-H "Authorization: Bearer $MLX_MTP_API_KEY"')
    messages = json.dumps([{"role": "user", "content": "Tell me a story."}])
    body = f'{{"model": {json.dumps(config.model_name)},\n       "messages": {messages}}}'
    curl.append(f"-d {shlex.quote(body)}")
    command = " \\\n  ".join(curl)
    page = " A browser finds a chat at the address." if config.page else ""
    ready = f"Ready.{page} Ctrl-C stops the server."
    return f"\n{labelled(rows, width, '  ')}\n\n{command}\n\n{ready}\n"


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def prefixes_text(config: EngineConfig) -> str:
    """Which prefixes are kept in memory."""
    if not config.prefix_cache_size:
        return "not kept (--prefix-cache-size is 0)"
    text = f"up to {config.prefix_cache_size / 1e9:.2f} GB of earlier prompts and answers are kept"
    if (bits := config.kv_cache_quantization) is not None:
        text += f", in {bits} bits: answers that reuse them may differ slightly"
    return text


def answers_text(config: EngineConfig, loaded: LoadedModel) -> str:
    """Where the same request, with the same seed, gets the same answer."""
    same = "the same with MTP on or off, beside any other requests, from a cold or a warm cache"
    if config.exact and loaded.can_be_exact:
        return f"{same}, to the bit (--exact)"
    if loaded.dtype.size == 4:
        return f"{same}, but for ties of rounding (float32)"
    return "may part where two tokens are about as good: 16-bit sums depend on what runs beside"


def _announce(text: str) -> None:
    try:
        say(text)
    except OSError as error:  # As in `mlx-mtp serve | head`, or on a full disk.
        discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            logger.warning("The banner can't be written: %s", error)


def discard(*streams: TextIO) -> None:
    """Redirect streams to nowhere: Python flushes what is left in them at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
