"""The routes of stored chat completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.server.context import context_of, read
from mlx_mtp.server.fields import Labels, WireModel
from mlx_mtp.server.http_errors import from_validation
from mlx_mtp.server.openai.stored import StoredChat
from mlx_mtp.server.text import cut
from mlx_mtp.server.writer import packed_json

MAX_PAGE = 100
"""Most items of one page."""
_LABEL = re.compile(r"metadata\[(.*)\]")


class _PageQuery(WireModel):
    after: str | None = None  # The id of the last item of the page before this one.
    limit: Annotated[int, Field(strict=False, ge=1, le=MAX_PAGE)] = 20
    order: Literal["asc", "desc"] = "asc"


class _ChatsQuery(_PageQuery):
    model: str | None = None
    metadata: Labels = Field(default_factory=dict)


class _NewLabels(WireModel):
    metadata: Labels = Field(default_factory=dict)


async def list_chats(request: Request) -> Response:
    """GET /v1/chat/completions."""
    query = _query(request, _ChatsQuery)
    chats = [
        chat
        for chat in context_of(request).stored(request).all()
        if query.model in (None, chat.model) and query.metadata.items() <= chat.metadata.items()
    ]
    return _page([(chat.id, chat.completion) for chat in chats], query)


async def get_chat(request: Request) -> Response:
    """GET /v1/chat/completions/{id}."""
    return _completion(_stored_chat(request))


async def label_chat(request: Request) -> Response:
    """POST /v1/chat/completions/{id}: only the metadata changes."""
    context, body = await read(request, _NewLabels)
    name = request.path_params["name"]
    return _completion(context.stored(request).label(name, body.metadata))


async def delete_chat(request: Request) -> Response:
    """DELETE /v1/chat/completions/{id}."""
    name = request.path_params["name"]
    context_of(request).stored(request).delete(name)
    return JSONResponse({"object": "chat.completion.deleted", "id": name, "deleted": True})


async def list_messages(request: Request) -> Response:
    """GET /v1/chat/completions/{id}/messages: what was asked."""
    query = _query(request, _PageQuery)
    chat = _stored_chat(request)
    return _page([(f"{chat.id}-{n}", m) for n, m in enumerate(chat.messages)], query)


def _stored_chat(request: Request) -> StoredChat:
    return context_of(request).stored(request).get(request.path_params["name"])


def _completion(chat: StoredChat) -> Response:
    return Response(chat.completion, media_type="application/json")


Query = TypeVar("Query", bound=_PageQuery)


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


def _page(entries: Sequence[tuple[str, bytes]], query: _PageQuery) -> Response:
    """A page of a list, whose entries are the id and the JSON of each item, oldest first."""
    listed = list(entries) if query.order == "asc" else list(reversed(entries))
    ids = [name for name, _ in listed]
    if query.after is not None and query.after not in ids:
        raise InvalidRequestError(
            f"after: there is no {cut(query.after)!r} in this list.", param="after"
        )
    first = 0 if query.after is None else ids.index(query.after) + 1
    last = first + query.limit
    # The ids are strings even where the page is empty.
    shown = ids[first:last] or [""]
    ends = {"first_id": shown[0], "last_id": shown[-1], "has_more": len(listed) > last}
    items = b",".join(packed for _, packed in listed[first:last])
    content = b'{"object":"list","data":[' + items + b"]," + packed_json(ends)[1:].encode()
    return Response(content, media_type="application/json")
