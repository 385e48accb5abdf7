"""Gives all routes (`server/table.py`) their handlers; has the handlers of models and metrics."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.server import page
from mlx_mtp.server.api import embeddings, stored, token_routes
from mlx_mtp.server.api.anthropic import routes as anthropic
from mlx_mtp.server.api.ollama import routes as ollama
from mlx_mtp.server.api.openai import routes as openai
from mlx_mtp.server.api.responses.routes import responses
from mlx_mtp.server.cards import model_list
from mlx_mtp.server.context import context_of
from mlx_mtp.server.http.record import route_finder
from mlx_mtp.server.table import route_table


async def _models(request: Request) -> Response:
    context = context_of(request)
    return JSONResponse(model_list(list(map(context.model_card, context.model_names))))


async def _model(request: Request) -> Response:
    context = context_of(request)
    name = context.served_name(request.path_params["model_id"].rstrip("/"))
    return JSONResponse(context.model_card(name))


async def _metrics(request: Request) -> Response:
    return Response(context_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


ROUTES = route_table(
    {
        "chat_completions": openai.chat_completions,
        "list_chats": stored.list_chats,
        "stored_chat": stored.CHATS.get,
        "label_chat": stored.label_chat,
        "delete_chat": stored.CHATS.delete,
        "stored_messages": stored.CHATS.inputs,
        "completions": openai.completions,
        "responses": responses,
        "stored_response": stored.RESPONSES.get,
        "delete_response": stored.RESPONSES.delete,
        "stored_items": stored.RESPONSES.inputs,
        "messages": anthropic.messages,
        "count_tokens": anthropic.count_tokens,
        "tokenize": token_routes.tokenize,
        "detokenize": token_routes.detokenize,
        "ollama_chat": ollama.chat,
        "ollama_generate": ollama.generate,
        "embeddings": embeddings.embeddings,
        "ollama_embed": embeddings.ollama_embed,
        "show": ollama.show,
        "tags": ollama.tags,
        "processes": ollama.processes,
        "ollama_version": page.ollama_version,
        "models": _models,
        "model": _model,
        "health": page.health,
        "metrics": _metrics,
        "live": page.live,
        "cancel": page.cancel,
        "clients": page.clients,
        "page_file": page.page_file,
        "root": page.root,
    }
)
find_route = route_finder(ROUTES)
