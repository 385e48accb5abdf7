"""Answers of Qwen's models: a think block, then text with tool calls in it; either may be missing.

Newlines next to the block's tags and white space next to a call belong to the template and are
dropped; everything else is kept.
"""

import contextlib
import json
from typing import Any

import regex

from mlx_mtp.text.parsing.answer import AnswerOver, AnswerParser, BrokenCall, Reader
from mlx_mtp.text.parsing.json_reader import loaded, read_value

OPEN, CLOSE = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
MAX_NAME = 256
_NAME = regex.compile(rf"[\w./:@-]{{1,{MAX_NAME}}}")
_OPEN = regex.compile(rf"\s*{OPEN}")
_NEWLINES = regex.compile(r"\n*(?=[^\n])")
# All newlines before a tag or none: `\n*` alone would be tried from each of them.
_BEFORE = r"(?:\G|(?<!\n))\n*"
_CLOSE = regex.compile(_BEFORE + CLOSE)
# Some models call a tool without closing the block first. Only what looks like a call all through
# counts: a model may well think about the tag.
_CLOSE_OR_CALL = regex.compile(rf'{_BEFORE}(?:{CLOSE}|(?P<call>{CALL}\s*(?:<function=|\{{\s*")))')
_FIRST = regex.compile(r'\s*\{\s*(?=["}])')
_NEXT = regex.compile(r'\s*,\s*(?=")')
_LAST = regex.compile(r"[\s,]*\}")
# Small models close too many braces, or none.
_END = regex.compile(rf"[\s,}}]*{CALL_END}")
_COLON = regex.compile(r"\s*:\s*(?=\S)")
_OBJECT = regex.compile(r"(?=\{)")
_ARGUMENTS = ("arguments", "parameters")


class QwenParser(AnswerParser):
    """The base of both formats of calls; by itself it reads none."""

    def openers(self) -> list[str]:
        return [CALL]

    def read_body(self, opener: str) -> Reader[None]:
        """Read a call behind its opener."""
        raise NotImplementedError

    def begin_call(self, name: str) -> None:
        if name not in self.schemas and not _NAME.fullmatch(name):
            raise BrokenCall
        super().begin_call(name)

    def read_answer(self) -> Reader[None]:
        if self.think:
            with contextlib.suppress(AnswerOver):
                # A model may repeat the tag that the prompt ended with.
                self.in_reasoning |= bool((yield from self.match(_OPEN)))
        if self.in_reasoning:
            yield from self._read_reasoning()
        self.begin_answer()
        yield from self._read_calls() if self.with_tools else super().read_answer()

    def _read_reasoning(self) -> Reader[None]:
        yield from self.match(_NEWLINES)
        end = _CLOSE_OR_CALL if self.with_tools else _CLOSE
        match = yield from self.until(end, self.emit_text)
        if match.partial:
            self.emit_text(len(self.text))
            raise AnswerOver
        is_call = match.lastgroup == "call"
        self.pos, self.in_reasoning = match.start("call") if is_call else match.end(), False
        yield from self.match(_NEWLINES)

    def _read_calls(self) -> Reader[None]:
        tags = "|".join(map(regex.escape, self.openers()))
        opener = regex.compile(rf"(?:\G|(?<!\s))\s*({tags})")
        while True:
            match = yield from self.until(opener, self.emit_text)
            if match.partial:
                if self.rest.strip() or not self.num_calls:
                    self.emit_text(len(self.text))
                return
            # With the white space before it: if the call breaks, all of it is content.
            start, self.pos = self.position, match.end()
            yield from self.read_call(self.read_body(match[1]), start)


class HermesParser(QwenParser):
    """Calls as Qwen3 writes them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    def read_body(self, opener: str) -> Reader[None]:
        fields: dict[str, Any] = {}
        last = _LAST
        yield from self.expect(_FIRST)
        while not (yield from self.match(last)):
            if fields:
                yield from self.expect(_NEXT)
            key = yield from self._read_json()
            yield from self.expect(_COLON)
            name = fields.get("name")
            is_call = last is _LAST and isinstance(name, str) and key in _ARGUMENTS
            if is_call and (yield from self.match(_OBJECT)):
                self.begin_call(str(name))
                yield from read_value(self, self.emit_arguments)
                # A client may act on it from here on: whatever follows, this is a call.
                self.end_call()
                last = _END
            else:
                fields[key] = yield from self._read_json()
        if last is _LAST:
            self._call_late(fields)
            yield from self.match(_END)

    def _read_json(self) -> Reader[Any]:
        read: list[str] = []
        yield from read_value(self, read.append)
        return loaded("".join(read))

    def _call_late(self, fields: dict[str, Any]) -> None:
        """A call whose name came last, or whose arguments are no plain object."""
        name = fields.get("name")
        given = next((fields[key] for key in _ARGUMENTS if key in fields), None)
        if isinstance(given, str):
            given = loaded(given) if given.strip() else None
        if not isinstance(given, dict | None) or not isinstance(name, str):
            raise BrokenCall
        self.begin_call(name)
        self.emit_arguments(json.dumps(given or {}))
        self.end_call()
