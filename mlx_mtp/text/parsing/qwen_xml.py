"""Calls as tags, as Qwen3-Coder and Qwen3.5 write them, with or without `<tool_call>` around them:
`<function=NAME><parameter=KEY>VALUE</parameter></function>`."""

import json

import regex

from mlx_mtp.text.parsing.answer import AnswerOver, Reader
from mlx_mtp.text.parsing.bare_values import begun_json, begun_string, json_text, value_types
from mlx_mtp.text.parsing.qwen import CALL, CALL_END, MAX_NAME, QwenParser

_FUNCTION = "<function="
_PARAMETER_END, _FUNCTION_END = "</parameter>", "</function>"
_BEGIN = regex.compile(rf"\s*{_FUNCTION}")
_NAME = regex.compile(rf"([^>\r\n<]{{0,{MAX_NAME - 1}}})>")
_TAG = rf"(?P<tag><parameter=|{_FUNCTION_END})"
_NEXT = regex.compile(rf"\s*{_TAG}")
_LINE = regex.compile(r"\n|(?=[^\n])")
# A value may itself hold `</parameter>`: it ends where another tag follows. One that is left open
# ends with its function.
_VALUE_END = regex.compile(rf"\n?(?:{_PARAMETER_END}\s*{_TAG}|{_FUNCTION_END}\s*{CALL_END})")
_CALL_END = regex.compile(rf"[ \t\r\n]*{CALL_END}")


class QwenXmlParser(QwenParser):
    """Values are text; the tool's schema says what JSON they are. Plain strings are streamed."""

    def openers(self) -> list[str]:
        # Bare, only a tool that exists makes a call.
        return [CALL, *(f"{_FUNCTION}{name}>" for name in self.schemas)]

    def read_body(self, opener: str) -> Reader[None]:
        name = opener[len(_FUNCTION) : -1]
        if opener == CALL:
            yield from self.expect(_BEGIN)
            name = (yield from self.expect(_NAME))[1].strip()
        self.begin_call(name)
        schema = self.schemas.get(name, {})
        # Arguments that are cut begin an object, and no client takes them for none.
        self.emit_arguments("{")
        separator = ""
        tag = (yield from self.expect(_NEXT))["tag"]
        while tag not in (_FUNCTION_END, None):
            key = yield from self._read_key(separator)
            self.emit_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            tag = yield from self._read_value(value_types(schema, key))
        self.emit_arguments("}")
        self.end_call()
        yield from self.match(_CALL_END)

    def _read_key(self, separator: str) -> Reader[str]:
        try:
            return (yield from self.expect(_NAME))[1].strip()
        except AnswerOver:
            self.emit_arguments(separator + begun_string(self.rest))
            raise

    def _read_value(self, types: frozenset[str]) -> Reader[str | None]:
        """A parameter's value and the tag that follows it; None: the end of the whole call."""
        streamed = types == {"string"}
        if streamed:
            self.emit_arguments('"')
        yield from self.match(_LINE)
        start = self.pos

        def read_to(end: int) -> None:
            if streamed:
                self.emit_arguments(begun_string(self.text[self.pos : end])[1:])
            self.pos = end

        match = yield from self.until(_VALUE_END, read_to)
        value = self.text[start : self.pos]
        if not match.partial or self.rest.removeprefix("\n").startswith(_PARAMETER_END):
            self.emit_arguments('"' if streamed else json_text(value, types))
        elif streamed:
            self.emit_arguments(begun_string(self.rest)[1:])
        else:
            self.emit_arguments(begun_json(self.text[start:], value, types))
        if match.partial:
            raise AnswerOver
        self.pos = match.end()
        return match["tag"]
