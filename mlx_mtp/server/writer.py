"""How an API words an answer: as one JSON object, and as the events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from mlx_mtp.server.choice import Delta
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.whole import Answer

COMMENT = b": keep-alive\n\n"


class Writer(Protocol):
    """One answer's. It is used either for `whole` or for the rest, and only once."""

    keep_alive: bytes
    """Breaks a silence."""
    done: bytes
    """Comes last in every stream."""

    def opening(self, generation: Generation) -> Iterable[bytes]:
        """The events before anything has come of the answer."""

    def delta(self, delta: Delta, generation: Generation) -> Iterable[bytes]:
        """The events of what is new in one choice."""

    def ending(self, generation: Generation) -> Iterable[bytes]:
        """The events after the last choice has ended."""

    def failure(self, error: Exception) -> Iterable[bytes]:
        """The events that end a stream which fails."""

    def whole(self, answers: Sequence[Answer], generation: Generation) -> dict[str, Any]:
        """The answer that isn't streamed."""


def event(fields: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()


def new_id(prefix: str) -> str:
    """A name that no other answer or call has."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"
