"""JSON as it arrives: what is emitted always is the beginning of a valid JSON text."""

import json
from collections.abc import Callable
from typing import Any

import regex
from pydantic_core import from_json

from mlx_mtp.bounded_json import MAX_LEVELS, check_value
from mlx_mtp.text.parsing.answer import AnswerOver, AnswerParser, BrokenCall, PlainParser, Reader

Emit = Callable[[str], object]

_SPACE = r"[ \t\r\n]*"
_SCALAR = r"true|false|null|-?(?:0|[1-9][0-9]{0,400})(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,9})?"
# Lone surrogates, such as \ud800, can't be passed on.
_ESCAPE = (
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_BLANK = regex.compile(_SPACE)
_VALUE = regex.compile(rf'{_SPACE}(?:["{{[]|(?P<scalar>{_SCALAR})(?=[\s,}}\]]))')
# "<" by itself: it may begin a tag, which ends the text.
_IN_STRING = regex.compile(rf'(?:[^"\\<\x00-\x1f]|{_ESCAPE})+|<|(?P<control>[\x00-\x1f])|"')
_KEY = regex.compile(rf'{_SPACE}"')
_COLON = regex.compile(rf"{_SPACE}:")
_CLOSING = {bracket: regex.compile(f"{_SPACE}\\{bracket}") for bracket in "]}"}
_COMMA = regex.compile(f"{_SPACE},")


def loads(text: str) -> Any:
    """The value of a JSON text, if it can be passed on as JSON again.

    ValueError: it is no JSON, or has infinite numbers, lone surrogates or too many levels.
    """
    value = from_json(text, allow_inf_nan=False)
    json.dumps(value, allow_nan=False)  # A number as large as 1e999 has been read as infinite.
    check_value(value)
    return value


def loaded(text: str) -> Any:
    """As `loads`, but a text that can't be read breaks the call."""
    try:
        return loads(text)
    except ValueError:
        raise BrokenCall from None


def read_value(parser: AnswerParser, emit: Emit, depth: int = 0) -> Reader[None]:
    """Read a value and `emit` it in pieces; a text that is no JSON breaks the call."""
    match = yield from _read_token(parser, emit, _VALUE)
    if match["scalar"]:
        return
    opening = match[0][-1]
    if opening == '"':
        return (yield from _read_string(parser, emit))
    if depth == MAX_LEVELS:  # Arguments may come back in a chat.
        raise BrokenCall
    closing = _CLOSING["}" if opening == "{" else "]"]
    comma = None
    while not (yield from _read_token(parser, emit, closing, optional=True)):
        if comma:
            yield from _read_token(parser, emit, comma)
        comma = _COMMA
        if opening == "{":
            yield from _read_token(parser, emit, _KEY)
            yield from _read_string(parser, emit)
            yield from _read_token(parser, emit, _COLON)
        yield from read_value(parser, emit, depth + 1)


def _read_string(parser: AnswerParser, emit: Emit) -> Reader[None]:
    """Read the rest of a string, in which control characters are escaped."""
    while (yield from _read_token(parser, emit, _IN_STRING))[0] != '"':
        pass


def _read_token(
    parser: AnswerParser, emit: Emit, pattern: Any, *, optional: bool = False
) -> Reader[Any]:
    """Read and emit a JSON token, in part only if the answer ends within it."""
    try:
        match = yield from parser.match(pattern)
    except AnswerOver:
        emit(parser.rest)
        raise
    if match:
        if match.lastgroup == "scalar":
            loaded(match["scalar"])
        emit(json.dumps(match[0])[1:-1] if match.lastgroup == "control" else match[0])
    elif not optional:
        space = _BLANK.match(parser.text, parser.pos)
        parser.pos = space.end()
        emit(space[0])
        raise BrokenCall
    return match


def begun_value(text: str) -> str | None:
    """The text as the beginning of a JSON value; None if no JSON value begins so."""
    read: list[str] = []
    parser = PlainParser()
    parser.text, parser.over = text, True
    try:
        next(read_value(parser, read.append), None)
    except AnswerOver:
        return "".join(read)
    except BrokenCall:
        return None
    return None if parser.rest else "".join(read)
