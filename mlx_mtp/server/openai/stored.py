"""Chat completions that clients asked to be kept (`store: true`), in memory, and their routes."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.errors import InvalidRequestError, NotFoundError, UnsupportedParameterError
from mlx_mtp.server.access import key_of
from mlx_mtp.server.context import context_of, read
from mlx_mtp.server.fields import Labels, WireModel
from mlx_mtp.server.http_errors import from_validation
from mlx_mtp.server.openai.wire import ChatRequest
from mlx_mtp.server.sse import Keep
from mlx_mtp.server.text import cut
from mlx_mtp.server.writer import packed_json

MAX_STORED_BYTES = 64 << 20  # of JSON that are kept in all; only the newest may be larger
_LABEL = re.compile(r"metadata\[(.*)\]")


@dataclass(frozen=True, slots=True)
class StoredChat:
    """A completion and the messages of its request, as the JSON that clients get."""

    id: str
    model: str
    metadata: Mapping[str, str]
    completion: bytes
    messages: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return len(self.completion) + sum(map(len, self.messages))


def _packed(
    answer: dict[str, Any], metadata: Mapping[str, str], messages: tuple[bytes, ...]
) -> StoredChat:
    packed = packed_json(answer | {"metadata": dict(metadata)}).encode()
    return StoredChat(answer["id"], answer["model"], metadata, packed, messages)


class StoredChats:
    """The latest stored completions, oldest first; the oldest are evicted for new ones."""

    def __init__(self, max_count: int, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_count, self._max_bytes, self._size = max_count, max_bytes, 0
        self._chats: dict[str, StoredChat] = {}
        self.all = self._chats.values

    def keep(self, chat: StoredChat) -> None:
        self._size += chat.size - (self._chats[chat.id].size if chat.id in self._chats else 0)
        self._chats[chat.id] = chat
        while len(self._chats) > self._max_count or (
            self._size > self._max_bytes and len(self._chats) > 1
        ):
            self.delete(next(iter(self._chats)))

    def get(self, name: str) -> StoredChat:
        if name not in self._chats:
            raise NotFoundError(
                f"There is no stored chat completion {cut(name)!r}: it was made without "
                "`store: true`, was deleted, or was replaced by newer ones."
            )
        return self._chats[name]

    def delete(self, name: str) -> None:
        self._size -= self.get(name).size
        del self._chats[name]


def _stored_chats(request: Request) -> StoredChats:
    context = context_of(request)
    empty = StoredChats(context.config.max_stored_completions)
    found: StoredChats = context.stored.setdefault(key_of(request.scope), empty)
    return found


async def keeper(request: Request, body: ChatRequest, answer_id: str) -> Keep:
    """What stores the answer and its request; raises UnsupportedParameterError if none is kept."""
    if not context_of(request).config.max_stored_completions:
        message = "store: this server keeps no completions (--max-stored-completions 0)."
        raise UnsupportedParameterError(message, param="store")

    def pack() -> tuple[bytes, ...]:
        return tuple(
            packed_json({"id": f"{answer_id}-{n}", **m.model_dump(exclude_none=True)}).encode()
            for n, m in enumerate(body.messages)
        )

    messages = await asyncio.to_thread(pack)
    stored = _stored_chats(request)
    return lambda answer: stored.keep(_packed(answer, body.metadata or {}, messages))


class _Labels(WireModel):
    metadata: Labels = Field({})


class _PageQuery(WireModel):
    after: str | None = None  # The id of the last item of the page before this one.
    limit: Annotated[int, Field(strict=False, ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "asc"


class _ChatsQuery(_PageQuery, _Labels):
    model: str | None = None


Query = TypeVar("Query", bound=_PageQuery)


async def list_chats(request: Request) -> Response:
    """GET /v1/chat/completions."""
    query = _query(request, _ChatsQuery)
    chats = [
        (chat.id, chat.completion)
        for chat in _stored_chats(request).all()
        if query.model in (None, chat.model) and query.metadata.items() <= chat.metadata.items()
    ]
    return _page(chats, query)


async def get_chat(request: Request) -> Response:
    """GET /v1/chat/completions/{id}."""
    return _json(_named(request).completion)


async def label_chat(request: Request) -> Response:
    """POST /v1/chat/completions/{id}: only the metadata changes."""
    _, body = await read(request, _Labels)
    old = _named(request)
    chat = _packed(json.loads(old.completion), body.metadata, old.messages)
    _stored_chats(request).keep(chat)
    return _json(chat.completion)


async def delete_chat(request: Request) -> Response:
    """DELETE /v1/chat/completions/{id}."""
    name = request.path_params["name"]
    _stored_chats(request).delete(name)
    return JSONResponse({"object": "chat.completion.deleted", "id": name, "deleted": True})


async def list_messages(request: Request) -> Response:
    """GET /v1/chat/completions/{id}/messages: what was asked."""
    query, chat = _query(request, _PageQuery), _named(request)
    return _page([(f"{chat.id}-{n}", m) for n, m in enumerate(chat.messages)], query)


def _named(request: Request) -> StoredChat:
    return _stored_chats(request).get(request.path_params["name"])


_json = partial(Response, media_type="application/json")


def _query(request: Request, model: type[Query]) -> Query:
    fields: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        label = _LABEL.fullmatch(name)
        if label is None:
            fields[name] = value
        elif isinstance(fields.setdefault("metadata", {}), dict):
            fields["metadata"][label[1]] = value
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None


def _page(entries: Sequence[tuple[str, bytes]], query: _PageQuery) -> Response:
    listed = list(entries) if query.order == "asc" else list(reversed(entries))
    ids = [name for name, _ in listed]
    if query.after is not None and query.after not in ids:
        message = f"after: there is no {cut(query.after)!r} in this list."
        raise InvalidRequestError(message, param="after")
    first = 0 if query.after is None else ids.index(query.after) + 1
    last = first + query.limit
    # The ids are strings even where the page is empty.
    shown = ids[first:last] or [""]
    ends = {"first_id": shown[0], "last_id": shown[-1], "has_more": len(listed) > last}
    items = b",".join(packed for _, packed in listed[first:last])
    return _json(b'{"object":"list","data":[' + items + b"]," + packed_json(ends)[1:].encode())
