"""Calls as tags: `<function=NAME><parameter=KEY>VALUE</parameter></function>`, as Qwen3-Coder and
Qwen3.5 write them, within `<tool_call>` or, as Qwen3-Coder does at times, without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from mlx_mtp.server.parsing.answer import AnswerOver, BrokenCall, Reader
from mlx_mtp.server.parsing.bare_values import begun_json, begun_string, json_text, value_types
from mlx_mtp.server.parsing.qwen import CALL, CALL_END, MAX_NAME, QwenParser

_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
# A value may itself hold `</parameter>`: it ends where another tag follows. One that is left open
# ends with its function.
_VALUE_END = re.compile(
    rf"\n?(?:{_PARAMETER_END}\s*(?P<tag>{_PARAMETER}|{_FUNCTION_END})"
    rf"|{_FUNCTION_END}\s*{CALL_END})"
)


def _begun(tag: str) -> str:
    """The expression of what begins a tag."""
    return "|".join(re.escape(tag[:length]) for length in range(len(tag)))


_VALUE_END_BEGUN = re.compile(
    rf"\n?(?:{_begun(_PARAMETER_END)}|{_begun(_FUNCTION_END)}"
    rf"|{_PARAMETER_END}\s*(?:{_begun(_PARAMETER)}|{_begun(_FUNCTION_END)})"
    rf"|{_FUNCTION_END}\s*(?:{_begun(CALL_END)}))\Z"
)


class QwenXmlParser(QwenParser):
    """Values are text; the tool's schema says what JSON they are. Plain strings are streamed."""

    def openers(self) -> Collection[str]:
        # Bare, only a tool that exists makes a call.
        return {CALL, *(f"{_FUNCTION}{name}>" for name in self.schemas)}

    def read_body(self, opener: str) -> Reader[None]:
        name = opener[len(_FUNCTION) : -1]
        if opener == CALL:
            if not (yield from self.find(_FUNCTION)):
                raise BrokenCall
            name = yield from self._read_name()
        self.begin_call(name)
        schema = self.schemas.get(name, {})
        # Arguments that are cut begin an object, and no client takes them for none.
        self.emit_arguments("{")
        separator = ""
        tag = yield from self.find(_PARAMETER, _FUNCTION_END)
        if not tag:
            raise BrokenCall
        while tag == _PARAMETER:
            key = yield from self._read_name(separator)
            self.emit_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            tag = yield from self._read_value(value_types(schema, key))
        self.emit_arguments("}")
        self.end_call()
        yield from self.find(CALL_END, skip=" \t\r\n")

    def _read_name(self, before: str | None = None) -> Reader[str]:
        """Up to the ">" that ends a name. A key that is cut is emitted after `before`."""
        start = self.pos
        try:
            while (character := (yield from self.peek())) != ">":
                if character in "\r\n<" or self.pos - start >= MAX_NAME:
                    raise BrokenCall
                self.pos += 1
        except AnswerOver:
            if before is not None:
                self.emit_arguments(before + begun_string(self.text[start:]))
            raise
        self.pos += 1
        return self.text[start : self.pos - 1].strip()

    def _read_value(self, types: frozenset[str]) -> Reader[str]:
        """A parameter's value and the tag that follows it, which is returned."""
        streamed = types == {"string"}
        if streamed:
            self.emit_arguments('"')
        if (yield from self.peek()) == "\n":
            self.pos += 1
        start, found = self.pos, None
        while found is None:
            found = _VALUE_END.search(self.text, self.pos)
            end = found or _VALUE_END_BEGUN.search(self.text, self.pos)
            assert end is not None, "nothing at all begins a tag"
            if streamed:
                self.emit_arguments(begun_string(self.text[self.pos : end.start()])[1:])
            self.pos = end.start()
            if found is None and not (yield from self.more()):
                break
        value = self.text[start : self.pos]
        if found or self.rest.removeprefix("\n").startswith(_PARAMETER_END):
            self.emit_arguments('"' if streamed else json_text(value, types))
        elif streamed:
            self.emit_arguments(begun_string(self.rest)[1:])
        else:
            self.emit_arguments(begun_json(self.text[start:], value, types))
        if found is None:
            raise AnswerOver
        self.pos = found.end()
        return found["tag"] or _FUNCTION_END
