"""The routes. Each reads as its steps: body, checks, prompt, generation, answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.errors import NotFoundError
from mlx_mtp.server.anthropic.routes import count_tokens, messages
from mlx_mtp.server.openai.routes import chat_completions, completions
from mlx_mtp.server.openai.stored_routes import (
    delete_chat,
    get_chat,
    label_chat,
    list_chats,
    list_messages,
)
from mlx_mtp.server.respond import context_of as _context
from mlx_mtp.server.responses.routes import responses
from mlx_mtp.server.text import cut
from mlx_mtp.server.token_routes import detokenize, tokenize

router = APIRouter()


async def models(request: Request) -> Response:
    """GET /v1/models."""
    card = _context(request).model_card()
    # OpenAI's form and Anthropic's at once: no name means two things.
    page = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
    return JSONResponse({"object": "list", "data": [card], **page})


async def model(request: Request) -> Response:
    """GET /v1/models/{id}; ids may have slashes."""
    context = _context(request)
    context.check_model(request.path_params["model_id"].rstrip("/"))
    return JSONResponse(context.model_card())


async def root(_: Request) -> Response:
    """GET and HEAD /: agents ask whether anybody is there. No version: it is open to all."""
    return JSONResponse({"name": "mlx-mtp"})


async def stored_response(request: Request) -> Response:
    """GET and DELETE of one response: none is stored."""
    name = cut(request.path_params["name"])
    raise NotFoundError(f"There is no {name!r}: this server stores no responses.")


async def embeddings(_: Request) -> Response:
    """POST /v1/embeddings: told apart from a mistyped route."""
    raise NotFoundError(
        "This server has no embeddings: it serves one model, which generates text. Point the "
        "client's embeddings at a server with an embedding model."
    )


async def health(request: Request) -> Response:
    """GET /health: 200 while requests are taken; 503 when the engine hangs or is dead, or the
    server drains, and why."""
    context = _context(request)
    dead, hang = context.engine.unhealthy_reason, context.engine.hang_reason
    if context.limiter.draining:
        reason = f"the server is shutting down; {context.limiter.held} answers are not finished"
        body = {"status": "draining", "reason": reason}
    elif dead is not None or hang is not None:
        body = {"status": "unhealthy", "reason": str(dead or hang)}
    else:
        return JSONResponse({"status": "ok"})
    return JSONResponse(body, status_code=503)


async def metrics(request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    return Response(_context(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add(path: str, handler: Callable[..., Any], *methods: str) -> None:
    # With and without a slash at the end: a redirect would lose some clients' bodies.
    for spelling in (path, path + "/"):
        router.add_api_route(spelling, handler, methods=list(methods))


router.add_api_route("/", root, methods=["GET", "HEAD"])
_add("/v1/chat/completions", chat_completions, "POST")
_add("/v1/chat/completions", list_chats, "GET")
_add("/v1/chat/completions/{name}", get_chat, "GET")
_add("/v1/chat/completions/{name}", label_chat, "POST")
_add("/v1/chat/completions/{name}", delete_chat, "DELETE")
_add("/v1/chat/completions/{name}/messages", list_messages, "GET")
_add("/v1/responses/{name}", stored_response, "GET", "DELETE")
_add("/v1/completions", completions, "POST")
_add("/v1/responses", responses, "POST")
_add("/v1/messages", messages, "POST")
_add("/v1/messages/count_tokens", count_tokens, "POST")
_add("/tokenize", tokenize, "POST")
_add("/detokenize", detokenize, "POST")
_add("/v1/embeddings", embeddings, "POST")
_add("/v1/models", models, "GET")
router.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"])
_add("/health", health, "GET", "HEAD")
_add("/metrics", metrics, "GET")
