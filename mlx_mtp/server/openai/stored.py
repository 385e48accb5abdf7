"""Chat completions that clients asked to be kept (`store: true`): in memory, and not many."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_mtp.errors import InvalidRequestError, NotFoundError
from mlx_mtp.server.choice import Delta
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.text import cut
from mlx_mtp.server.whole import Answer, assemble
from mlx_mtp.server.writer import Writer

MAX_STORED_BYTES = 64 << 20
"""Most bytes of JSON that are kept in all; only the newest completion may be larger."""


@dataclass(frozen=True, slots=True)
class StoredChat:
    """A completion and what was asked, as the JSON that clients get.

    Args:
        id: the completion's.
        model: that made it.
        metadata: the client's labels.
        completion: the whole object.
        messages: of the request, an object each.
    """

    id: str
    model: str
    metadata: Mapping[str, str]
    completion: bytes
    messages: tuple[bytes, ...]

    @classmethod
    def of(
        cls, completion: dict[str, Any], metadata: Mapping[str, str], messages: tuple[bytes, ...]
    ) -> StoredChat:
        """Pack a completion that has just been made."""
        packed = packed_json(completion | {"metadata": dict(metadata)})
        return cls(completion["id"], completion["model"], metadata, packed, messages)

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return len(self.completion) + sum(map(len, self.messages))


class StoredChats:
    """The latest stored completions, oldest first; the oldest make room for new ones.

    Args:
        max_count: most completions to keep.
        max_bytes: most bytes of their JSON.
    """

    def __init__(self, max_count: int, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._size = 0
        self._chats: dict[str, StoredChat] = {}

    def all(self) -> list[StoredChat]:
        """All of them, oldest first."""
        return list(self._chats.values())

    def keep(self, chat: StoredChat) -> None:
        """Store a completion, or what has become of it."""
        old = self._chats.get(chat.id)
        self._size += chat.size - (old.size if old is not None else 0)
        self._chats[chat.id] = chat
        while len(self._chats) > self._max_count or (
            self._size > self._max_bytes and len(self._chats) > 1
        ):
            self.delete(next(iter(self._chats)))

    def get(self, name: str) -> StoredChat:
        """One of them.

        Raises:
            NotFoundError: there is none of this id.
        """
        chat = self._chats.get(name)
        if chat is None:
            raise NotFoundError(
                f"There is no stored chat completion {cut(name)!r}: it was made without "
                "`store: true`, was deleted, or was replaced by newer ones."
            )
        return chat

    def delete(self, name: str) -> None:
        """Forget one.

        Raises:
            NotFoundError: there is none of this id.
        """
        self._size -= self.get(name).size
        del self._chats[name]

    def label(self, name: str, metadata: Mapping[str, str]) -> StoredChat:
        """Give one other metadata.

        Raises:
            NotFoundError: there is none of this id.
        """
        old = self.get(name)
        chat = StoredChat.of(json.loads(old.completion), metadata, old.messages)
        self.keep(chat)
        return chat


class StoringWriter:
    """Words an answer as another writer does, and keeps the whole of it at its end.

    Args:
        writer: makes the words.
        keep: gets the whole answer.
    """

    def __init__(self, writer: Writer, keep: Callable[[dict[str, Any]], None]) -> None:
        self.keep_alive = writer.keep_alive
        self.done = writer.done
        self._writer = writer
        self._keep = keep
        self._deltas: list[Delta] = []

    def opening(self, generation: Generation) -> Iterable[bytes]:
        """As the other."""
        return self._writer.opening(generation)

    def delta(self, delta: Delta, generation: Generation) -> Iterable[bytes]:
        """As the other; the whole answer is made of them."""
        self._deltas.append(delta)
        return self._writer.delta(delta, generation)

    def ending(self, generation: Generation) -> Iterable[bytes]:
        """As the other; from then on the answer can be asked for."""
        answers = assemble(self._deltas, len(generation.choices))
        self._keep(self._writer.whole(answers, generation))
        return self._writer.ending(generation)

    def failure(self, error: Exception) -> Iterable[bytes]:
        """As the other; nothing is kept."""
        return self._writer.failure(error)

    def whole(self, answers: Sequence[Answer], generation: Generation) -> dict[str, Any]:
        """As the other."""
        answer = self._writer.whole(answers, generation)
        self._keep(answer)
        return answer


@dataclass(frozen=True, slots=True)
class Page:
    """Some of a list.

    Args:
        ids: of the items, in the list's order.
        items: the JSON of each.
        has_more: the list goes on after them.
    """

    ids: Sequence[str] = field(default_factory=tuple)
    items: Sequence[bytes] = field(default_factory=tuple)
    has_more: bool = False

    @classmethod
    def cut(
        cls, entries: Sequence[tuple[str, bytes]], after: str | None, limit: int, order: str
    ) -> Page:
        """Cut a page out of a list.

        Args:
            entries: the id and the JSON of each item, oldest first.
            after: the id of the last item of the page before this one.
            limit: most items.
            order: "asc" or "desc".

        Raises:
            InvalidRequestError: no item has the id `after`.
        """
        listed = list(entries) if order == "asc" else list(reversed(entries))
        ids = [name for name, _ in listed]
        if after is not None and after not in ids:
            raise InvalidRequestError(
                f"after: there is no {cut(after)!r} in this list.", param="after"
            )
        first = 0 if after is None else ids.index(after) + 1
        last = first + limit
        items = [packed for _, packed in listed[first:last]]
        return cls(ids[first:last], items, len(listed) > last)

    def json(self) -> bytes:
        """The page in OpenAI's form; its ids are strings even where it is empty."""
        ids = self.ids or [""]
        ends = packed_json({"first_id": ids[0], "last_id": ids[-1], "has_more": self.has_more})
        return b'{"object":"list","data":[' + b",".join(self.items) + b"]," + ends[1:]


def packed_json(value: Any) -> bytes:
    """JSON without spaces, as bytes of UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
