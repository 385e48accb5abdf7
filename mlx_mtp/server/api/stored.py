"""Chat completions and responses that are stored in memory (`store`), and their routes."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.bounded_json import shortened
from mlx_mtp.errors import (
    InvalidRequestError,
    NotFoundError,
    PreviousResponseError,
    UnsupportedParameterError,
)
from mlx_mtp.server.api.schema import Labels, WireModel
from mlx_mtp.server.context import context_of
from mlx_mtp.server.generation.writer import StoreAnswer, packed_json, packed_slowly
from mlx_mtp.server.http.body import read_request
from mlx_mtp.server.http.errors import from_validation
from mlx_mtp.server.http.record import client_of, record_of

MAX_STORED_BYTES = 64 << 20  # of JSON, shared equally by all API keys
_LABEL = re.compile(r"metadata\[(.*)\]")
Inputs = tuple[tuple[str, bytes], ...]  # messages or items, each with its id


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer and the inputs that led to it, as the JSON that clients get."""

    id: str
    model: str
    metadata: Mapping[str, str]
    answer: bytes
    inputs: Inputs

    @property
    def size(self) -> int:
        return len(self.answer) + size_of(self.inputs)

    def relabelled(self, metadata: Mapping[str, str]) -> "StoredAnswer":
        body = self.answer.removesuffix(_ending(self.metadata))
        return replace(self, metadata=metadata, answer=body + _ending(metadata))


def _make_stored(
    answer: dict[str, Any], metadata: Mapping[str, str], inputs: Inputs
) -> StoredAnswer:
    fields = {name: value for name, value in answer.items() if name != "metadata"}
    packed = packed_slowly(fields)[:-1].encode() + _ending(metadata)
    return StoredAnswer(answer["id"], answer["model"], metadata, packed, inputs)


def _ending(metadata: Mapping[str, str]) -> bytes:
    """Returns the metadata as the end of an answer's JSON: its last field."""
    return b"," + packed_json({"metadata": dict(metadata)})[1:].encode()


def _pack_items(items: Iterable[dict[str, Any]]) -> Inputs:
    return tuple((item["id"], packed_json(item).encode()) for item in items)


def size_of(inputs: Inputs) -> int:
    """Returns the bytes of the inputs' JSON."""
    return sum(len(packed) for _, packed in inputs)


