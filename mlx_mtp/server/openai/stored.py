"""Chat completions that clients asked to be kept (`store: true`): in memory, and not many."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_mtp.errors import NotFoundError
from mlx_mtp.server.text import cut
from mlx_mtp.server.writer import packed_json

MAX_STORED_BYTES = 64 << 20
"""Most bytes of JSON that are kept in all; only the newest completion may be larger."""


@dataclass(frozen=True, slots=True)
class StoredChat:
    """A completion and the messages of its request, as the JSON that clients get."""

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
        packed = packed_json(completion | {"metadata": dict(metadata)}).encode()
        return cls(completion["id"], completion["model"], metadata, packed, messages)

    @property
    def size(self) -> int:
        return len(self.completion) + sum(map(len, self.messages))


class StoredChats:
    """The latest stored completions, oldest first; the oldest are evicted for new ones.

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
        return list(self._chats.values())

    def keep(self, chat: StoredChat) -> None:
        """Store a completion, or another version of one that is stored."""
        old = self._chats.get(chat.id)
        self._size += chat.size - (old.size if old is not None else 0)
        self._chats[chat.id] = chat
        while len(self._chats) > self._max_count or (
            self._size > self._max_bytes and len(self._chats) > 1
        ):
            self.delete(next(iter(self._chats)))

    def get(self, name: str) -> StoredChat:
        """The one with this id; raises NotFoundError."""
        chat = self._chats.get(name)
        if chat is None:
            raise NotFoundError(
                f"There is no stored chat completion {cut(name)!r}: it was made without "
                "`store: true`, was deleted, or was replaced by newer ones."
            )
        return chat

    def delete(self, name: str) -> None:
        """Forget the one with this id; raises NotFoundError."""
        self._size -= self.get(name).size
        del self._chats[name]

    def label(self, name: str, metadata: Mapping[str, str]) -> StoredChat:
        """Replace the metadata of the one with this id; raises NotFoundError."""
        old = self.get(name)
        chat = StoredChat.of(json.loads(old.completion), metadata, old.messages)
        self.keep(chat)
        return chat
