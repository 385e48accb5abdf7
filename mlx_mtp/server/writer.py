"""How an API words an answer: as one JSON object, and as the events of a stream."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_mtp.server.generation import Generation
from mlx_mtp.server.output_stream import Delta
from mlx_mtp.server.parsing import events


class Writer(ABC):
    """Words one answer; used once, for a stream or for `whole`.

    `opening` comes with the first that is new, before `delta`; `ending` after the last choice has
    ended. `failure` ends a stream that fails. `whole` is the answer that isn't streamed, from one
    delta for each choice.

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
    def whole(self, answers: Sequence[Delta], generation: Generation) -> dict[str, Any]: ...


@dataclass(slots=True)
class Block:
    """A run of text, a run of reasoning or one tool call, as far as it has come.

    Args:
        name: of the function that it calls.
        pieces: of the text; of a call, of the JSON text of its arguments.
        tokens: those of the text, if logprobs were asked for.
        state: "cut": the answer ended within it; "broken": it turned out to be no call.
        raw: all of a call that is cut, as the model wrote it.
    """

    kind: Literal["text", "reasoning", "call"]
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[events.OutputToken] = field(default_factory=list)
    state: Literal["open", "complete", "cut", "broken"] = "open"
    raw: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


Content = events.Text | events.ToolBroken | events.Reasoning | events.ToolArguments


class BlockWriter(Writer):
    """Words the one choice of an answer block by block.

    `start` gets a block that is empty; `add` one with some new content in it already; `stop` one
    whose state says how it ended. `finished` is the whole answer, made of what they have noted.

    Attributes:
        last: the delta with the finish reason, as soon as it has come.
    """

    def __init__(self, answer_id: str) -> None:
        super().__init__(answer_id)
        self.last = Delta(0)
        self._open: Block | None = None

    def delta(self, delta: Delta, generation: Generation) -> Iterable[bytes]:
        for found in delta.events:
            match found:
                case events.Text():
                    if found.text or found.tokens:
                        yield from self._extend("text", found)
                case events.Reasoning():
                    yield from self._extend("reasoning", found)
                case events.ToolStart():
                    yield from self._start(Block("call", found.name))
                case events.ToolArguments():
                    yield from self._extend("call", found)
                case events.ToolEnd():
                    yield from self._stop("complete")
                case events.ToolCut():
                    yield from self._stop("cut", found.text)
                case events.ToolBroken():
                    yield from self._stop("broken")
                    yield from self._extend("text", found)
        if delta.finish_reason is not None:
            self.last = delta
            yield from self._stop("cut" if delta.finish_reason == "length" else "complete")

    def whole(self, answers: Sequence[Delta], generation: Generation) -> dict[str, Any]:
        (answer,) = answers
        deque(self.delta(answer, generation), maxlen=0)
        return self.finished(generation)

    def _extend(self, kind: Any, content: Content) -> Iterable[bytes]:
        block = self._open
        if block is None or block.kind != kind:
            block = Block(kind)
            yield from self._start(block)
        block.pieces.append(content.text)
        block.tokens += getattr(content, "tokens", ())
        yield from self.add(block, content)

    def _start(self, block: Block) -> Iterable[bytes]:
        yield from self._stop("complete")
        self._open = block
        yield from self.start(block)

    def _stop(self, state: Any, raw: str = "") -> Iterable[bytes]:
        block, self._open = self._open, None
        if block is not None:
            block.state, block.raw = state, raw
            yield from self.stop(block)

    @abstractmethod
    def start(self, block: Block) -> Iterable[bytes]: ...

    @abstractmethod
    def add(self, block: Block, content: Content) -> Iterable[bytes]: ...

    @abstractmethod
    def stop(self, block: Block) -> Iterable[bytes]: ...

    @abstractmethod
    def finished(self, generation: Generation) -> dict[str, Any]: ...


packed_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""JSON without spaces."""


def event(fields: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {packed_json(fields)}\n\n".encode()


def new_id(prefix: str) -> str:
    """A name that no other answer or call has."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"
