"""Answers of Qwen's models: a think block, then text with tool calls; both are optional.

Newlines next to the block's tags and white space next to a call belong to the template and are
dropped; everything else is kept. docs/calls.md has the grammar of calls.
"""

import contextlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import regex

from mlx_mtp.text.parsing.answer import AnswerOver, AnswerParser, BrokenCall, Reader
from mlx_mtp.text.parsing.events import Event, Text, ToolArguments, ToolCut, ToolStart
from mlx_mtp.text.parsing.qwen_json import OBJECT, read_calls
from mlx_mtp.text.parsing.qwen_xml import CLOSING, read_function, read_name
from mlx_mtp.text.parsing.tags import CALL, CLOSE, FUNCTION, MAX_NAME

_NAME = regex.compile(rf"[\w./:@-]{{1,{MAX_NAME}}}")
_THINK = regex.compile(r"\s*+<(?P<closes>/)?think>")
_NEWLINES = regex.compile(r"\n*(?=[^\n])")
# All white space (or lines) before a tag. The lookbehind keeps the search from trying each
# character of the white space as a start.
_SPACE, _LINES = r"(?:\G|(?<!\s))\s*+", r"(?:\G|(?<!\n))\n*+"
_FUNCTION = regex.compile(rf"\s*{FUNCTION}")
_TICKS = regex.compile("`+")
_FENCE = regex.compile("[ \t]*(`{3,})[^`]*")


class CallParser(AnswerParser):
    """Reads text with calls, in both forms, JSON and tags, whichever the template describes."""

    def begin_call(self, name: str) -> None:
        if name not in self.schemas and not _NAME.fullmatch(name):
            raise BrokenCall
        super().begin_call(name)

    @cached_property
    def openers(self) -> str:
        """Pattern of the tags that open a call; a bare function tag must name an existing tool."""
        names = "|".join(map(regex.escape, self.schemas)) or "(?!)"
        return rf"(?P<opener>{CALL}|{FUNCTION}(?P<name>{names})>)"

    def read_answer(self) -> Reader[None]:
        opener = regex.compile(_SPACE + self.openers)
        while True:
            match = yield from self.until(opener, self.emit_text)
            if match.partial:
                if self.rest.strip() or not self.num_calls:
                    self.emit_text(len(self.text))
                return
            yield from self.read_from(match)

    def read_from(self, match: Any) -> Reader[None]:
        """Read a call from its opening tag on."""
        # Include the white space before the tag: if this is no call, all of the text is content.
        start, self.pos, num_begun = self.position, match.end(), self.num_begun
        yield from self.read_call(self._read_body(match["name"]), start)
        while self.num_begun > num_begun and (yield from self.match(CLOSING)):
            pass  # Skip tags that close a complete or broken call.

    def _read_body(self, name: str | None) -> Reader[None]:
        if name is None:
            if (yield from self.match(OBJECT)):
                return (yield from read_calls(self))
            yield from self.expect(_FUNCTION)
            name = yield from read_name(self)
        yield from read_function(self, name)


class QwenParser(CallParser):
    """Reads a whole answer, where text in the form of calls can also be reasoning or code."""

    _fence = ""  # the backticks that opened the current block of code
    _line = ""  # the last line before `texts`

    def begin_call(self, name: str) -> None:
        super().begin_call(name)
        self._fence = self._line = ""

    def read_answer(self) -> Reader[None]:
        if self.think:
            with contextlib.suppress(AnswerOver):
                # A model can repeat the tag with which the prompt ended.
                if tag := (yield from self.match(_THINK)):
                    self.in_reasoning = True
                    self.pos = tag.start("closes") - 1 if tag["closes"] else tag.end()
        if self.in_reasoning:
            yield from self._read_reasoning()
        self.begin_answer()
        yield from super().read_answer() if self.with_tools else AnswerParser.read_answer(self)

    def read_from(self, match: Any) -> Reader[None]:
        end = self._end_of_code(match[0].removesuffix(match["opener"]))
        if end:
            after = yield from self._hold(regex.compile(f"{_LINES}(?:{end})"))
            self.emit_text(after.end())
            self._fence = self._line = ""
            self.texts.clear()
        else:
            yield from super().read_from(match)

    def _end_of_code(self, space: str) -> str:
        """Returns a pattern of the end of the code that is open after `texts` and `space`.

        The pattern is empty if no code is open.
        """
        *lines, self._line = "".join((self._line, *self.texts, space)).split("\n")
        self.texts.clear()
        for line in lines:
            fence = _FENCE.fullmatch(line)
            if fence and not self._fence:
                self._fence = fence[1]
            elif fence and line.strip(" \t`") == "" and len(fence[1]) >= len(self._fence):
                self._fence = ""
        if self._fence:
            return rf"(?<=\n)[ \t]*{self._fence}`*[ \t]*(?=[\n<])"
        # Inline code with a call can have several lines: it ends at a backtick or an empty line.
        return r"`+(?=[^`])|(?<=\n\n)" if len(_TICKS.findall(self._line)) % 2 else ""

    def _read_reasoning(self) -> Reader[None]:
        yield from self.match(_NEWLINES)
        openers = self.openers if self.with_tools else "(?P<opener>(?!))"
        end = yield from self.until(regex.compile(f"{_LINES}(?:{CLOSE}|{openers})"), self.emit_text)
        if end.partial:
            self.emit_text(len(self.text))
            raise AnswerOver
        if end["opener"]:
            end = yield from self._hold(regex.compile(_LINES + CLOSE))
        self.pos, self.in_reasoning = end.end(), False
        yield from self.match(_NEWLINES)

    def _hold(self, end: Any) -> Reader[Any]:
        """Read reasoning or code, in which calls are text, up to its end; returns the end's match.

        A call is held until other text follows. If the end never comes, complete calls at the end
        of the answer are real calls.
        """
        inner, held = CallParser(schemas=self.schemas), list[Event]()
        start = given = self.position

        def take(events: Iterable[Event]) -> None:
            for event in events:
                if isinstance(event, Text | ToolCut):
                    held.clear()
                    self.emit_text(start + event.start + len(event.text) - self.dropped)
                else:
                    held.append(event)

        while True:
            at = given - self.dropped
            match = end.search(self.text, at, partial=True)
            take(inner.feed(self.text[at : match.start()]))
            given = self.dropped + match.start()
            if not match.partial:
                self.emit_text(match.start())
                return match
            if self.over:
                break
            yield
        take(inner.feed(self.text[match.start() :]))
        take(inner.finish(cut=self.cut))
        if held and not self.cut:
            self.in_reasoning, self.pos = False, len(self.text)
        self.emit_text(len(self.text))
        for event in () if self.cut else held:
            match event:
                case ToolStart():
                    self.begin_call(event.name)
                case ToolArguments():
                    self.emit_arguments(event.text)
                case _:
                    self.end_call()
        raise AnswerOver
