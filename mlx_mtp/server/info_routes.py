"""The routes that say what the server is and how it is."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.errors import NotFoundError
from mlx_mtp.server.context import context_of
from mlx_mtp.server.text import cut


async def models(request: Request) -> Response:
    """GET /v1/models."""
    card = context_of(request).model_card()
    # OpenAI's form and Anthropic's at once: no name means two things.
    page = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
    return JSONResponse({"object": "list", "data": [card], **page})


async def model(request: Request) -> Response:
    """GET /v1/models/{id}; ids may have slashes."""
    context = context_of(request)
    context.check_model(request.path_params["model_id"].rstrip("/"))
    return JSONResponse(context.model_card())


async def root(_: Request) -> Response:
    """GET and HEAD /: agents ask whether there is a server. No version: it is open to all."""
    return JSONResponse({"name": "mlx-mtp"})


async def stored_response(request: Request) -> Response:
    """GET and DELETE of one response: none is stored."""
    name = cut(request.path_params["name"])
    raise NotFoundError(f"There is no {name!r}: this server stores no responses.")


async def embeddings(_: Request) -> Response:
    """POST /v1/embeddings: a better message than that of a mistyped route."""
    raise NotFoundError(
        "This server has no embeddings: it serves one model, which generates text. Point the "
        "client's embeddings at a server with an embedding model."
    )


async def health(request: Request) -> Response:
    """GET /health: 200 while requests are accepted, else 503 and why."""
    context = context_of(request)
    reason = context.engine.unhealthy_reason or context.engine.hang_reason
    if context.limiter.draining:
        held = context.limiter.held
        reason = f"the server is shutting down; {held} answers are not finished"
        body = {"status": "draining", "reason": reason}
    elif reason is not None:
        body = {"status": "unhealthy", "reason": reason}
    else:
        return JSONResponse({"status": "ok"})
    return JSONResponse(body, status_code=503)


async def metrics(request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    return Response(context_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)
