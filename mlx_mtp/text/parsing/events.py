"""The events that a parser finds in an answer; joined, their texts are all that the model wrote."""

from collections.abc import Iterable
from dataclasses import dataclass

from mlx_mtp.engine.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token with its logprobs; its text is characters `start` to `end` of the raw answer."""

    token_id: int
    logprobs: TokenLogprobs | None  # None for a prompt's first token
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's content."""

    text: str
    start: int  # in characters of the raw answer
    tokens: tuple[OutputToken, ...] = ()  # if logprobs were requested; parsers leave it empty


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call of the tool `name` begins; `call` numbers the answer's calls from 0."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of a call's arguments; joined, the pieces are the JSON text of one object."""

    call: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """A call is complete."""

    call: int


@dataclass(frozen=True, slots=True)
class ToolCut:
    """A call that has begun stays unfinished: the answer ends in it, or other text breaks it.

    `text` is the call's whole text as the model wrote it; `start` is its position as in `Text`.
    """

    call: int
    text: str
    start: int


Event = Text | Reasoning | ToolStart | ToolArguments | ToolEnd | ToolCut


def merge_texts(events: Iterable[Event]) -> list[Event]:
    """Returns the events, with adjacent pieces of the same text joined."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            # Texts that are not adjacent have hidden text between them: they keep their starts.
            case Text(before, at), Text(text, start) if start == at + len(before):
                joined[-1] = Text(before + text, at)
            case Reasoning(before), Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case ToolArguments(_, before), ToolArguments(call, text):
                joined[-1] = ToolArguments(call, before + text)
            case _:
                joined.append(event)
    return joined
