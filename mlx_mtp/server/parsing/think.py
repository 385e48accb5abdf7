"""The think block of Qwen's templates: `<think>`, reasoning, `</think>`, answer."""

from __future__ import annotations

import enum
import re

from mlx_mtp.server.parsing.events import Event, Reasoning, Text

OPEN = "<think>"
CLOSE = "</think>"
# Some models call a tool without closing the block first. Only what looks like a call all through
# counts: a model may well think about the tag.
_CALL = re.compile(r"<tool_call>\s*(?:<function=|\{\s*\")")
_CALL_BEGUN = re.compile(
    r"<tool_call>\s*(?:\{\s*|" + "|".join("<function="[:length] for length in range(10)) + ")$"
)
_TOOL_CALL = "<tool_call>"


class _State(enum.Enum):
    START = enum.auto()
    REASONING = enum.auto()
    AFTER = enum.auto()
    CONTENT = enum.auto()


class ThinkParser:
    """Splits an answer at its think block, which only its beginning may have.

    Newlines next to the tags belong to the template and are dropped; everything else is kept.

    Args:
        opened: the prompt ends within the block, so that the answer begins with reasoning.
        with_tools: a tool call within the block ends it.
    """

    def __init__(self, *, opened: bool, with_tools: bool) -> None:
        self._state = _State.START
        self._opened = opened
        self._with_tools = with_tools
        self._held = ""
        self._at = 0
        self._told = False

    @property
    def in_reasoning(self) -> bool:
        """The next character belongs to the think block."""
        return self._state is _State.REASONING or (self._state is _State.START and self._opened)

    def feed(self, text: str) -> list[Event]:
        """Take some more of the answer; return what is certain now."""
        self._held += text
        events: list[Event] = []
        if self._state is _State.START:
            self._begin()
        if self._state is _State.REASONING:
            self._reason(events)
        if self._state is _State.AFTER:
            self._drop(len(self._held) - len(self._held.lstrip("\n")))
            if self._held:
                self._state = _State.CONTENT
        if self._state is _State.CONTENT and self._held:
            events.append(Text(self._held, self._at))
            self._drop(len(self._held))
        return events

    def finish(self) -> list[Event]:
        """The answer is over: return what was held."""
        events: list[Event] = []
        if self.in_reasoning:
            self._think(events, self._held)
        elif self._held:
            events.append(Text(self._held, self._at))
        self._held = ""
        return events

    def _begin(self) -> None:
        # A model may repeat the tag that the prompt ended with.
        rest = self._held.lstrip()
        if rest.startswith(OPEN):
            self._drop(len(self._held) - len(rest) + len(OPEN))
            self._state = _State.REASONING
        elif not OPEN.startswith(rest):
            self._state = _State.REASONING if self._opened else _State.CONTENT

    def _reason(self, events: list[Event]) -> None:
        end, length = self._end_of_reasoning()
        if end is None:
            sure = self._held[: len(self._held) - self._doubtful()].rstrip("\n")
            self._think(events, sure)
            self._drop(len(sure))
        else:
            self._think(events, self._held[:end].rstrip("\n"))
            self._drop(end + length)
            self._state = _State.AFTER

    def _end_of_reasoning(self) -> tuple[int | None, int]:
        """Where the block ends within what is held, and the length of the tag that ends it."""
        end = self._held.find(CLOSE)
        call = _CALL.search(self._held) if self._with_tools else None
        if call is not None and (end < 0 or call.start() < end):
            return call.start(), 0
        return (None, 0) if end < 0 else (end, len(CLOSE))

    def _doubtful(self) -> int:
        """Length of the end of what is held that may be the beginning of a tag."""
        longest = beginning_length(self._held, CLOSE)
        if self._with_tools:
            begun = _CALL_BEGUN.search(self._held)
            from_call = len(self._held) - begun.start() if begun else 0
            longest = max(longest, from_call, beginning_length(self._held, _TOOL_CALL))
        return longest

    def _think(self, events: list[Event], text: str) -> None:
        if not self._told:
            text = text.lstrip("\n")
        if text:
            self._told = True
            events.append(Reasoning(text))

    def _drop(self, count: int) -> None:
        self._held = self._held[count:]
        self._at += count


def beginning_length(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`, without being all of it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
