"""What the parsers of all formats share: the text that has arrived, and the events it makes.

Patterns are those of the `regex` module, which also finds a text that only begins to match. A
pattern must not match more once more text has come: it ends with a tag or looks ahead.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from mlx_mtp.text.parsing import events
from mlx_mtp.text.parsing.events import Event, Reasoning, Text
from mlx_mtp.text.stop_strings import StopStrings

_Result = TypeVar("_Result")
Reader = Generator[None, None, _Result]
"""Reads a part of the answer, and yields where it needs more text."""


class BrokenCall(Exception):  # noqa: N818 - not an error: the text is content after all
    """No call goes on like this; the next character is read again as content.

    What has been read is content too, unless the call has begun: then it stays unfinished.
    """


class AnswerOver(Exception):  # noqa: N818 - not an error: raised where a reader needs more text
    """The answer ended, or nothing more of it is wanted."""


class AnswerParser:
    """Turns an answer's text into events as it arrives, however it is split.

    Each format is a generator, `read_answer`, over what has arrived: what it finds can't depend on
    how many tokens a step brought, or where a token ends. After `max_calls` complete tool calls the
    parser is `done`. `schemas` are those of the tools' parameters; without them calls are text.
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
        self.in_reasoning = think and opened  # where the next character is
        self.in_answer = not think  # whether text that arrives passes `stops`
        self.stops = StopStrings()
        self.num_calls = 0  # complete ones
        self.num_begun = 0
        self.with_tools = schemas is not None
        self.schemas = schemas or {}
        self.text, self.pos, self.over = "", 0, False
        self.cut = False  # whether the answer ended where the model would have gone on
        self.ends_in_call = False  # and is not finished
        self.dropped = 0  # characters of the answer before `text`
        self.texts: list[str] = []  # content, since the last call if there may be one
        self._max_calls = max_calls
        self._call: int | None = None  # the one that has begun and is not complete
        self._call_at: int | None = None  # what a broken call gives back begins here
        self._events: list[Event] = []
        self._reading = self.read_answer()

    @property
    def done(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def feed(self, text: str) -> list[Event]:
        """Read some more text; return what is certain now."""
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
        """The answer is over, by the model's choice or `cut`: return what was held back."""
        self.over, self.cut = True, cut
        self.text += self.stops.flush()
        return self.feed("")

    def begin_answer(self) -> None:
        """No reasoning comes next: stop strings count from here on."""
        if not self.in_answer:
            self.in_answer = True
            self.text = self.text[: self.pos] + self.stops.release(self.rest)
            if self.over:
                self.text += self.stops.flush()

    def read_answer(self) -> Reader[None]:
        """Read the answer: all that is left is text."""
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
        """Characters of the answer before the next one."""
        return self.dropped + self.pos

    def match(self, pattern: Any) -> Reader[Any]:
        """Read what matches a pattern and stands next; None: nothing that does."""
        while (match := pattern.match(self.text, self.pos, partial=True)) and match.partial:
            if self.over:
                raise AnswerOver
            yield
        if match:
            self.pos = match.end()
        return match

    def look(self, pattern: Any) -> Reader[Any]:
        """The same, but where the model ended the answer, nothing more follows."""
        try:
            return (yield from self.match(pattern))
        except AnswerOver:
            if self.cut:
                raise
            return None

    def expect(self, pattern: Any) -> Reader[Any]:
        """As `match`, but anything else breaks the call."""
        match = yield from self.match(pattern)
        if not match:
            raise BrokenCall
        return match

    def until(self, pattern: Any, read_to: Callable[[int], None]) -> Reader[Any]:
        """Find a match, partial where the answer is over; `read_to` reads all before it."""
        while True:
            match = pattern.search(self.text, self.pos, partial=True)
            read_to(match.start())
            if self.over or not match.partial:
                return match
            yield

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def emit_text(self, end: int) -> None:
        """The text up to an index is reasoning or content."""
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
        """The call is complete, whatever follows."""
        assert self._call is not None, "a call ends after it began"
        self.emit(events.ToolEnd(self._call))
        self._call, self._call_at = None, self.position
        self.num_calls += 1
        if self.done:
            raise AnswerOver

    def read_call(self, call: Reader[None], start: int) -> Reader[None]:
        """Read a call, of which the text from `start` on has been read."""
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
    """All of it is text."""
