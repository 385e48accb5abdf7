"""`mlx-mtp serve` with several models, or with one that is in memory only while it is asked for."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from mlx_mtp import logs
from mlx_mtp.config import RouterConfig, ServerConfig, flags_of, from_options
from mlx_mtp.console import labelled, say
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import arguments_of
from mlx_mtp.inspect.needs import cached_models, planned
from mlx_mtp.options import BUNDLED_NAME, SERVE_FLAGS, check_serve, model_name
from mlx_mtp.router.fleet import Fleet, ServedModel
from mlx_mtp.safe_path import command_of

# Flags that the processes don't get: this one does what they say, or says it for each.
_OWN = {"model", "served_model_name", "memory_limit", "prefix_cache_dir", "prefix_cache_dir_size"}
_OWN |= {"host", "port", "api_key", "api_key_file", "allowed_host", "cors_origin", "page"}
_OWN |= {"log_format", *(flag.key for flag in flags_of(RouterConfig))}
_PLANNED = ("dtype", "memory_limit", "max_model_len", "prefill_step_size", "prefix_cache_size")


def wants_router(options: argparse.Namespace) -> bool:
    """Whether the flags of `serve` ask for processes of models; raises UsageError."""
    given = [f.name for f in flags_of(RouterConfig) if f.key in options.given]
    wanted = bool(options.models or options.all or "keep_alive" in options.given)
    if not wanted and (given := [name for name in given if name != "--all"]):
        raise UsageError(f"{given[0]} is for several models, or for one with --keep-alive.")
    return wanted


def run_router(options: argparse.Namespace) -> int:
    """Serve until a signal, and then finish the running requests; returns the exit status."""
    check_serve(options)
    if "MLX_RANK" in os.environ:
        raise UsageError("mlx.launch is for one model: leave out the others, and --keep-alive.")
    logs.set_up(options.log_level, options.log_format)
    from mlx_mtp.router.app import create_router
    from mlx_mtp.server.http.access import read_keys, warn_if_open
    from mlx_mtp.server.serving import bind, make_server, run_server

    config = from_options(RouterConfig, options)
    models = models_of_flags(options, config)
    keys = read_keys(options.api_key, options.api_key_file)
    warn_if_open(options.host, options.cors_origin, has_key=bool(keys))

    def plans(of: Sequence[ServedModel]) -> AsyncIterator[Any]:
        asked = {name: getattr(options, name) for name in _PLANNED}
        return planned([model.source for model in of], asked)

    fleet = Fleet(
        models,
        config,
        command=lambda model: child_command(options, model, len(models)),
        plans=plans,
        num_keys=len(keys),
        max_queue=options.max_queue,
        any_name=options.any_model_name,
    )
    with bind(options.host, options.port) as sock:
        port, name = sock.getsockname()[1], models[0].name
        settings = from_options(ServerConfig, options, model_name=name, port=port, api_keys=keys)
        host = f"[{options.host}]" if ":" in options.host else options.host
        kept = f"{config.keep_alive:g} s" if config.keep_alive < float("inf") else "forever"
        shown = {
            "address": f"http://{host}:{port}",
            "models": "\n".join(model.name for model in models),
            "in memory": f"when they are asked for, and {kept} longer, if there is room",
        }

        def ready() -> None:
            with contextlib.suppress(OSError):  # as in `mlx-mtp serve A B | head`
                say(f"\n{labelled(shown, None, '  ')}\n\nReady. Ctrl-C stops the server.\n")

        server = make_server(
            create_router(settings, fleet), log_level=options.log_level, on_ready=ready
        )
        run_server(server, sock, lambda _: True)
    return 0


def models_of_flags(options: argparse.Namespace, config: RouterConfig) -> list[ServedModel]:
    """The models of a command line with their names; raises UsageError."""
    given = [*([options.model] if options.model else []), *options.models]
    if not given and not options.all:
        given = [BUNDLED_NAME]
    models = []
    for text in given:
        name, equals, source = text.partition("=")
        if not equals or "/" in name or os.path.isdir(text):
            name, source = "", text
        models.append(_served_model(name, source, config))
    known = {model.source for model in models}
    for source in cached_models() if options.all else ():
        if source not in known:
            models.append(_served_model("", source, config))
            models[-1].is_found = True
    if not models:
        raise UsageError("--all: the Hugging Face cache has no model with weights.")
    if options.served_model_name:
        if len(models) > 1:
            raise UsageError("--served-model-name is for one model; several: NAME=MODEL.")
        models[0].name, models[0].names = options.served_model_name[0], options.served_model_name
    counts = Counter(model.name for model in models)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UsageError(f"Two models have the name {twice[0]!r}: write NAME=MODEL for one.")
    counts.update(model.name.rpartition("/")[2] for model in models if "/" in model.name)
    for model in models:
        short = model.name.rpartition("/")[2]
        more = (short,) if counts[short] == 1 and short != model.name else ()
        model.names = model.names or (model.name, *more)
    for name in config.pinned:
        if not (found := [model for model in models if name in model.names]):
            raise UsageError(f"--pinned {name}: there is no such model among those served.")
        found[0].pinned = True
    return models


def _served_model(name: str, source: str, config: RouterConfig) -> ServedModel:
    path = os.path.expanduser(source)
    found: str | None = source
    if os.path.isdir(path):
        name, found = name or model_name(path), os.path.abspath(path)
    elif source == BUNDLED_NAME:
        found = None
    return ServedModel(name or source, config.keep_alive, source=found)


def child_command(options: argparse.Namespace, model: ServedModel, num_models: int) -> list[str]:
    """The command of a model's process, which gets its share of the memory and of the disk."""
    given = argparse.Namespace(**vars(options))
    if given.cache_dir is not None:
        given.cache_dir = os.path.abspath(given.cache_dir)
    if isinstance(given.mtp_draft_vocab, Path):
        given.mtp_draft_vocab = given.mtp_draft_vocab.absolute()
    words = [] if model.source is None else [f"--model={model.source}"]
    words += [f"--served-model-name={name}" for name in model.names]
    words += [f"--memory-limit={model.share}", "--log-format=json"]
    if options.prefix_cache_dir is not None:
        folder = Path(options.prefix_cache_dir).expanduser().absolute()
        words.append(f"--prefix-cache-dir={folder / model.name.replace('/', '--')}")
        words.append(f"--prefix-cache-dir-size={options.prefix_cache_dir_size // num_models}")
    words += arguments_of(given, [flag for flag in SERVE_FLAGS if flag.key not in _OWN])
    return [*command_of("mlx_mtp"), "serve", *words]
