"""The table of all routes, for a model's server and the parent of several (`mlx_mtp.router`)."""

from collections.abc import Mapping
from functools import partial

from mlx_mtp.server.http.errors import anthropic_error_body, ollama_error_body
from mlx_mtp.server.http.record import Handler, Route

_CHATS = "/v1/chat/completions"
_anthropic = partial(Route, error_body=anthropic_error_body)
_open = partial(Route, needs_key=False, while_draining=True)
_ollama = partial(Route, error_body=ollama_error_body)


def route_table(handlers: Mapping[str, Handler]) -> tuple[Route, ...]:
    """Returns the table of all routes; `handlers` has each route's handler by name."""
    rows: tuple[Route, ...] = (
        Route("POST", _CHATS, handlers["chat_completions"], generates=True),
        Route("GET", _CHATS, handlers["list_chats"]),
        Route("GET", _CHATS + "/{name}", handlers["stored_chat"]),
        Route("POST", _CHATS + "/{name}", handlers["label_chat"]),
        Route("DELETE", _CHATS + "/{name}", handlers["delete_chat"]),
        Route("GET", _CHATS + "/{name}/messages", handlers["stored_messages"]),
        Route("POST", "/v1/completions", handlers["completions"], generates=True),
        Route("POST", "/v1/responses", handlers["responses"], generates=True),
        Route("GET", "/v1/responses/{name}", handlers["stored_response"]),
        Route("DELETE", "/v1/responses/{name}", handlers["delete_response"]),
        Route("GET", "/v1/responses/{name}/input_items", handlers["stored_items"]),
        _anthropic("POST", "/v1/messages", handlers["messages"], generates=True),
        _anthropic("POST", "/v1/messages/count_tokens", handlers["count_tokens"]),
        Route("POST", "/tokenize", handlers["tokenize"]),
        Route("POST", "/detokenize", handlers["detokenize"]),
        _ollama("POST", "/api/chat", handlers["ollama_chat"], generates=True),
        _ollama("POST", "/api/generate", handlers["ollama_generate"], generates=True),
        Route("POST", "/v1/embeddings", handlers["embeddings"], generates=True, embeds=True),
        _ollama("POST", "/api/embed", handlers["ollama_embed"], generates=True, embeds=True),
        _ollama("POST", "/api/show", handlers["show"]),
        _ollama("GET", "/api/tags", handlers["tags"]),
        _ollama("GET", "/api/ps", handlers["processes"]),
        _ollama("GET", "/api/version", handlers["ollama_version"]),
        Route("GET", "/v1/models", handlers["models"]),
        Route("GET", "/v1/models/{model_id:path}", handlers["model"]),
        _open("GET", "/health", handlers["health"], when_full=True, is_logged=False),
        Route(
            "GET",
            "/metrics",
            handlers["metrics"],
            while_draining=True,
            when_full=True,
            is_logged=False,
        ),
        Route("GET", "/live", handlers["live"], while_draining=True),
        Route("DELETE", "/live/{name}", handlers["cancel"], while_draining=True),
        Route("GET", "/clients", handlers["clients"]),
        _open("GET", "/page/{name:path}", handlers["page_file"], is_logged=False),
        _open("GET", "/", handlers["root"]),
    )
    # Also without /v1, for clients that were given only the host and port.
    return rows + tuple(
        row._replace(path=row.path.removeprefix("/v1"))
        for row in rows
        if row.path.startswith("/v1/")
    )
