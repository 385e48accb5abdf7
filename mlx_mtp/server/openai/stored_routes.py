"""The routes of stored chat completions."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.server.body import read_body
from mlx_mtp.server.fields import Labels, WireModel
from mlx_mtp.server.http_errors import from_validation
from mlx_mtp.server.openai.stored import Page, StoredChat
from mlx_mtp.server.respond import context_of, stored_of

MAX_PAGE = 100
"""Most items of one page."""
_LABEL = re.compile(r"metadata\[(.*)\]")

Query = TypeVar("Query", bound="PageQuery")


class PageQuery(WireModel):
    """Which part of a list is wanted."""

    after: str | None = None
    limit: Annotated[int, Field(strict=False, ge=1, le=MAX_PAGE)] = 20
    order: Literal["asc", "desc"] = "asc"


class ChatsQuery(PageQuery):
    """The same, of the completions that fit."""

    model: str | None = None
    metadata: Labels = Field(default_factory=dict)

    def fits(self, chat: StoredChat) -> bool:
        """Whether this completion is asked for."""
        same_model = self.model in (None, chat.model)
        return same_model and self.metadata.items() <= chat.metadata.items()


class NewLabels(WireModel):
    """POST /v1/chat/completions/{id}: null takes the labels away."""

    metadata: Labels = Field(default_factory=dict)


async def list_chats(request: Request) -> Response:
    """GET /v1/chat/completions."""
    query = _query(request, ChatsQuery)
    chats = [chat for chat in stored_of(request).all() if query.fits(chat)]
    return _page([(chat.id, chat.completion) for chat in chats], query)


async def get_chat(request: Request) -> Response:
    """GET /v1/chat/completions/{id}."""
    return _completion(stored_of(request).get(request.path_params["name"]))


async def label_chat(request: Request) -> Response:
    """POST /v1/chat/completions/{id}: only the metadata changes."""
    context = context_of(request)
    body = await read_body(request, NewLabels, context.config.max_body_bytes)
    return _completion(stored_of(request).label(request.path_params["name"], body.metadata))


async def delete_chat(request: Request) -> Response:
    """DELETE /v1/chat/completions/{id}."""
    name = request.path_params["name"]
    stored_of(request).delete(name)
    return JSONResponse({"object": "chat.completion.deleted", "id": name, "deleted": True})


async def list_messages(request: Request) -> Response:
    """GET /v1/chat/completions/{id}/messages: what was asked."""
    query = _query(request, PageQuery)
    chat = stored_of(request).get(request.path_params["name"])
    return _page([(f"{chat.id}-{n}", m) for n, m in enumerate(chat.messages)], query)


def _query(request: Request, model: type[Query]) -> Query:
    fields: dict[str, object] = {}
    labels: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        label = _LABEL.fullmatch(name)
        if label is not None:
            labels[label[1]] = value
        else:
            fields[name] = value
    if labels:
        fields["metadata"] = labels
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None


def _page(entries: list[tuple[str, bytes]], query: PageQuery) -> Response:
    page = Page.cut(entries, query.after, query.limit, query.order)
    return Response(page.json(), media_type="application/json")


def _completion(chat: StoredChat) -> Response:
    return Response(chat.completion, media_type="application/json")
