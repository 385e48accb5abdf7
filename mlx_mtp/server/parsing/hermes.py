"""Calls as Qwen3 writes them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
from typing import Any

from mlx_mtp.server.parsing.answer import BrokenCall, Reader
from mlx_mtp.server.parsing.json_reader import loaded, read_value
from mlx_mtp.server.parsing.qwen import CALL_END, QwenParser

_ARGUMENTS = ("arguments", "parameters")


class HermesParser(QwenParser):
    """Emits the arguments as the model writes them, once the function's name is known."""

    def read_body(self, opener: str) -> Reader[None]:
        if not (yield from self.find("{")):
            raise BrokenCall
        fields: dict[str, Any] = {}
        begun = False
        following = yield from self.space()
        while following != "}":
            if following != '"':
                raise BrokenCall
            key = yield from self._read_json()
            if not (yield from self.find(":")):
                raise BrokenCall
            first, name = (yield from self.space()), fields.get("name")
            if key in _ARGUMENTS and first == "{" and isinstance(name, str) and not begun:
                self.begin_call(name)
                begun = True
                yield from read_value(self, self.emit_arguments)
                # A client may act on it from here on: whatever follows, this is a call.
                self.end_call()
            else:
                fields[key] = yield from self._read_json()
            following = yield from self.space()
            if following == ",":
                self.pos += 1
                following = yield from self.space()
            elif begun:
                break
            elif following != "}":
                raise BrokenCall
        if not begun:
            self.pos += 1
            self._call_late(fields)
        # Small models close too many braces, or none: the call is whole without the rest.
        yield from self.find(CALL_END, skip="} \t\r\n")

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
