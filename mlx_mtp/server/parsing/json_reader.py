"""JSON as it arrives: what is emitted always begins a valid JSON text.

A client may parse a call's arguments while they come; it must never see what no end could mend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from pydantic_core import from_json

from mlx_mtp.server.parsing.answer import (
    AnswerOver,
    AnswerParser,
    BrokenCall,
    PlainParser,
    Reader,
)

MAX_DEPTH = 128
"""Most objects and lists within each other: a call's arguments may come back in a chat."""
Emit = Callable[[str], object]
Tokens = tuple[str, ...]

_MAX_TOKEN = 400
_CLOSING = {"{": "}", "[": "]"}
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
# "<" may begin a tag, which `peek` looks for.
_PLAIN = re.compile(rf'(?:[^"\\<\x00-\x1f]|{_ESCAPE.pattern})+')
_ESCAPES = (r"\n", r"\u0000", r"\ud800\udc00")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALARS = ("true", "false", "null")


def loads(text: str) -> Any:
    """The value of a JSON text that can be passed on as JSON again.

    Raises:
        ValueError: it is no JSON, or has infinite numbers, half characters or too many levels.
    """
    value = from_json(text, allow_inf_nan=False)
    json.dumps(value, allow_nan=False)  # A number as large as 1e999 has been read as infinite.
    level = [value]
    for _ in range(MAX_DEPTH):
        outer = [each for each in level if isinstance(each, dict | list)]
        level = [v for each in outer for v in (each.values() if isinstance(each, dict) else each)]
    if level:
        raise ValueError("nested too deeply")
    return value


def loaded(text: str) -> Any:
    """Like `loads`, but what can't be read breaks the call."""
    try:
        return loads(text)
    except ValueError:
        raise BrokenCall from None


def read_value(parser: AnswerParser, emit: Emit, depth: int = 0) -> Reader[None]:
    """Read any value; `emit` gets it in pieces, and `depth` counts what is around it.

    Raises:
        BrokenCall: it is no JSON; what has been emitted begins some all the same.
    """
    opening = yield from parser.peek()
    if opening == '"':
        yield from _read_string(parser, emit)
    elif opening not in _CLOSING:
        yield from _read_token(parser, emit, _SCALAR, _SCALARS, delimiters=",}]")
    elif depth == MAX_DEPTH:
        raise BrokenCall
    else:
        following = yield from _after(parser, emit)
        while following != _CLOSING[opening]:
            if opening == "{":
                if following != '"':
                    raise BrokenCall
                yield from _read_string(parser, emit)
                if (yield from _space(parser, emit)) != ":":
                    raise BrokenCall
                yield from _after(parser, emit)
            yield from read_value(parser, emit, depth + 1)
            following = yield from _space(parser, emit)
            if following == ",":
                following = yield from _after(parser, emit)
                if following == _CLOSING[opening]:
                    raise BrokenCall
            elif following != _CLOSING[opening]:
                raise BrokenCall
        _take(parser, emit)


def _take(parser: AnswerParser, emit: Emit) -> None:
    """Read and emit the next character, which has been looked at."""
    parser.pos += 1
    emit(parser.text[parser.pos - 1])


def _space(parser: AnswerParser, emit: Emit) -> Reader[str]:
    """Read white space; return the character after it, which stays unread."""
    while (character := (yield from parser.peek())) in " \t\r\n":
        _take(parser, emit)
    return character


def _after(parser: AnswerParser, emit: Emit) -> Reader[str]:
    """Read a character and the white space after it."""
    _take(parser, emit)
    return (yield from _space(parser, emit))


def _read_string(parser: AnswerParser, emit: Emit) -> Reader[None]:
    """A string; line breaks and the like in it are escaped."""
    _take(parser, emit)
    while (character := (yield from parser.peek())) != '"':
        if found := _PLAIN.match(parser.text, parser.pos):
            parser.pos = found.end()
            emit(found[0])
        elif character == "\\":
            yield from _read_token(parser, emit, _ESCAPE, _ESCAPES)
        else:
            parser.pos += 1
            emit(json.dumps(character)[1:-1])
    _take(parser, emit)


def _read_token(
    parser: AnswerParser, emit: Emit, token: re.Pattern[str], examples: Tokens, delimiters: str = ""
) -> Reader[None]:
    """An escape or a scalar; only where the answer ends is it emitted in part.

    What is begun must go on as one of the `examples`, or as a number. It ends before `delimiters`
    and white space; without any, where `token` matches.
    """
    read = ""
    try:
        while delimiters or not token.fullmatch(read):
            character = yield from parser.peek()
            if delimiters and (character in delimiters or character.isspace()):
                loaded(read)
                break
            read += character
            endings = ("", "0", *(example[len(read) :] for example in examples))
            if len(read) > _MAX_TOKEN or not any(token.fullmatch(read + end) for end in endings):
                raise BrokenCall
            parser.pos += 1
    except AnswerOver:
        emit(read)
        raise
    emit(read)


def begun_value(text: str) -> str | None:
    """The JSON value that a text is the beginning of, as far as it goes; None: it begins none."""
    read: list[str] = []
    parser = PlainParser()
    parser.text, parser.over = text, True
    try:
        for _ in read_value(parser, read.append):
            pass
    except AnswerOver:
        return "".join(read)
    except BrokenCall:
        return None
    return None if parser.rest else "".join(read)
