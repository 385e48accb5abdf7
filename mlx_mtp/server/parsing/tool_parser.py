"""Tool calls among text: what all formats have in common. Each format is a generator of its own.

A format reads a call one character at a time (`character = yield`), so what it finds can't depend
on how many tokens a step brought, or where a token ends.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_mtp.server.parsing.events import (
    Event,
    Text,
    ToolArguments,
    ToolBroken,
    ToolCut,
    ToolEnd,
    ToolStart,
    merged,
)
from mlx_mtp.server.parsing.reading import MAX_NAME, AnswerOver, BrokenCall, Reader, broken
from mlx_mtp.server.parsing.think import beginning_length

CALL = "<tool_call>"
_NAME = re.compile(rf"[\w./:@-]{{1,{MAX_NAME}}}")


class ToolParser(ABC):
    """Finds the calls in an answer's text.

    White space next to a call belongs to the template and is dropped; everything else is told:
    as text, as a call, as `ToolBroken` when a call turns out to be none, or, when the answer ends
    within one whose name is told, as `ToolCut`.

    Args:
        schemas: the JSON schema of each tool's parameters, by its name.
        max_calls: the answer ends with so many; None: there is no such limit.
    """

    opener: re.Pattern[str] = re.compile(re.escape(CALL))
    """What a call begins with."""
    opener_beginnings: Sequence[str] = (CALL,)
    """Texts of which an opener's first characters may be the first characters."""

    def __init__(
        self, schemas: Mapping[str, Mapping[str, Any]], max_calls: int | None = None
    ) -> None:
        self.schemas = schemas
        self.num_complete = 0
        self._max_calls = max_calls
        self._num_started = 0
        self._held = ""
        self._at = 0
        self._events: list[Event] = []
        self._reader: Reader | None = None
        self._raw: list[str] = []
        self._raw_at = 0
        self._call: int | None = None
        self._ended_at: int | None = None

    @abstractmethod
    def read_call(self, opener: str) -> Reader:
        """Read a call, what `opener` matched being read already."""

    @property
    def done(self) -> bool:
        """The answer has all the calls that it may have."""
        return self._max_calls is not None and self.num_complete >= self._max_calls

    def feed(self, text: str, start: int) -> list[Event]:
        """Take some more text.

        Args:
            text: what comes next.
            start: characters of the raw answer before it.
        """
        if self.done:
            return []
        if not self._held and self._reader is None:
            self._at = start
        self._held += text
        while self._held and not self.done:
            if self._reader is not None:
                self._read()
            elif not self._find_call():
                break
        events, self._events = merged(self._events), []
        return events

    def finish(self) -> list[Event]:
        """The answer is over: return what was held."""
        if self.done:
            return []
        if self._reader is not None and self._ended_at is None:
            self._cut(self._reader)
        elif self._reader is None and not (self.num_complete and not self._held.strip()):
            self._tell(self._held)
        events, self._events = merged(self._events), []
        return events

    # What formats call.

    def begin(self, name: str) -> None:
        """The call's name is known, and its arguments are about to come."""
        if name not in self.schemas and not _NAME.fullmatch(name):
            broken()
        self._call = self._num_started
        self._num_started += 1
        self._events.append(ToolStart(self._call, name))

    def argue(self, text: str) -> None:
        """Some of the arguments' JSON text."""
        assert self._call is not None, "arguments come after the name"
        if text:
            self._events.append(ToolArguments(self._call, text))

    def end(self) -> None:
        """The call is complete, whatever follows."""
        assert self._call is not None, "a call ends after it began"
        self._events.append(ToolEnd(self._call))
        self.num_complete += 1
        # The character that is being read belongs to it.
        self._ended_at = len(self._raw) + 1

    # Text outside of calls.

    def _find_call(self) -> bool:
        """Tell the text before a call; False when more is needed to tell what is held."""
        found = self.opener.search(self._held)
        if found is None:
            doubtful = max(beginning_length(self._held, tag) for tag in self.opener_beginnings)
            sure = self._held[: len(self._held) - doubtful].rstrip()
            self._tell(sure)
            self._drop(len(sure))
            return False
        before = self._held[: found.start()].rstrip()
        self._tell(before)
        self._drop(len(before))
        # With the white space before it: if the call breaks, all of it is content.
        opened = self._held[: found.end() - len(before)]
        self._raw, self._raw_at = [opened], self._at
        self._drop(len(opened))
        self._call, self._ended_at = None, None
        self._reader = self.read_call(found[0])
        next(self._reader)
        return True

    def _tell(self, text: str) -> None:
        if text:
            self._events.append(Text(text, self._at))

    def _drop(self, count: int) -> None:
        self._held = self._held[count:]
        self._at += count

    # Text within a call.

    def _read(self) -> None:
        assert self._reader is not None
        for number, character in enumerate(self._held):
            try:
                self._reader.send(character)
            except BrokenCall:
                self._drop(number)
                self._break()
                return
            except StopIteration as stop:
                unread: str = stop.value
                self._reader = None
                self._drop(number + 1)
                self._held, self._at = unread + self._held, self._at - len(unread)
                return
            self._raw.append(character)
            if self.done:
                break
        self._drop(len(self._held))

    def _cut(self, reader: Reader) -> None:
        """The answer is over: what is read of the call and not told is told now."""
        if self._call is None:
            self._break()
            return
        with contextlib.suppress(AnswerOver):
            reader.throw(AnswerOver())
        self._events.append(ToolCut(self._call, "".join(self._raw)))
        self._reader = None

    def _break(self) -> None:
        """What was read becomes content: all of the call, or what came after its end."""
        raw = "".join(self._raw[self._ended_at or 0 :])
        if self._ended_at is not None:
            before = len("".join(self._raw[: self._ended_at]))
            self._events.append(Text(raw, self._raw_at + before))
        elif self._call is None:
            self._events.append(Text(raw, self._raw_at))
        else:
            self._events.append(ToolBroken(self._call, raw, self._raw_at))
        self._reader = None
