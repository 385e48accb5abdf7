"""The base class of all formats' parsers: the text that has arrived, and the events made of it.

Patterns are those of the `regex` module, which supports partial matches, of text that ends within a
match. A pattern must not match more when more text arrives: it ends with a tag or a lookahead.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from mlx_mtp.text.parsing import events
from mlx_mtp.text.parsing.events import Event, Reasoning, Text
from mlx_mtp.text.stop_strings import StopStrings

_Result = TypeVar("_Result")
Reader = Generator[None, None, _Result]
"""Reads a part of the answer, and yields whenever it needs more text."""


class BrokenCall(Exception):  # noqa: N818 - not an error: the text is content after all
    """The next character can't continue the call; from there on, the text is content.

    The call's text before is content too, unless the call has begun: then it stays unfinished.
    """


class AnswerOver(Exception):  # noqa: N818 - not an error: raised where a reader needs more text
    """The answer has ended, or no more of it is needed."""


class AnswerParser:
    """Turns an answer's text into events as it arrives, however it is split.

    Each format is a generator, `read_answer`, which reads the text that has arrived: its events
    can't depend on the number of tokens per step, or on where a token ends. After `max_calls`
    complete tool calls the parser is `done`. `schemas` has the schema of each tool's parameters;
    without `schemas`, calls are text.
    """

    def __init__(
        self,
        *,
        think: bool = False,  # the answer may begin with a think block
        opened: bool = False,  # the prompt ends within that block
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        max_calls: int | None = None,
    ) -> None:
        self.think = think
        self.in_reasoning = think and opened  # whether the next character is reasoning
        self.in_answer = not think  # whether text is checked for stop strings
        self.stops = StopStrings()
        self.num_calls = 0  # complete calls
        self.num_begun = 0
        self.with_tools = schemas is not None
        self.schemas = schemas or {}
        self.text, self.pos, self.over = "", 0, False
        self.cut = False  # whether the answer ended before the model ended it
        self.ends_in_call = False  # whether the answer ends in an unfinished call
        self.dropped = 0  # characters of the answer before `text`
        self.texts: list[str] = []  # content since the last call; empty without tools
        self._max_calls = max_calls
        self._call: int | None = None  # number of the call that has begun and is not complete
        self._call_at: int | None = None  # start of the text that is content if the call breaks
        self._events: list[Event] = []
        self._reading = self.read_answer()

    @property
    def done(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def feed(self, text: str) -> list[Event]:
        """Read more text; returns the events that are certain now."""
        self.text += self.stops.release(text) if self.in_answer else text
        try:  # noqa: SIM105 - it takes half of the time
            next(self._reading)
        except (StopIteration, AnswerOver):
            pass
        if self._call_at is None:
            self.dropped += self.pos
            self.text, self.pos = self.text[self.pos :], 0
        emitted, self._events = self._events, []
        return emitted

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the answer; returns the events that were held back.

        `cut` is true if the model did not end the answer itself.
        """
        self.over, self.cut = True, cut
        self.text += self.stops.flush()
        return self.feed("")

    def begin_answer(self) -> None:
        """Begin the answer after the reasoning: from here on, stop strings apply."""
        if not self.in_answer:
            self.in_answer = True
            self.text = self.text[: self.pos] + self.stops.release(self.rest)
            if self.over:
                self.text += self.stops.flush()

    def read_answer(self) -> Reader[None]:
        """Read the rest of the answer as text."""
        while True:
            self.emit_text(len(self.text))
            if self.over:
                return
            yield

    @property
    def rest(self) -> str:
        return self.text[self.pos :]

    @property
    def position(self) -> int:
        """Number of characters of the answer before the next character."""
        return self.dropped + self.pos

    def match(self, pattern: Any) -> Reader[Any]:
        """Read the text that matches a pattern here; returns the match, or None."""
        while (match := pattern.match(self.text, self.pos, partial=True)) and match.partial:
            if self.over:
                raise AnswerOver
            yield
        if match:
            self.pos = match.end()
        return match

    def look(self, pattern: Any) -> Reader[Any]:
        """Like `match`, but returns None if the model has ended the answer here."""
        try:
            return (yield from self.match(pattern))
        except AnswerOver:
            if self.cut:
                raise
            return None

    def expect(self, pattern: Any) -> Reader[Any]:
        """Like `match`, but raises BrokenCall if the pattern doesn't match here."""
        match = yield from self.match(pattern)
        if not match:
            raise BrokenCall
        return match

    def until(self, pattern: Any, read_to: Callable[[int], None]) -> Reader[Any]:
        """Find a match, partial only if the answer is over; `read_to` reads the text before it."""
        while True:
            match = pattern.search(self.text, self.pos, partial=True)
            read_to(match.start())
            if self.over or not match.partial:
                return match
            yield

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def emit_text(self, end: int) -> None:
        """Emit the text up to an index as reasoning or content."""
        if end > self.pos:
            text = self.text[self.pos : end]
            if self.in_reasoning:
                self.emit(Reasoning(text))
            else:
                self.emit_content(text, self.dropped + self.pos)
            self.pos = end

    def emit_content(self, text: str, start: int) -> None:
        self._events.append(Text(text, start))
        if self.with_tools:
            self.texts.append(text)

    def begin_call(self, name: str) -> None:
        self._call = self.num_begun
        self.texts.clear()
        self.num_begun += 1
        self.emit(events.ToolStart(self._call, name))

    def emit_arguments(self, text: str) -> None:
        assert self._call is not None, "arguments come after the name"
        if text:
            self.emit(events.ToolArguments(self._call, text))

    def end_call(self) -> None:
        """Complete the call, whatever text follows."""
        assert self._call is not None, "a call ends after it began"
        self.emit(events.ToolEnd(self._call))
        self._call, self._call_at = None, self.position
        self.num_calls += 1
        if self.done:
            raise AnswerOver

    def read_call(self, call: Reader[None], start: int) -> Reader[None]:
        """Read the rest of a call that begins at position `start`."""
        self._call_at, num_calls = start, self.num_calls
        try:
            yield from call
        except BrokenCall:
            raw = self.text[self._call_at - self.dropped : self.pos]
            if self._call is not None:
                self.emit(events.ToolCut(self._call, raw, self._call_at))
            elif raw:
                self.emit_content(raw, self._call_at)
        except AnswerOver:
            self.pos = len(self.text)
            raw = self.text[self._call_at - self.dropped :]
            if self._call is not None:
                self.emit(events.ToolCut(self._call, raw, self._call_at))
                self.ends_in_call = True
            elif self.num_calls == num_calls:
                self.emit_content(raw, self._call_at)
            raise
        finally:
            self._call = self._call_at = None


class PlainParser(AnswerParser):
    """Reads a whole answer as text."""
