"""Calls as tags: `<function=NAME><parameter=KEY>VALUE</parameter></function>`, as Qwen3-Coder and
Qwen3.5 write them, within `<tool_call>` or, as Qwen3-Coder does at times, without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mlx_mtp.server.parsing.json_types import json_text, value_types
from mlx_mtp.server.parsing.reading import (
    CALL_END,
    Reader,
    Step,
    closing,
    one_of,
    space,
    until,
)
from mlx_mtp.server.parsing.tool_parser import CALL, ToolParser

_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"


class QwenXmlParser(ToolParser):
    """Values are text; the tool's schema says what JSON they are. Plain strings are streamed."""

    def __init__(
        self, schemas: Mapping[str, Mapping[str, Any]], max_calls: int | None = None
    ) -> None:
        super().__init__(schemas, max_calls)
        names = "|".join(map(re.escape, schemas))
        self.opener = re.compile(f"{CALL}|{_FUNCTION}(?:{names})>")
        # Bare, only a tool that exists makes a call.
        self.opener_beginnings = (CALL, *(f"{_FUNCTION}{name}>" for name in schemas))

    def read_call(self, opener: str) -> Reader:
        """The name, then the parameters one after the other."""
        if opener == CALL:
            yield from one_of((yield from space()), _FUNCTION)
            name = yield from until(">")
        else:
            name = opener[len(_FUNCTION) : -1]
        self.begin(name)
        schema = self.schemas.get(name, {})
        separator = "{"
        tag = yield from one_of((yield from space()), _PARAMETER, _FUNCTION_END)
        while tag == _PARAMETER:
            key = yield from until(">")
            self.argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            tag = yield from self._read_value(value_types(schema, key))
        self.argue("{}" if separator == "{" else "}")
        self.end()
        return (yield from closing())

    def _read_value(self, types: frozenset[str]) -> Step:
        """A parameter's value; returns the tag that follows it."""
        streamed = types == {"string"}
        value: list[str] = []
        if streamed:
            self.argue('"')
        pending = yield
        if pending == "\n":
            pending = yield
        while True:
            following = _tag_after(pending)
            if following:
                break
            if following is None:
                character, pending = pending[0], pending[1:]
                if streamed:
                    self.argue(json.dumps(character, ensure_ascii=False)[1:-1])
                else:
                    value.append(character)
                if pending:
                    continue
            pending += yield
        self.argue('"' if streamed else json_text("".join(value), types))
        return following


_ENDINGS = (
    (_PARAMETER_END, ((_PARAMETER, _PARAMETER), (_FUNCTION_END, _FUNCTION_END))),
    # A parameter that is left open ends with its function.
    (_FUNCTION_END, ((CALL_END, _FUNCTION_END),)),
)


def _tag_after(pending: str) -> str | None:
    """The tag after a value that `pending` ends; "" if that is still open, None if it doesn't.

    A value may itself hold `</parameter>`: it ends where another tag follows.
    """
    rest = pending.removeprefix("\n")
    for ending, follow in _ENDINGS:
        if ending.startswith(rest):
            return ""
        if rest.startswith(ending):
            after = rest[len(ending) :].lstrip()
            for tag, meaning in follow:
                if after == tag:
                    return meaning
                if tag.startswith(after):
                    return ""
    return None
