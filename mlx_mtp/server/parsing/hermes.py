"""Calls as Qwen3 writes them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
from typing import Any

from mlx_mtp.server.parsing import strict_json
from mlx_mtp.server.parsing.json_reader import read_object, read_string, read_value
from mlx_mtp.server.parsing.reading import Reader, broken, closing, one_of, space
from mlx_mtp.server.parsing.tool_parser import ToolParser

_ARGUMENTS = ("arguments", "parameters")


class HermesParser(ToolParser):
    """Streams the arguments as the model writes them, once it has told the name."""

    def read_call(self, opener: str) -> Reader:
        """The object's fields, one after the other."""
        yield from one_of((yield from space()), "{")
        fields: dict[str, Any] = {}
        told = False
        following = yield from space()
        while following != "}":
            yield from one_of(following, '"')
            read: list[str] = []
            yield from read_string(read.append)
            key = _loaded(read)
            yield from one_of((yield from space()), ":")
            first = yield from space()
            name = fields.get("name")
            if key in _ARGUMENTS and first == "{" and isinstance(name, str) and not told:
                self.begin(name)
                told = True
                yield from read_object(self.argue)
                # A client may act on it from here on: whatever follows, this is a call.
                self.end()
                following = yield from space()
            else:
                read = []
                after = yield from read_value(first, read.append)
                fields[key] = _loaded(read)
                following = yield from space(unless=after)
            if following == ",":
                following = yield from space()
            elif told:
                return (yield from closing(following, skip="}"))
            elif following != "}":
                broken()
        if not told:
            self._tell_late(fields)
            self.end()
        # Small models close too many braces, or none: the call is whole without the rest.
        return (yield from closing(skip="}"))

    def _tell_late(self, fields: dict[str, Any]) -> None:
        """A call whose name came last, or whose arguments are no plain object."""
        name = fields.get("name")
        given = next((fields[key] for key in _ARGUMENTS if key in fields), None)
        if not isinstance(name, str):
            broken()
        if isinstance(given, str):
            given = _loaded([given]) if given.strip() else None
        if not isinstance(given, dict | None):
            broken()
        self.begin(name)
        self.argue(json.dumps({} if given is None else given))


def _loaded(pieces: list[str]) -> Any:
    try:
        return strict_json.loads("".join(pieces))
    except ValueError:
        broken()
