"""Every route, one line each. No imports of handlers: middleware reads this table as well."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, NamedTuple

ErrorStyle = Literal["openai", "anthropic"]


class Route(NamedTuple):
    """A route."""

    methods: str  # of HTTP, with spaces between them
    path: str  # as FastAPI takes it; it is served with a slash at its end too
    handler: str  # module and function within this package
    generates: bool = False  # its requests take slots of the engine's
    errors: ErrorStyle = "openai"  # their form, and that for unknown paths that begin so

    def load(self) -> Callable[..., Any]:
        module, _, function = self.handler.rpartition(".")
        handler: Callable[..., Any] = getattr(import_module(f"mlx_mtp.server.{module}"), function)
        return handler


_CHATS = "/v1/chat/completions"

ROUTES = (
    Route("POST", _CHATS, "openai.routes.chat_completions", generates=True),
    Route("GET", _CHATS, "openai.stored.list_chats"),
    Route("GET", _CHATS + "/{name}", "openai.stored.get_chat"),
    Route("POST", _CHATS + "/{name}", "openai.stored.label_chat"),
    Route("DELETE", _CHATS + "/{name}", "openai.stored.delete_chat"),
    Route("GET", _CHATS + "/{name}/messages", "openai.stored.list_messages"),
    Route("POST", "/v1/completions", "openai.routes.completions", generates=True),
    Route("POST", "/v1/responses", "responses.routes.responses", generates=True),
    Route("GET DELETE", "/v1/responses/{name}", "info_routes.stored_response"),
    Route("POST", "/v1/messages", "anthropic.routes.messages", generates=True, errors="anthropic"),
    Route("POST", "/v1/messages/count_tokens", "anthropic.routes.count_tokens", errors="anthropic"),
    Route("POST", "/tokenize", "token_routes.tokenize"),
    Route("POST", "/detokenize", "token_routes.detokenize"),
    Route("POST", "/v1/embeddings", "info_routes.embeddings"),
    Route("GET", "/v1/models", "info_routes.models"),
    Route("GET", "/v1/models/{model_id:path}", "info_routes.model"),
    Route("GET HEAD", "/health", "info_routes.health"),
    Route("GET", "/metrics", "info_routes.metrics"),
    Route("GET HEAD", "/", "info_routes.root"),
)
_GENERATING = frozenset(route.path for route in ROUTES if route.generates)
_ANTHROPIC = tuple(route.path for route in ROUTES if route.errors == "anthropic")


def generates(path: str) -> bool:
    """POST to this path takes slots of the engine's."""
    return path.rstrip("/") in _GENERATING


def error_style(path: str) -> ErrorStyle:
    """The API in whose form errors on this path are."""
    return "anthropic" if path.startswith(_ANTHROPIC) else "openai"
