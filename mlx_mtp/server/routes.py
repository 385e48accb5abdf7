"""The table of all routes, and the handlers of the models, of health and of metrics."""

from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.server import page
from mlx_mtp.server.api import stored, token_routes
from mlx_mtp.server.api.anthropic import routes as anthropic
from mlx_mtp.server.api.ollama import routes as ollama
from mlx_mtp.server.api.openai import routes as openai
from mlx_mtp.server.api.responses.routes import responses
from mlx_mtp.server.context import context_of
from mlx_mtp.server.http.errors import anthropic_error_body, ollama_error_body
from mlx_mtp.server.http.record import Route, route_finder


async def _models(request: Request) -> Response:
    context = context_of(request)
    names = context.model_names
    # OpenAI's form and Anthropic's in one: no field has two meanings.
    cursor = {"first_id": names[0], "last_id": names[-1], "has_more": False}
    return JSONResponse({"object": "list", "data": list(map(context.model_card, names)), **cursor})


async def _model(request: Request) -> Response:
    context = context_of(request)
    name = context.served_name(request.path_params["model_id"].rstrip("/"))
    return JSONResponse(context.model_card(name))


async def _health(request: Request) -> Response:
    context = context_of(request)
    if context.limiter.draining:
        reason = f"the server is shutting down; {context.limiter.held} answers are not finished"
        return JSONResponse({"status": "draining", "reason": reason}, 503)
    if context.fault is not None:
        return JSONResponse({"status": "unhealthy", "reason": context.fault}, 503)
    return JSONResponse({"status": "ok"})


async def _metrics(request: Request) -> Response:
    return Response(context_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


_CHATS = "/v1/chat/completions"
_anthropic = partial(Route, error_body=anthropic_error_body)
_open = partial(Route, needs_key=False, while_draining=True)
_ollama = partial(Route, error_body=ollama_error_body)
_ROUTES: tuple[Route, ...] = (
    Route("POST", _CHATS, openai.chat_completions, generates=True),
    Route("GET", _CHATS, stored.list_chats),
    Route("GET", _CHATS + "/{name}", stored.CHATS.get),
    Route("POST", _CHATS + "/{name}", stored.label_chat),
    Route("DELETE", _CHATS + "/{name}", stored.CHATS.delete),
    Route("GET", _CHATS + "/{name}/messages", stored.CHATS.inputs),
    Route("POST", "/v1/completions", openai.completions, generates=True),
    Route("POST", "/v1/responses", responses, generates=True),
    Route("GET", "/v1/responses/{name}", stored.RESPONSES.get),
    Route("DELETE", "/v1/responses/{name}", stored.RESPONSES.delete),
    Route("GET", "/v1/responses/{name}/input_items", stored.RESPONSES.inputs),
    _anthropic("POST", "/v1/messages", anthropic.messages, generates=True),
    _anthropic("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    Route("POST", "/tokenize", token_routes.tokenize),
    Route("POST", "/detokenize", token_routes.detokenize),
    _ollama("POST", "/api/chat", ollama.chat, generates=True),
    _ollama("POST", "/api/generate", ollama.generate, generates=True),
    _ollama("POST", "/api/show", ollama.show),
    _ollama("GET", "/api/tags", ollama.tags),
    _ollama("GET", "/api/ps", ollama.processes),
    _ollama("GET", "/api/version", ollama.version),
    Route("GET", "/v1/models", _models),
    Route("GET", "/v1/models/{model_id:path}", _model),
    _open("GET", "/health", _health, when_full=True, is_logged=False),
    Route("GET", "/metrics", _metrics, while_draining=True, when_full=True, is_logged=False),
    Route("GET", "/live", page.live, while_draining=True),
    Route("DELETE", "/live/{name}", page.cancel, while_draining=True),
    Route("GET", "/clients", page.clients),
    _open("GET", "/page/{name:path}", page.page_file, is_logged=False),
    _open("GET", "/", page.root),
)
# Without /v1 too, for clients that were given the host and port alone.
ROUTES = _ROUTES + tuple(
    route._replace(path=route.path.removeprefix("/v1"))
    for route in _ROUTES
    if route.path.startswith("/v1/")
)
find_route = route_finder(ROUTES)
