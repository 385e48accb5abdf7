"""All routes, and the handlers of those that say what the server is and how it is."""

from collections.abc import Awaitable, Callable

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


async def _models(request: Request) -> Response:
    context = context_of(request)
    names = context.model_names
    # OpenAI's form and Anthropic's at once: no name means two things.
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
# Methods (with GET goes HEAD), path, handler, and whether its requests take slots of the engine's.
_Route = tuple[str, str, Callable[[Request], Awaitable[Response]], bool]
_ROUTES: tuple[_Route, ...] = (
    ("POST", _CHATS, openai.chat_completions, True),
    ("GET", _CHATS, stored.list_chats, False),
    ("GET", _CHATS + "/{name}", stored.CHATS.get, False),
    ("POST", _CHATS + "/{name}", stored.label_chat, False),
    ("DELETE", _CHATS + "/{name}", stored.CHATS.delete, False),
    ("GET", _CHATS + "/{name}/messages", stored.CHATS.inputs, False),
    ("POST", "/v1/completions", openai.completions, True),
    ("POST", "/v1/responses", responses, True),
    ("GET", "/v1/responses/{name}", stored.RESPONSES.get, False),
    ("DELETE", "/v1/responses/{name}", stored.RESPONSES.delete, False),
    ("GET", "/v1/responses/{name}/input_items", stored.RESPONSES.inputs, False),
    ("POST", "/v1/messages", anthropic.messages, True),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens, False),
    ("POST", "/tokenize", token_routes.tokenize, False),
    ("POST", "/detokenize", token_routes.detokenize, False),
    ("POST", "/api/chat", ollama.chat, True),
    ("POST", "/api/generate", ollama.generate, True),
    ("POST", "/api/show", ollama.show, False),
    ("GET", "/api/tags", ollama.tags, False),
    ("GET", "/api/ps", ollama.processes, False),
    ("GET", "/api/version", ollama.version, False),
    ("GET", "/v1/models", _models, False),
    ("GET", "/v1/models/{model_id:path}", _model, False),
    ("GET", "/health", _health, False),
    ("GET", "/metrics", _metrics, False),
    ("GET", "/live", page.live, False),
    ("DELETE", "/live/{name}", page.cancel, False),
    ("GET", "/clients", page.clients, False),
    ("GET", "/page/{name:path}", page.file, False),
    ("GET", "/", page.root, False),
)
# Without /v1 too, for clients that got no more of the address than host and port.
ROUTES = _ROUTES + tuple(
    (methods, path.removeprefix("/v1"), handler, generates)
    for methods, path, handler, generates in _ROUTES
    if path.startswith("/v1/")
)
