"""How an API words an answer: as one JSON object, and as the events of a stream."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_mtp.server.blocks import Answer, Block, BlockParser, Content
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.output_stream import Delta


class Writer(ABC):
    """Words one answer; used once, for a stream or for `whole`.

    `opening` comes with the first that is new, before `delta`; `ending` after the last choice has
    ended. `failure` ends a stream that fails. `whole` is the answer that isn't streamed.

    Attributes:
        keep_alive: sent to break a silence.
        done: the end of every stream.
    """

    keep_alive = b": keep-alive\n\n"
    done = b""

    def __init__(self, answer_id: str) -> None:
        self.answer_id = answer_id

    @abstractmethod
    def opening(self, generation: Generation) -> Iterable[bytes]: ...

    @abstractmethod
    def delta(self, delta: Delta, generation: Generation) -> Iterable[bytes]: ...

    @abstractmethod
    def ending(self, generation: Generation) -> Iterable[bytes]: ...

    @abstractmethod
    def failure(self, error: Exception) -> Iterable[bytes]: ...

    @abstractmethod
    def whole(self, answers: Sequence[Answer], generation: Generation) -> dict[str, Any]: ...


class BlockWriter(Writer):
    """Words the one choice of an answer block by block.

    A block is empty when it starts; `content` is in it already; its state says how it stopped.

    Attributes:
        last: the delta with the finish reason, as soon as it has come.
    """

    def __init__(self, answer_id: str) -> None:
        super().__init__(answer_id)
        self.last = Delta(0)
        self._parser = BlockParser()

    def delta(self, delta: Delta, generation: Generation) -> Iterable[bytes]:
        for step, block, content in self._parser.read(delta):
            if step == "start":
                yield from self.block_start(block)
            elif content is not None:
                yield from self.block_delta(block, content)
            else:
                yield from self.block_stop(block)
        if delta.finish_reason is not None:
            self.last = delta

    @abstractmethod
    def block_start(self, block: Block) -> Iterable[bytes]: ...

    @abstractmethod
    def block_delta(self, block: Block, content: Content) -> Iterable[bytes]: ...

    @abstractmethod
    def block_stop(self, block: Block) -> Iterable[bytes]: ...


packed_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""JSON without spaces."""


def event(fields: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {packed_json(fields)}\n\n".encode()


def new_id(prefix: str) -> str:
    """A name that no other answer or call has."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"
