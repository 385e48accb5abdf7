"""The HTTP application of a model's server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from mlx_mtp.config import ServerConfig
from mlx_mtp.server.context import Context
from mlx_mtp.server.live import Live
from mlx_mtp.server.routes import ROUTES, find_route
from mlx_mtp.server.serving import STOP_SECONDS, add_routes_and_checks
from mlx_mtp.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine

_NUM_THREADS = 16  # beside the event loop's; all kinds of long work together use fewer


def create_app(
    engine: Engine, tokenizer: Tokenizer, config: ServerConfig, defaults: Mapping[str, Any]
) -> FastAPI:
    """Build the application; its lifespan starts and stops the engine.

    `defaults` is the model's generation_config.json.
    """
    context = Context(engine, tokenizer, config, defaults)
    live = Live(context)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mlx-mtp-work")
        asyncio.get_running_loop().set_default_executor(threads)
        context.dispatcher.start()
        background = [asyncio.create_task(live.background())]
        if context.workers is not None:
            background.append(asyncio.create_task(context.workers.keep_running()))
        try:
            yield
        finally:
            for task in background:
                task.cancel()
            await context.dispatcher.stop(STOP_SECONDS)
            context.close()

    # No OpenAPI schema: the handlers read the bodies themselves, so FastAPI can't describe them.
    app = FastAPI(lifespan=lifespan, openapi_url=None)
    add_routes_and_checks(app, context, ROUTES, find_route)
    app.state.live = live
    return app
