"""The HTTP application, put together from an engine, a tokenizer and settings."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from mlx_mtp import __version__
from mlx_mtp.config import ServerConfig
from mlx_mtp.server import access, http_errors
from mlx_mtp.server.context import Context
from mlx_mtp.server.routes import ROUTES
from mlx_mtp.server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine

# How long the engine's thread may take to end; one that hangs must not keep the process alive.
STOP_SECONDS = 10.0


def create_app(
    engine: Engine, tokenizer: Tokenizer, config: ServerConfig, defaults: Mapping[str, Any]
) -> FastAPI:
    """Build the application; serving it starts the engine, and ending it stops the engine.

    `defaults` is the model's generation_config.json.
    """
    context = Context(engine, tokenizer, config, defaults)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        context.dispatcher.start()
        try:
            yield
        finally:
            await context.dispatcher.stop(STOP_SECONDS)
            context.grammars.close()

    app = FastAPI(
        title="mlx-mtp",
        version=__version__,
        lifespan=lifespan,
        # The bodies are read by hand, so FastAPI could not describe them.
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    for route in ROUTES:
        # With and without a slash at the end: a redirect would lose some clients' bodies.
        for path in {route.path, route.path.rstrip("/") + "/"}:
            app.add_api_route(path, route.load(), methods=route.methods.split())
    http_errors.install(app)
    # The last one added runs first: unknown host names are rejected before all else, and CORS comes
    # before the key, as a browser's preflight has none.
    limiter, origins, check = context.limiter, config.cors_origins, http_errors.CheckMiddleware
    app.add_middleware(check, check=limiter.check, at_end=limiter.release)
    if config.api_keys:
        digests = [access.digest_of(key.encode()) for key in config.api_keys]
        app.add_middleware(check, check=partial(access.check_key, digests))
    if origins:
        app.add_middleware(access.cors, origins=origins)
    app.add_middleware(check, check=partial(access.check_origin, origins))
    names = access.known_names(config.host, config.allowed_hosts)
    app.add_middleware(check, check=partial(access.check_host, names))
    return app
