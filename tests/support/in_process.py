"""An application without sockets: a blocking client on top of `httpx.ASGITransport`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI

from mlx_mtp.config import ServerConfig
from mlx_mtp.server.app import create_app
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL, library_tokenizer
from tests.support.fake_engine import FakeEngine, answer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
OLLAMA_CHAT, OLLAMA_TEXT = "/api/chat", "/api/generate"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
IGNORED = "x-mlx-mtp-ignored"
HI = [{"role": "user", "content": "hi"}]
# A valid body for each route that takes one.
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": HI},
    TEXT: {"model": MODEL, "prompt": "hi"},
    MESSAGES: {"model": MODEL, "max_tokens": 5, "messages": HI},
    COUNT: {"model": MODEL, "messages": HI},
    RESPONSES: {"model": MODEL, "input": "hi"},
    OLLAMA_CHAT: {"model": MODEL, "messages": HI, "stream": False},
    OLLAMA_TEXT: {"model": MODEL, "prompt": "hi", "stream": False},
    TOKENIZE: {"prompt": "hi"},
    DETOKENIZE: {"tokens": [300]},
}
GENERATING = (CHAT, TEXT, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_TEXT)


class _Bridge(httpx.BaseTransport):
    """Runs each request on the application's event loop, which is in another thread."""

    def __init__(self, app: FastAPI, portal: BlockingPortal) -> None:
        self._inner = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._portal = portal

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return self._portal.call(self._handle, request)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        content = b"".join([piece async for piece in response.aiter_raw()])
        return httpx.Response(response.status_code, headers=response.headers, content=content)


@contextlib.contextmanager
def in_process(
    engine: FakeEngine | None = None, *, tokenizer: Tokenizer | None = None, **settings: Any
) -> Iterator[httpx.Client]:
    """Yields a client for an application with these settings; it gets each response as a whole."""
    engine = engine or FakeEngine(answer([300]))
    tokenizer = tokenizer or Tokenizer(library_tokenizer(), "the test's model")
    config = ServerConfig(**({"model_name": MODEL, "seed": 1} | settings))
    app = create_app(engine, tokenizer, config, {})
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(app.router.lifespan_context(app)),
        httpx.Client(transport=_Bridge(app, portal), base_url="http://localhost") as client,
    ):
        yield client
