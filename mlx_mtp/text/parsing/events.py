"""What a parser finds in an answer: events whose texts, joined, are all that the model wrote."""

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
    """Some of the answer proper."""

    text: str
    start: int  # in characters of the raw answer
    tokens: tuple[OutputToken, ...] = ()  # if logprobs were asked for; parsers leave them out


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A tool call begins, whose function is known; `call` numbers the answer's calls from 0."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """Some of a call's arguments: joined, they are the JSON text of one object."""

    call: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """A call is complete."""

    call: int


@dataclass(frozen=True, slots=True)
class ToolCut:
    """A call that has begun stays unfinished: the answer ends within it, or it goes on as no call.

    `text` is all of the call as the model wrote it, from `start` on, counted as in `Text`.
    """

    call: int
    text: str
    start: int


Event = Text | Reasoning | ToolStart | ToolArguments | ToolEnd | ToolCut


def merge_texts(events: Iterable[Event]) -> list[Event]:
    """The same events, with neighbouring pieces of one text joined."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            # Between texts that are not adjacent something is hidden: they keep their own starts.
            case Text(before, at), Text(text, start) if start == at + len(before):
                joined[-1] = Text(before + text, at)
            case Reasoning(before), Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case ToolArguments(_, before), ToolArguments(call, text):
                joined[-1] = ToolArguments(call, before + text)
            case _:
                joined.append(event)
    return joined
