"""gpt-oss's own format: messages on channels, each with a header and a body.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
        <|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>ANSWER<|return|>

The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import contextlib
import re

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
from mlx_mtp.server.parsing.json_reader import read_object
from mlx_mtp.server.parsing.reading import AnswerOver, BrokenCall, Reader, one_of, space
from mlx_mtp.server.parsing.think import beginning_length

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (_CHANNEL, _MESSAGE, _START, "<|constrain|>", *_ENDS)
"""Special tokens of the format: the parser has to see them, and clients never do."""

_BODY_ENDS = re.compile("|".join(map(re.escape, (*_ENDS, _START, _CHANNEL))))
_HEADER = re.compile(r"(?:<\|start\|>|<\|channel\|>)")
_RECIPIENT = re.compile(r"to=functions\.([\w./:@-]{1,256})")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """Reasoning, text and calls of one answer.

    Args:
        with_tools: calls are wanted; otherwise they are told as text.
        max_calls: the answer ends with so many; None: there is no such limit.
    """

    def __init__(self, *, with_tools: bool, max_calls: int | None = None) -> None:
        self._with_tools = with_tools
        self._max_calls = max_calls
        self._held = ""
        self._at = 0
        self._header: str | None = None
        self._header_at = 0
        self._kind = "text"
        self._call = -1
        self._raw = ""
        self._pieces: list[str] = []
        self._reader: Reader | None = None
        self.num_calls = 0

    @property
    def in_reasoning(self) -> bool:
        """Within a message on the analysis channel."""
        return self._kind == "reasoning"

    @property
    def done(self) -> bool:
        """No more calls are wanted."""
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def feed(self, text: str) -> list[Event]:
        """Take some more text."""
        self._held += text
        events: list[Event] = []
        more = True
        while more and not self.done:
            more = self._read_body(events) if self._header is None else self._read_header(events)
        return merged(events)

    def finish(self) -> list[Event]:
        """The answer is over; `<|call|>` and `<|return|>` end it, and are no part of it."""
        events: list[Event] = []
        if self.done:
            return events
        if self._header is not None:
            # A header that was cut has no message that could be told; it is kept as it is.
            events.append(Text(self._header + self._held, self._header_at))
        else:
            self._tell(events, self._held)
            self._end_body(events, over=True)
        self._held = ""
        return merged(events)

    def _read_body(self, events: list[Event]) -> bool:
        found = _BODY_ENDS.search(self._held)
        if found is None:
            doubtful = max(beginning_length(self._held, tag) for tag in MARKERS)
            sure = len(self._held) - doubtful
            self._tell(events, self._held[:sure])
            self._drop(sure)
            return False
        self._tell(events, self._held[: found.start()])
        self._end_body(events)
        self._drop(found.start())
        self._kind = "text"
        if _HEADER.match(found[0]):
            self._header, self._header_at = "", self._at
        else:
            self._drop(len(found[0]))
        return True

    def _read_header(self, events: list[Event]) -> bool:
        """Up to the message's body; the header says what it is."""
        end = self._held.find(_MESSAGE)
        if end < 0:
            return False
        header = self._held[:end]
        self._raw = header + _MESSAGE
        self._drop(len(self._raw))
        self._header = None
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        if recipient and self._with_tools:
            self._kind = "call"
            self._call += 1
            self._pieces = []
            self._reader = self._read_arguments()
            next(self._reader)
            events.append(ToolStart(self._call, recipient[1]))
        elif recipient:
            events.append(Text(self._raw, self._header_at))
        elif channel and channel[1] == "analysis":
            self._kind = "reasoning"
        return True

    def _tell(self, events: list[Event], text: str) -> None:
        if not text:
            return
        if self._kind == "reasoning":
            events.append(Reasoning(text))
        elif self._kind == "call":
            self._tell_arguments(events, text)
        else:
            events.append(Text(text, self._at))

    def _read_arguments(self) -> Reader:
        yield from one_of((yield from space()), "{")
        yield from read_object(self._pieces.append)
        return ""

    def _tell_arguments(self, events: list[Event], text: str) -> None:
        for number, character in enumerate(text):
            if self._reader is None:
                # The call is complete; what may follow is white space.
                self._kind = "text"
                rest = text[number:].lstrip()
                if rest and not self.done:
                    events.append(Text(rest, self._at + len(text) - len(rest)))
                return
            try:
                self._reader.send(character)
            except StopIteration:
                self._tell_pieces(events)
                self._reader = None
                events.append(ToolEnd(self._call))
                self.num_calls += 1
            except BrokenCall:
                self._tell_pieces(events)
                events.append(ToolBroken(self._call, self._raw, self._header_at))
                self._kind = "text"
                events.append(Text(text[number:], self._at + number))
                return
            self._raw += character
        self._tell_pieces(events)

    def _tell_pieces(self, events: list[Event]) -> None:
        if self._pieces:
            events.append(ToolArguments(self._call, "".join(self._pieces)))
            self._pieces.clear()

    def _drop(self, count: int) -> None:
        self._held = self._held[count:]
        self._at += count

    def _end_body(self, events: list[Event], *, over: bool = False) -> None:
        if self._kind != "call" or self._reader is None:
            return
        if self._raw.endswith(_MESSAGE):
            events.extend([ToolArguments(self._call, "{}"), ToolEnd(self._call)])
            self.num_calls += 1
        elif over:
            with contextlib.suppress(AnswerOver):
                self._reader.throw(AnswerOver())
            self._tell_pieces(events)
            events.append(ToolCut(self._call, self._raw))
        else:
            events.append(ToolBroken(self._call, self._raw, self._header_at))
