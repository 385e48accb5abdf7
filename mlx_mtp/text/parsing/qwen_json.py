"""Calls as JSON, as Qwen3 writes them: `{"name": ..., "arguments": {...}}`."""

import json
from typing import Any

import regex

from mlx_mtp.text.parsing.answer import AnswerParser, BrokenCall, Reader
from mlx_mtp.text.parsing.json_reader import loaded, read_value
from mlx_mtp.text.parsing.tags import CLOSER

OBJECT = regex.compile(r"""\s*\[?\s*\{\s*(?=["'}])""")
_NEXT = regex.compile(r"""\s*,\s*(?=["'])""")
_LAST = regex.compile(r"[\s,]*\}")
# Small models close too many braces, or none, and some write several calls between two tags.
_END = regex.compile(rf"""[\s,}}\]]*(?:{CLOSER}|(?P<more>\{{\s*(?=["'])))""")
_BRACES = regex.compile(r"(?:\s*[}\]])+(?=\s*[^\s}\]])")
_COLON = regex.compile(r"\s*:\s*(?=\S)")
_OBJECT = regex.compile(r"(?=\{)")
_ARGUMENTS = ("arguments", "parameters")


def read_calls(parser: AnswerParser) -> Reader[None]:
    """Read JSON objects, each a call, after the opening tag and the first brace."""
    while (yield from _read_call(parser)):
        pass


def _read_call(parser: AnswerParser) -> Reader[bool]:
    """Read the rest of a call; returns True if another call follows."""
    fields: dict[str, Any] = {}
    is_called = False
    while not (match := (yield from parser.match(_END if is_called else _LAST))):
        if is_called and not (yield from parser.match(_NEXT)):
            # A client may already act on this call, so it stays a call, whatever follows.
            yield from parser.match(_BRACES)
            return False
        if fields and not is_called:
            yield from parser.expect(_NEXT)
        key = yield from _read_json(parser)
        yield from parser.expect(_COLON)
        name = fields.get("name")
        can_begin = not is_called and isinstance(name, str) and key in _ARGUMENTS
        if can_begin and (yield from parser.match(_OBJECT)):
            parser.begin_call(str(name))
            yield from read_value(parser, parser.emit_arguments)
            parser.end_call()
            is_called = True
        else:
            fields[key] = yield from _read_json(parser)
    if not is_called:
        _call_late(parser, fields)
        match = yield from parser.match(_END)
    return bool(match and match["more"])


def _read_json(parser: AnswerParser) -> Reader[Any]:
    read: list[str] = []
    yield from read_value(parser, read.append)
    return loaded("".join(read))


def _call_late(parser: AnswerParser, fields: dict[str, Any]) -> None:
    """Emit a call if its name came last, or its arguments are no plain object."""
    name = fields.get("name")
    given = next((fields[key] for key in _ARGUMENTS if key in fields), None)
    if isinstance(given, str):
        given = loaded(given) if given.strip() else None
    if not isinstance(given, dict | None) or not isinstance(name, str):
        raise BrokenCall
    parser.begin_call(name)
    parser.emit_arguments(json.dumps(given or {}))
    parser.end_call()
