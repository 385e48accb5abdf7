"""Handlers that ask several models: their list, state, metrics and stored answers."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp import __version__
from mlx_mtp.errors import InvalidRequestError, NotFoundError
from mlx_mtp.router.forward import child_request
from mlx_mtp.server import cards
from mlx_mtp.server.http.body import RoutedBody, read_body, read_bytes
from mlx_mtp.server.merged import merged_metrics, merged_stream
from mlx_mtp.unix_http import ask

if TYPE_CHECKING:
    from mlx_mtp.router.app import RouterState
    from mlx_mtp.router.fleet import ServedModel


def _state(request: Request) -> RouterState:
    state: RouterState = request.app.state.context
    return state


def _card(state: RouterState, model: ServedModel) -> dict[str, Any]:
    plan = model.plan
    own: dict[str, Any] = {"state": model.shown_state, "size": plan.get("weights", 0)}
    own |= {"embeddings": True} if plan.get("able") == cards.EMBEDS else {}
    made = cards.model_card(model.name, state.created, plan.get("context", 0), draft_sources=[])
    made |= model.card | {"id": model.name, "display_name": model.name} | own
    sizes = ("max_model_len", "max_input_tokens", "size")  # unknown until the model is planned
    return {key: value for key, value in made.items() if value or key not in sizes}


def _ollama_card(state: RouterState, model: ServedModel, **more: Any) -> dict[str, Any]:
    more |= {"kind": model.plan.get("kind", ""), "size": model.plan.get("weights", 0)}
    return cards.ollama_card(model.name, state.created, state=model.shown_state, **more)


async def models_of_all(request: Request) -> Response:
    """GET /v1/models."""
    state = _state(request)
    return JSONResponse(cards.model_list([_card(state, each) for each in state.fleet.models]))


async def model_of_all(request: Request) -> Response:
    """GET /v1/models/ID."""
    state, name = _state(request), request.path_params["model_id"].rstrip("/")
    return JSONResponse(_card(state, state.fleet.find(name)) | {"id": name, "display_name": name})


async def tags_of_all(request: Request) -> Response:
    """GET /api/tags: all models."""
    state = _state(request)
    return JSONResponse({"models": [_ollama_card(state, each) for each in state.fleet.models]})


async def processes_of_all(request: Request) -> Response:
    """GET /api/ps: the models in memory."""
    state, listed = _state(request), []
    for each in state.fleet.models:
        if each.share:
            left = min(state.fleet.seconds_left(each), 1e10)  # kept in the range of dates
            until = datetime.fromtimestamp(time.time() + left, UTC).isoformat()
            length = _card(state, each).get("max_model_len", 0)
            more = {"expires_at": until, "size_vram": each.share, "context_length": length}
            listed.append(_ollama_card(state, each, **more))
    return JSONResponse({"models": listed})


async def show_of_all(request: Request) -> Response:
    """POST /api/show. It loads no model, as clients request it for every model."""
    state = _state(request)
    content, body = await read_body(request, state, RoutedBody)
    each = state.fleet.find(body.model or body.name)
    if each.is_ready:
        return await _answer_of(request, each, content)
    kind, length = each.plan.get("kind", ""), each.plan.get("context", 0)
    able = each.plan.get("able", ["completion"])
    return JSONResponse(cards.ollama_show(kind, length, state.created, able))


async def of_one(request: Request) -> Response:
    """Ask each process in turn; return the first answer other than 404, or the last 404."""
    state = _state(request)
    content = await read_bytes(request, state.config, state.held)
    answer = None
    for each in state.fleet.running:
        with contextlib.suppress(OSError):
            answer = await _answer_of(request, each, content)
            if answer.status_code != NotFoundError.status:
                return answer
    if answer is None:
        raise NotFoundError("No model is loaded; what one has stored goes when it is unloaded.")
    return answer


async def list_chats_of_all(request: Request) -> Response:
    """GET /v1/chat/completions: the stored chats of one model."""
    fleet, name = _state(request).fleet, request.query_params.get("model", "")
    asked = [each for each in fleet.running if not name or each is fleet.find(name)]
    if len(asked) == 1:
        return await _answer_of(request, asked[0], b"")
    if asked:
        names = ", ".join(each.name for each in asked)
        raise InvalidRequestError(f"model: give one of {names}.", param="model")
    return JSONResponse(cards.model_list([]))


async def _answer_of(request: Request, model: ServedModel, content: bytes) -> Response:
    scope, child = request.scope, model.child
    if child is None:
        raise ConnectionRefusedError("The model's process has ended a moment ago.")
    with await ask(child.path, *child_request(scope), content) as answer:
        kind = dict(answer.headers).get(b"content-type", b"application/json").decode()
        return Response(await answer.body(), answer.status, media_type=kind)


async def metrics_of_all(request: Request) -> Response:
    """GET /metrics: the parent's own, and those of each process with the label `model`."""
    state, texts = _state(request), {}
    for each in state.fleet.running:
        with contextlib.suppress(OSError):
            texts[each.name] = bytes((await _answer_of(request, each, b"")).body).decode()
    return Response(merged_metrics(state.metrics.render(), texts), media_type=CONTENT_TYPE_LATEST)


class LiveFeed:
    """The state of all models in one message, as the page and `mlx-mtp top` show it."""

    watching = contextlib.nullcontext  # Each process limits its watchers.

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def event_stream(self) -> AsyncIterator[bytes]:
        """Yields server-sent events that merge those of the processes."""
        state, limiter = self._state, self._state.limiter

        def paths() -> dict[str, Path]:
            return {each.name: each.child.path for each in state.fleet.running if each.child}

        async for message in merged_stream(paths):
            message["waiting"] += sum(len(each.waiting) for each in state.fleet.models)
            message["server"] |= {
                "models": state.model_names,
                "states": {each.name: each.shown_state for each in state.fleet.models},
                "version": __version__,
                "state": "stopping" if limiter.draining else "ready",
                "reason": None,
                "uptime": time.time() - state.created.timestamp(),
            }
            yield b"data: " + json.dumps(message).encode() + b"\n\n"
            if limiter.draining and limiter.num_reserved == 0:
                return
