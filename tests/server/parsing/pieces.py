"""Helpers that feed a parser in pieces and join the events."""

import json
from collections.abc import Iterable
from typing import Any

from mlx_mtp.text.parsing.answer import AnswerParser
from mlx_mtp.text.parsing.events import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCut,
    ToolEnd,
    ToolStart,
    merge_texts,
)


def events_of(parser: AnswerParser, pieces: Iterable[str], *, cut: bool = False) -> list[Event]:
    """Returns all events of an answer that is fed in these pieces; `cut`: it ended at a limit."""
    events: list[Event] = []
    for piece in pieces:
        events.extend(parser.feed(piece))
    events.extend(parser.finish(cut=cut))
    return merge_texts(events)


def summary(events: Iterable[Event]) -> list[Any]:
    """Returns events in short form: ("text", ...), ("think", ...), ("call", name, arguments)."""
    short: list[Any] = []
    calls: dict[int, list[str]] = {}
    kinds = {Text: "text", Reasoning: "think", ToolEnd: "call"}
    for event in events:
        if isinstance(event, ToolStart):
            calls[event.call] = [event.name, ""]
        elif isinstance(event, ToolArguments):
            calls[event.call][1] += event.text
        elif isinstance(event, ToolEnd | ToolCut):
            short.append((kinds.get(type(event), "cut"), *calls.pop(event.call)))
        else:
            short.append((kinds[type(event)], event.text))
    assert not calls, "a call neither ended nor broke, nor was it cut"
    return short


def hermes(name: str, arguments: str) -> str:
    """Returns a call as JSON."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(name: str, **values: Any) -> str:
    """Returns a call as tags."""
    parameters = ""
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parameters += f"<parameter={key}>\n{text}\n</parameter>\n"
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
