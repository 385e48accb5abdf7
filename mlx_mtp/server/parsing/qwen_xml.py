"""Calls as tags: `<function=NAME><parameter=KEY>VALUE</parameter></function>`, as Qwen3-Coder and
Qwen3.5 write them, within `<tool_call>` or, as Qwen3-Coder does at times, without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from mlx_mtp.server.parsing.json_reader import begun_value
from mlx_mtp.server.parsing.json_types import json_text, value_types
from mlx_mtp.server.parsing.reading import (
    CALL_END,
    AnswerOver,
    Reader,
    Step,
    closing,
    one_of,
    space,
    until,
)
from mlx_mtp.server.parsing.think import beginning_length
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
        # Told at once: arguments that are cut begin an object, and no client takes them for none.
        self.argue("{")
        separator = ""
        tag = yield from one_of((yield from space()), _PARAMETER, _FUNCTION_END)
        while tag == _PARAMETER:
            key = yield from until(">", partial(self._cut_key, separator))
            self.argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            tag = yield from self._read_value(value_types(schema, key))
        self.argue("}")
        self.end()
        return (yield from closing())

    def _read_value(self, types: frozenset[str]) -> Step:
        """A parameter's value; returns the tag that follows it."""
        streamed = types == {"string"}
        value: list[str] = []
        if streamed:
            self.argue('"')
        pending = ""
        try:
            pending = yield
            if pending == "\n":
                pending = ""
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
        except AnswerOver:
            self._cut_value("".join(value), pending, types)
            raise
        self.argue('"' if streamed else json_text("".join(value), types))
        return following

    def _cut_key(self, separator: str, key: str) -> None:
        """The answer ended in a parameter's name."""
        self.argue(separator + _begun_string(key))

    def _cut_value(self, value: str, pending: str, types: frozenset[str]) -> None:
        """The answer ended in a parameter's value, or before the tag after it.

        Args:
            value: what is not told of it; of strings, all is.
            pending: what came next, and may be the tag that ends it.
            types: that it may have.
        """
        ended = pending.removeprefix("\n").startswith(_PARAMETER_END)
        if types == {"string"}:
            self.argue('"' if ended else _begun_string(pending)[1:])
        elif ended:
            self.argue(json_text(value, types))
        else:
            self.argue(begun_json(value + pending, types))


def begun_json(text: str, types: frozenset[str]) -> str:
    """The beginning of the JSON text of a value of which only the beginning is there.

    Args:
        text: what there is of it.
        types: that the value may have; none: unknown.
    """
    bare = text.strip()
    if bare[:1] in ("{", "[") or "string" not in (types or {"string"}):
        # In bare JSON a tag that is begun is no part of the value.
        without_tag = bare[: len(bare) - beginning_length(bare, _PARAMETER_END)].rstrip()
        for candidate in (bare, without_tag):
            begun = begun_value(candidate) if candidate[:1] != '"' else None
            if begun is not None:
                return begun
    return _begun_string(text) if text else ""


def _begun_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[:-1]


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
