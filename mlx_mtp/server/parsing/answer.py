"""An answer's whole parser: what the rest of the server sees of this package."""

from __future__ import annotations

from typing import Protocol

from mlx_mtp.server.parsing.events import Event, Text, merged
from mlx_mtp.server.parsing.think import ThinkParser
from mlx_mtp.server.parsing.tool_parser import ToolParser


class AnswerParser(Protocol):
    """Takes an answer's text in pieces of any size; what it finds doesn't depend on the pieces."""

    @property
    def in_reasoning(self) -> bool:
        """The next character is part of the model's reasoning."""

    @property
    def num_calls(self) -> int:
        """Complete tool calls so far."""

    @property
    def done(self) -> bool:
        """Whatever follows is not wanted: the answer has all the calls that it may have."""

    def feed(self, text: str) -> list[Event]:
        """Take some more text; return what is certain now."""

    def finish(self) -> list[Event]:
        """The answer is over: return what was held."""


class PlainParser:
    """All of it is text."""

    in_reasoning = False
    num_calls = 0
    done = False

    def __init__(self) -> None:
        self._at = 0

    def feed(self, text: str) -> list[Event]:
        """The text."""
        start, self._at = self._at, self._at + len(text)
        return [Text(text, start)] if text else []

    def finish(self) -> list[Event]:
        """Nothing is ever held."""
        return []


class ThinkThenTools:
    """A think block first, then text with tool calls in it; either may be missing.

    Args:
        think: splits off the think block; None: the model has none.
        tools: finds tool calls; None: the request has no tools, so that all of it is text.
    """

    def __init__(self, think: ThinkParser | None, tools: ToolParser | None) -> None:
        self._think: ThinkParser | PlainParser = think or PlainParser()
        self._tools = tools

    @property
    def in_reasoning(self) -> bool:
        """Within the think block."""
        return self._think.in_reasoning

    @property
    def num_calls(self) -> int:
        """Complete tool calls so far."""
        return self._tools.num_complete if self._tools else 0

    @property
    def done(self) -> bool:
        """No more calls are wanted."""
        return self._tools is not None and self._tools.done

    def feed(self, text: str) -> list[Event]:
        """One stage after the other."""
        return merged(self._through_tools(self._think.feed(text)))

    def finish(self) -> list[Event]:
        """What either stage held."""
        events = self._through_tools(self._think.finish())
        if self._tools is not None:
            events.extend(self._tools.finish())
        return merged(events)

    def _through_tools(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            if isinstance(event, Text):
                found.extend(self._tools.feed(event.text, event.start))
            else:
                found.append(event)
        return found
