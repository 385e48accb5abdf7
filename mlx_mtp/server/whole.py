"""A whole answer, joined from its pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlx_mtp.server.choice import Content, Delta, Piece, TokenInfo
from mlx_mtp.server.parsing.events import Reasoning, ToolArguments, ToolCut, ToolStart


@dataclass(slots=True)
class TextPart:
    """Some of the answer proper."""

    text: str
    tokens: list[TokenInfo] = field(default_factory=list)


@dataclass(slots=True)
class ReasoningPart:
    """What the model thought."""

    text: str


@dataclass(slots=True)
class CallPart:
    """A tool call.

    Args:
        call: its number within the answer.
        name: of the function.
        arguments: JSON text of an object; of a call that is cut, its beginning.
        cut: the whole call as the model wrote it, where the answer ended within it.
    """

    call: int
    name: str
    arguments: str = ""
    cut: str | None = None


Part = TextPart | ReasoningPart | CallPart


@dataclass(slots=True)
class Answer:
    """One choice.

    Args:
        index: of the choice.
        parts: in the order in which the model wrote them; neighbours of one kind are joined.
        finish_reason: "stop", "length" or "tool_calls".
        stop: the stop string that ended it.
    """

    index: int
    parts: list[Part] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None

    @property
    def text(self) -> str:
        """The answer proper."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str:
        """What the model thought."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def calls(self) -> list[CallPart]:
        """Its tool calls."""
        return [part for part in self.parts if isinstance(part, CallPart)]

    @property
    def tokens(self) -> list[TokenInfo]:
        """The tokens of the answer proper, when logprobs were asked for."""
        return [token for part in self.parts if isinstance(part, TextPart) for token in part.tokens]

    def add(self, piece: Piece) -> None:
        """The next piece."""
        last = self.parts[-1] if self.parts else None
        if isinstance(piece, Content):
            if piece.broken_call is not None:
                # It had begun; its text is content, so that it is no call.
                self.parts = [part for part in self.parts if not _is_call(part, piece.broken_call)]
                last = self.parts[-1] if self.parts else None
            if not isinstance(last, TextPart):
                last = TextPart("")
                self.parts.append(last)
            last.text += piece.text
            last.tokens.extend(piece.tokens)
        elif isinstance(piece, Reasoning):
            if not isinstance(last, ReasoningPart):
                last = ReasoningPart("")
                self.parts.append(last)
            last.text += piece.text
        elif isinstance(piece, ToolStart):
            self.parts.append(CallPart(piece.call, piece.name))
        elif isinstance(piece, ToolArguments):
            assert isinstance(last, CallPart), "arguments come right after their call's name"
            last.arguments += piece.text
        elif isinstance(piece, ToolCut):
            assert isinstance(last, CallPart), "a call is cut while it is told"
            last.cut = piece.text


def assemble(deltas: Iterable[Delta], count: int) -> list[Answer]:
    """All deltas of a generation, joined to one answer per choice."""
    answers = [Answer(index) for index in range(count)]
    for delta in deltas:
        answer = answers[delta.index]
        for piece in delta.pieces:
            answer.add(piece)
        answer.finish_reason = delta.finish_reason
        answer.stop = delta.stop
    return answers


def _is_call(part: Part, call: int) -> bool:
    return isinstance(part, CallPart) and part.call == call
