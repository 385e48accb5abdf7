"""Feeding a parser in pieces, and what came out, joined."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from mlx_mtp.server.parsing.answer import AnswerParser
from mlx_mtp.server.parsing.events import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolBroken,
    ToolCut,
    ToolEnd,
    ToolStart,
    merged,
)

Make = Callable[[], AnswerParser]


def events_of(parser: AnswerParser, pieces: Iterable[str]) -> list[Event]:
    """All events of an answer that comes in these pieces."""
    events: list[Event] = []
    for piece in pieces:
        events.extend(parser.feed(piece))
    events.extend(parser.finish())
    return merged(events)


def summary(events: Iterable[Event]) -> list[Any]:
    """Events in a form that is short to write: ("text", ...), ("think", ...), ("call", ...)
    and so on."""
    short: list[Any] = []
    calls: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, Text):
            short.append(("text", event.text))
        elif isinstance(event, Reasoning):
            short.append(("think", event.text))
        elif isinstance(event, ToolStart):
            calls[event.call] = [event.name, ""]
        elif isinstance(event, ToolArguments):
            calls[event.call][1] += event.text
        elif isinstance(event, ToolEnd):
            short.append(("call", *calls.pop(event.call)))
        elif isinstance(event, ToolBroken):
            calls.pop(event.call)
            short.append(("broken", event.text))
        elif isinstance(event, ToolCut):
            short.append(("cut", *calls.pop(event.call)))
    assert not calls, "a call neither ended nor broke, nor was it cut"
    return short


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces."""
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


steady = settings(deadline=None, max_examples=200)
"""For properties: a busy machine is no failure."""
places = st.lists(st.integers(0, 10_000), max_size=12)


def same_however_cut(make: Make, text: str, at: Iterable[int]) -> None:
    """Whole, character by character and cut anywhere, the events are the same."""
    whole = events_of(make(), [text])
    assert events_of(make(), text) == whole
    assert events_of(make(), cut(text, at)) == whole
