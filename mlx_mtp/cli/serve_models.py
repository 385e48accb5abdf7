"""`mlx-mtp serve` with several models, or with one that is in memory only while it is in use."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from mlx_mtp import logs
from mlx_mtp.cli.banner import local_url, router_banner
from mlx_mtp.cli.model_flags import (
    child_command,
    directory_of,
    model_options,
    models_of_flags,
    shared_options,
)
from mlx_mtp.config import SEEING_BODY_BYTES, RouterConfig, ServerConfig, from_options
from mlx_mtp.console import say
from mlx_mtp.inspect.needs import planned
from mlx_mtp.router.fleet import Fleet, ServedModel
from mlx_mtp.running import RunningServer, announced

_PLANNED = ("dtype", "enable_mtp", "max_model_len", "prefill_step_size", "prefix_cache_size")


def run_router(given: argparse.Namespace) -> int:
    """Serve until a signal, and then finish the running requests; returns the exit status.

    `given` is the parsed command line, before settings are resolved.
    """
    options = shared_options(given)
    logs.set_up(options.log_level, options.log_format, options.log_file)
    from mlx_mtp.router.app import create_router
    from mlx_mtp.server.http.access import read_keys, warn_if_open
    from mlx_mtp.server.serving import bind, make_server, run_server

    config = from_options(RouterConfig, options)
    models = models_of_flags(options, config)
    of_models = {model.name: model_options(given, model) for model in models}
    keys = read_keys(options.api_key, options.api_key_file)
    warn_if_open(options.host, options.cors_origin, has_key=bool(keys))

    def command(model: ServedModel) -> list[str]:
        return child_command(of_models[model.name], model, len(models))

    def plans(of: Sequence[ServedModel]) -> AsyncIterator[Any]:
        asked = [
            {"source": each.source, **{key: getattr(of_models[each.name], key) for key in _PLANNED}}
            for each in of
        ]
        return planned(asked, options.memory_limit)

    fleet = Fleet(
        models,
        config,
        command=command,
        plans=plans,
        num_keys=len(keys),
        max_queue=options.max_queue,
        any_name=options.any_model_name,
    )
    with bind(options.host, options.port) as sock, contextlib.ExitStack() as stack:
        port, name = sock.getsockname()[1], models[0].name
        settings = from_options(ServerConfig, options, model_name=name, port=port, api_keys=keys)
        if "max_body_size" not in options.given:  # A text model's process has a lower limit.
            settings = replace(settings, max_body_bytes=SEEING_BODY_BYTES)
        others = [each for model in models for each in model.names[1:]]
        entry = RunningServer(
            pid=os.getpid(),
            url=local_url(options.host, port),
            models=[*(model.name for model in models), *others],
            directories=[directory_of(model) for model in models],
            needs_key=bool(keys),
            started=time.time(),
        )

        def ready() -> None:
            stack.enter_context(announced(entry))
            with contextlib.suppress(OSError):  # as in `mlx-mtp serve A B | head`
                names = entry.models[: len(models)]
                say(router_banner(entry.url, names, config.keep_alive, has_page=settings.page))

        server = make_server(
            create_router(settings, fleet), log_level=options.log_level, on_ready=ready
        )
        # A collection stops all streams, so the objects that live until the end are left out of it.
        gc.collect()
        gc.freeze()
        run_server(server, sock, lambda _: True)
    return 0
