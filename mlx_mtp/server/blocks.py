"""An answer in blocks: each a run of text, a run of reasoning, or one tool call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from mlx_mtp.server.generation import Generation
from mlx_mtp.server.output_stream import Delta
from mlx_mtp.server.parsing import events

Kind = Literal["text", "reasoning", "call"]
State = Literal["open", "complete", "cut", "broken"]
Content = events.Text | events.ToolBroken | events.Reasoning | events.ToolArguments
"""Events whose text goes into a block."""


@dataclass(slots=True)
class Block:
    """A block, as far as it has come.

    Args:
        kind: what is in it.
        call: the number of the tool call within the answer.
        name: of the function that it calls.
        pieces: of the text; of a call, of the JSON text of its arguments.
        tokens: those of the text, if logprobs were asked for.
        state: "cut": the answer ended within it; "broken": it turned out to be no call.
        raw: all of a call that is cut, as the model wrote it.
    """

    kind: Kind
    call: int = 0
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[events.OutputToken] = field(default_factory=list)
    state: State = "open"
    raw: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


Step = tuple[Literal["start", "delta", "stop"], Block, Content | None]
"""What an event does: a block starts, gets some content, or stops."""


class BlockParser:
    """Groups the events of one choice into blocks, of which one is open at a time."""

    def __init__(self) -> None:
        self._open: Block | None = None

    def read(self, delta: Delta) -> Iterator[Step]:
        """What the delta does, in order; the last one stops the block that is open."""
        for event in delta.events:
            yield from self._read(event)
        if delta.finish_reason is not None:
            yield from self._stop("cut" if delta.finish_reason == "length" else "complete")

    def _read(self, event: events.Event) -> Iterator[Step]:
        match event:
            case events.Text():
                if event.text or event.tokens:
                    yield from self._add("text", event)
            case events.Reasoning():
                yield from self._add("reasoning", event)
            case events.ToolStart():
                yield from self._start(Block("call", event.call, event.name))
            case events.ToolArguments():
                yield from self._add("call", event)
            case events.ToolEnd():
                yield from self._stop("complete")
            case events.ToolCut():
                yield from self._stop("cut", event.text)
            case events.ToolBroken():
                yield from self._stop("broken")
                yield from self._add("text", event)

    def _add(self, kind: Kind, content: Content) -> Iterator[Step]:
        block = self._open
        if block is None or block.kind != kind:
            block = Block(kind)
            yield from self._start(block)
        block.pieces.append(content.text)
        block.tokens += getattr(content, "tokens", ())
        yield "delta", block, content

    def _start(self, block: Block) -> Iterator[Step]:
        yield from self._stop("complete")
        self._open = block
        yield "start", block, None

    def _stop(self, state: State, raw: str = "") -> Iterator[Step]:
        block, self._open = self._open, None
        if block is not None:
            block.state, block.raw = state, raw
            yield "stop", block, None


class Answer:
    """One choice, as far as it has come.

    Args:
        index: of the choice.

    Attributes:
        finish_reason: "stop", "length" or "tool_calls"; None while it goes on.
        stop: the stop string that ended it.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop: str | None = None
        self._parser = BlockParser()
        self._blocks: list[Block] = []

    def add(self, delta: Delta) -> None:
        """What is new in this choice."""
        self._blocks += (block for step, block, _ in self._parser.read(delta) if step == "start")
        self.finish_reason, self.stop = delta.finish_reason, delta.stop

    @property
    def blocks(self) -> list[Block]:
        """All that is in it; the text of a broken call is part of the text around it."""
        found: list[Block] = []
        for block in self._blocks:
            if block.state == "broken":
                continue
            last = found[-1] if found else None
            if last is not None and last.kind == block.kind == "text":
                pieces, tokens = last.pieces + block.pieces, last.tokens + block.tokens
                found[-1] = replace(block, pieces=pieces, tokens=tokens)
            else:
                found.append(block)
        return found

    def text(self, kind: Kind) -> str:
        """The text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def tokens(self) -> list[events.OutputToken]:
        """The tokens of its text, if logprobs were asked for."""
        return [token for block in self.blocks for token in block.tokens]


async def collect_response(generation: Generation, patience: float) -> list[Answer]:
    """All answers, whole; `patience` is that of `Generation.deltas`."""
    answers = [Answer(stream.index) for stream in generation.streams]
    async for deltas in generation.deltas(patience):
        for delta in deltas:
            answers[delta.index].add(delta)
    return answers
