"""How an API words an answer: as one JSON object, and as the events of a stream."""

import json
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from mlx_mtp.server.generation.generation import Generation
from mlx_mtp.text.parsing import events
from mlx_mtp.text.stream import Delta

Kind = Literal["text", "reasoning", "call"]
State = Literal["open", "complete", "cut", "broken"]
_KINDS: Mapping[type, Kind]
_KINDS = {events.Text: "text", events.Reasoning: "reasoning", events.ToolArguments: "call"}
Content = events.Text | events.Reasoning | events.ToolArguments
Steps = Iterator[Iterable[bytes]]  # the events of each step of an answer


@dataclass(slots=True)
class Block:
    """A run of text, a run of reasoning or one tool call of a choice, as far as it has come."""

    kind: Kind
    choice: int
    id: str = ""
    name: str = ""  # of the function that a call is of
    number: int = 0  # of a call, among the choice's calls
    pieces: list[str] = field(default_factory=list)  # of a call: of its arguments' JSON text
    tokens: list[events.OutputToken] = field(default_factory=list)  # if logprobs were asked for
    state: State = "open"  # "cut": the answer ended within it; "broken": it is no call after all
    raw: str = ""  # all of a call that is cut or broken, as the model wrote it

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Writer(ABC):
    """Words one answer: `read` turns its deltas into blocks, of which all else is made.

    Events are made by generators: for an answer that isn't streamed none is run. A stream runs each
    before it reads on, as blocks grow.

    Of a stream: `opening`; `progress` of the prompt; `start`, `add` and `stop` of blocks; `finish`
    of a choice; `ending` or `failure`. `whole` is the answer that isn't streamed.
    """

    media_type = "text/event-stream"
    keep_alive = b": keep-alive\n\n"  # breaks a silence
    done = b""  # the end of every stream
    prefixes: ClassVar[Mapping[Kind, str]] = {}  # of the ids of blocks
    record = True  # blocks keep their content, which only `whole` may need
    slow = False  # to write: on a thread beside the event loop

    def __init__(self, answer_id: str, generation: Generation) -> None:
        self.answer_id = answer_id
        self.generation = generation
        self.blocks: defaultdict[int, list[Block]] = defaultdict(list)

    def read(self, delta: Delta) -> Steps:
        if delta.progress is not None:
            yield self.progress(delta.index, delta.progress)
        for found in delta.events:
            match found:
                case events.ToolStart():
                    yield from self._start(delta, "call", name=found.name, number=found.call)
                case events.ToolEnd():
                    yield from self._stop(delta, "complete")
                case events.ToolCut():
                    yield from self._stop(delta, "cut", found.text)
                case events.ToolBroken():
                    # A stream has told it, as a call that breaks off; a whole answer has the text.
                    yield from self._stop(delta, "broken", found.text, found.tokens)
                case _:
                    yield from self._extend(delta, _KINDS[type(found)], found)
        if delta.finish_reason is not None:
            yield from self._stop(delta, "cut" if delta.finish_reason == "length" else "complete")
            yield self.finish(delta)

    def whole_blocks(self, choice: int) -> list[Block]:
        # A broken call is text, and one with the texts around it.
        found: list[Block] = []
        for block in self.blocks[choice]:
            if block.state == "broken":
                block = replace(block, kind="text", pieces=[block.raw], state="complete")
            if found and found[-1].kind == block.kind == "text":
                found[-1].pieces += block.pieces
                found[-1].tokens += block.tokens
            else:
                found.append(replace(block, pieces=[*block.pieces], tokens=[*block.tokens]))
        return found

    def _open(self, choice: int) -> Block | None:
        blocks = self.blocks[choice]
        return blocks[-1] if blocks and blocks[-1].state == "open" else None

    def _extend(self, delta: Delta, kind: Kind, content: Content) -> Steps:
        block = self._open(delta.index)
        if block is None or block.kind != kind:
            yield from self._start(delta, kind)
            block = self.blocks[delta.index][-1]
        if self.record:
            block.pieces.append(content.text)
            block.tokens += getattr(content, "tokens", ())
        yield self.add(block, content)

    def _start(self, delta: Delta, kind: Kind, **fields: Any) -> Steps:
        yield from self._stop(delta, "complete")
        block_id = new_id(self.prefixes[kind]) if kind in self.prefixes else ""
        block = Block(kind, delta.index, block_id, **fields)
        self.blocks[delta.index].append(block)
        yield self.start(block)

    def _stop(
        self,
        delta: Delta,
        state: State,
        raw: str = "",
        tokens: Iterable[events.OutputToken] = (),
    ) -> Steps:
        block = self._open(delta.index)
        if block is not None:
            block.state, block.raw = state, raw
            block.tokens += tokens
            yield self.stop(block)

    def opening(self) -> Iterable[bytes]:
        return ()

    def progress(self, choice: int, told: Mapping[str, int]) -> Iterable[bytes]:
        return ()

    def start(self, block: Block) -> Iterable[bytes]:
        return ()

    @abstractmethod
    def add(self, block: Block, content: Content) -> Iterable[bytes]: ...

    def stop(self, block: Block) -> Iterable[bytes]:
        return ()

    def finish(self, delta: Delta) -> Iterable[bytes]:
        return ()

    @abstractmethod
    def ending(self) -> Iterable[bytes]: ...

    @abstractmethod
    def failure(self, error: Exception) -> Iterable[bytes]: ...

    @abstractmethod
    def whole(self) -> dict[str, Any]: ...


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
packed_json = _encoder.encode


def packed_slowly(value: Any) -> str:
    """As `packed_json`, which lets no other thread run meanwhile."""
    return "".join(_encoder.iterencode(value))


def event(fields: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {packed_json(fields)}\n\n".encode()


def new_id(prefix: str) -> str:
    """A name that no other answer or call has."""
    return prefix + uuid.uuid4().hex[:24]