class Store:
    """The latest stored answers, oldest first; the oldest are evicted for new ones."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_bytes, self._max_count, self._size = max_bytes, max_count, 0
        self._answers: dict[str, StoredAnswer] = {}
        self.all = self._answers.values
        self.find = self._answers.get

    def keep(self, answer: StoredAnswer) -> bool:
        """Store an answer or its new version; returns False, and changes nothing, if too large."""
        if answer.size > self.max_bytes:
            return False
        before = self.find(answer.id)
        self._size += answer.size - (0 if before is None else before.size)
        self._answers[answer.id] = answer
        while len(self._answers) > self._max_count or self._size > self.max_bytes:
            self.delete(next(name for name in self._answers if name != answer.id))
        return True

    def delete(self, name: str) -> None:
        self._size -= self._answers.pop(name).size


def _store(request: Request) -> Store:
    context = context_of(request)
    config = context.config
    most = min(MAX_STORED_BYTES, config.max_held_bytes // 8)
    share = most // max(1, config.num_keys)
    empty = Store(config.max_stored_completions, share)
    store: Store = context.stored.setdefault(record_of(request.scope).key, empty)
    return store


async def _respond_in_turn(request: Request, page: Callable[[], Response]) -> Response:
    # A page may be as large as the whole store.
    return await context_of(request).limiter.packing.run(client_of(request.scope), page)


async def keeper(
    request: Request,
    store: bool | None,
    metadata: Mapping[str, str] | None,
    inputs: Callable[[], Iterable[dict[str, Any]]],
    earlier: Inputs = (),
) -> StoreAnswer | None:
    """Returns a function that stores the answer with its inputs; None if the answer isn't stored.

    If `store` is None, the answer is stored if possible. If it is True, raises RequestError if the
    answer can't be stored.
    """
    if store is False:
        return None
    if not context_of(request).config.max_stored_completions:
        if store is None:
            return None
        message = "store: this server keeps no answers (--max-stored-completions 0)."
        raise UnsupportedParameterError(message, param="store")
    packed = earlier + await asyncio.to_thread(lambda: _pack_items(inputs()))
    size, most = size_of(packed), _store(request).max_bytes
    if size > most:
        if store is None:
            return None
        raise InvalidRequestError(
            f"store: the answer can't be kept. Its input, with the earlier answers that it "
            f"continues, has {size} bytes of JSON; at most {most} are kept.",
            param="store",
        )

    async def keep(answer: dict[str, Any]) -> None:
        _store(request).keep(await asyncio.to_thread(_make_stored, answer, metadata or {}, packed))

    return keep


async def continued(request: Request, name: str) -> Inputs:
    """Returns a stored response's inputs and output; raises PreviousResponseError.

    Their bytes count as a part of the request's body.
    """
    try:
        stored = RESPONSES.find(request, name)
    except NotFoundError as error:
        raise PreviousResponseError(str(error), param="previous_response_id") from None
    answer = stored.answer
    output = await asyncio.to_thread(lambda: _pack_items(json.loads(answer)["output"]))
    record_of(request.scope).body_bytes += size_of(stored.inputs + output)
    return stored.inputs + output


class _LabelsBody(WireModel):
    metadata: Labels = Field({})


class _PageQuery(WireModel):
    after: str | None = None  # the id of the previous page's last item
    limit: Annotated[int, Field(strict=False, ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "asc"


class _ItemsQuery(_PageQuery):
    order: Literal["asc", "desc"] = "desc"
    # Without effect: items always have all their fields.
    include: str | None = Field(None, validation_alias=AliasChoices("include", "include[]"))


class _ChatsQuery(_PageQuery, _LabelsBody):
    model: str | None = None


Query = TypeVar("Query", bound=_PageQuery)


@dataclass(frozen=True, slots=True)
class StoredKind:
    """A kind of stored answers, with the routes that all kinds have."""

    prefix: str  # of the ids
    noun: str  # in errors
    unasked: str  # in errors: the parameter with which an answer isn't stored
    deleted: str  # the `object` of the answer to DELETE
    query: type[_PageQuery]  # the parameters of the list of inputs

    def find(self, request: Request, name: str | None = None) -> StoredAnswer:
        """Returns the answer with the id `name` (None: the path's id); raises NotFoundError."""
        name = request.path_params["name"] if name is None else name
        answer = _store(request).find(name) if name.startswith(self.prefix) else None
        if answer is None:
            made = f"{self.unasked}, was too large, was deleted, or made room for newer ones"
            raise NotFoundError(
                f"There is no stored {self.noun} {shortened(name)!r}: it was made {made}."
            )
        return answer

    async def get(self, request: Request) -> Response:
        """GET {id}."""
        if request.query_params.get("stream", "false") != "false":
            message = "stream: what is stored is sent as a whole; leave it out."
            raise UnsupportedParameterError(message, param="stream")
        return _json(self.find(request).answer)

    async def delete(self, request: Request) -> Response:
        """DELETE {id}."""
        name = self.find(request).id
        _store(request).delete(name)
        return JSONResponse({"object": self.deleted, "id": name, "deleted": True})

    async def inputs(self, request: Request) -> Response:
        """GET {id}/messages or {id}/input_items."""
        query = _query(request, self.query)
        return await _respond_in_turn(request, partial(_page, self.find(request).inputs, query))


CHATS = StoredKind(
    *("chatcmpl-", "chat completion", "without `store: true`", "chat.completion.deleted"),
    _PageQuery,
)
RESPONSES = StoredKind("resp_", "response", "with `store: false`", "response", _ItemsQuery)


async def list_chats(request: Request) -> Response:
    """GET /v1/chat/completions."""
    query = _query(request, _ChatsQuery)
    stored = [*_store(request).all()]

    def page() -> Response:
        chats = [
            (chat.id, chat.answer)
            for chat in stored
            if chat.id.startswith(CHATS.prefix)
            and query.model in (None, chat.model)
            and query.metadata.items() <= chat.metadata.items()
        ]
        return _page(chats, query)

    return await _respond_in_turn(request, page)


async def label_chat(request: Request) -> Response:
    """POST /v1/chat/completions/{id}, which changes the metadata."""
    _, body = await read_request(request, _LabelsBody)
    # Nothing is awaited between finding and storing the chat: it could be deleted meanwhile.
    chat = CHATS.find(request).relabelled(body.metadata)
    if not _store(request).keep(chat):
        message = f"metadata: with it the answer is {chat.size} bytes, too large to be kept."
        raise InvalidRequestError(message, param="metadata")
    return _json(chat.answer)


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
        message = f"after: there is no {shortened(query.after)!r} in this list."
        raise InvalidRequestError(message, param="after")
    first = 0 if query.after is None else ids.index(query.after) + 1
    last = first + query.limit
    # The ids of an empty page are strings too.
    shown = ids[first:last] or [""]
    ends = {"first_id": shown[0], "last_id": shown[-1], "has_more": len(listed) > last}
    items = [piece for _, packed in listed[first:last] for piece in (b",", packed)][1:]
    tail = b"]," + packed_json(ends)[1:].encode()
    return _json(b"".join((b'{"object":"list","data":[', *items, tail)))
