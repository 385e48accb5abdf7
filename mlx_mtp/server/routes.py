"""The routes. Each reads as its steps: body, checks, prompt, generation, answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.server.answers import ChatDialect, Dialect, Head, TextDialect, whole
from mlx_mtp.server.body import read_body
from mlx_mtp.server.context import Context
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.sse import EventStream, EventStreamResponse, until_disconnect
from mlx_mtp.server.wire import ChatRequest, CompletionRequest, GenerateRequest

router = APIRouter()


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    context = _context(request)
    body = await read_body(request, ChatRequest, context.config.max_body_bytes)
    context.check_model(body.model)
    params = context.sampling(body, num_prompts=1)
    prompts = await context.chat_prompts(body)
    head = context.head("chatcmpl", params.seed)
    dialect = ChatDialect(context.tokenizer, params.top_logprobs is not None)
    return await _answer(
        request, body, head, dialect, context.generation(head, body, params, prompts)
    )


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    context = _context(request)
    body = await read_body(request, CompletionRequest, context.config.max_body_bytes)
    context.check_model(body.model)
    params = context.sampling(body, num_prompts=len(body.prompts))
    prompts = await context.text_prompts(body)
    head = context.head("cmpl", params.seed)
    dialect = TextDialect(context.tokenizer, params.top_logprobs is not None)
    return await _answer(
        request, body, head, dialect, context.generation(head, body, params, prompts)
    )


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return JSONResponse({"object": "list", "data": [_context(request).model_card()]})


async def model(request: Request) -> Response:
    """GET /v1/models/{id}; ids may have slashes."""
    context = _context(request)
    context.check_model(request.path_params["model_id"].rstrip("/"))
    return JSONResponse(context.model_card())


async def health(request: Request) -> Response:
    """GET /health: 200 while the engine serves, 503 when it can't any more."""
    engine = _context(request).engine
    if engine.healthy:
        return JSONResponse({"status": "ok"})
    body = {"status": "unhealthy", "reason": engine.unhealthy_reason}
    return JSONResponse(body, status_code=503)


async def metrics(request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    return Response(_context(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add(path: str, handler: Callable[..., Any], *methods: str) -> None:
    # With and without a slash at the end: a redirect would lose some clients' bodies.
    for spelling in (path, path + "/"):
        router.add_api_route(spelling, handler, methods=list(methods))


_add("/v1/chat/completions", chat_completions, "POST")
_add("/v1/completions", completions, "POST")
_add("/v1/models", models, "GET")
router.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"])
_add("/health", health, "GET", "HEAD")
_add("/metrics", metrics, "GET")


def _context(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


async def _answer(
    request: Request,
    body: GenerateRequest,
    head: Head,
    dialect: Dialect,
    open_generation: Callable[[], Generation],
) -> Response:
    config = _context(request).config
    patience = config.keep_alive_seconds
    if body.stream:
        stream = EventStream(
            head,
            dialect,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            keep_alive_seconds=patience,
        )
        return EventStreamResponse(open_generation, stream)
    with open_generation() as generation:
        answer = await until_disconnect(
            request.receive, _whole_answer(generation, head, dialect, patience)
        )
    return JSONResponse(answer)


async def _whole_answer(
    generation: Generation, head: Head, dialect: Dialect, patience: float
) -> dict[str, Any]:
    deltas = [delta async for batch in generation.deltas(patience) for delta in batch]
    choices = [dialect.choice(delta) for delta in whole(deltas, len(generation.choices))]
    fields = head.fields(dialect.answer_kind, choices)
    return fields | {"usage": generation.usage(), "timings": generation.timings()}
