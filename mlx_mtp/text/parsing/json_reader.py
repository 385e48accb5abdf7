"""Reads JSON as it arrives; the emitted text is always the beginning of a valid JSON text.

Mistakes of models are repaired: quotation marks, constants and commas as in Python or JavaScript,
control characters and escapes in strings, and missing closing brackets.
"""

import json
from collections.abc import Callable
from typing import Any

import regex
from pydantic_core import from_json

from mlx_mtp.bounded_json import MAX_LEVELS, check_value
from mlx_mtp.text.parsing.answer import AnswerOver, AnswerParser, BrokenCall, PlainParser, Reader
from mlx_mtp.text.parsing.tags import CALL_END, MAX_NAME

Emit = Callable[[str], object]

_SPACE = r"[ \t\r\n]*"
_NUMBER = r"-?(?:0|[1-9][0-9]{0,400})(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,9})?"
# Lone surrogates, such as \ud800, can't be passed on.
_ESCAPE = (
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
# A backslash that begins no escape, and so is just a backslash.
_BACKSLASH = (
    r"\\(?=[^\"'\\/bfnrtu]|u(?:[0-9a-fA-F]{0,3}[^0-9a-fA-F]|[dD][c-fC-F]"
    r"|[dD][89abAB][0-9a-fA-F]{2}(?:[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])))"
)
_BLANK = regex.compile(_SPACE)
_VALUE = regex.compile(
    rf"{_SPACE}(?:[\"{{[]|(?P<single>')"
    rf"|(?:(?P<scalar>true|false|null|{_NUMBER})|(?P<python>True|False|None))(?=[\s,}}\]]))"
)
_KEY = regex.compile(
    rf"{_SPACE}(?:\"|(?P<single>')|(?P<bare>[A-Za-z_$][\w$]{{0,255}})(?={_SPACE}:))"
)
# "<" is matched alone, as it can begin a tag, which ends the text.
_ANY = rf"\x00-\x1f]|{_ESCAPE})+|<|(?P<control>[\x00-\x1f])|(?P<backslash>{_BACKSLASH})"
_IN_STRING = {
    '"': regex.compile(rf"(?:[^\"\\<{_ANY}|(?P<apostrophe>\\')|(?P<end>\")"),
    "'": regex.compile(
        rf"(?:[^'\"\\<{_ANY}|(?P<quote>\")|(?P<end>'(?={_SPACE}[,:}}\]]))"
        rf"|(?P<apostrophe>\\'|'(?={_SPACE}[^\s,:}}\]]))"
    ),
}
_COLON = regex.compile(rf"{_SPACE}:")
# A closing bracket, or its place if it is missing: before the end of an enclosing part.
_CLOSING = {
    "[": regex.compile(rf"{_SPACE}(?P<list>\]|(?=\}}|{CALL_END}))"),
    "{": regex.compile(rf"{_SPACE}(?P<object>\}}|(?={CALL_END}))"),
}
_COMMA = regex.compile(f"{_SPACE},")
# Line breaks in strings are escaped, so a tag at a line's end is not a part of a string: the
# string's closing quotation mark is missing.
_SHUT = regex.compile(
    rf"(?=</?(?:tool_call|function|parameter)(?:=[^<>\n]{{0,{MAX_NAME}}})?>[ \t]*[\r\n])"
)

_WRITTEN: dict[str, Callable[[str], str]] = {
    "control": lambda text: json.dumps(text)[1:-1],
    "backslash": lambda text: text * 2,
    "apostrophe": lambda text: text[-1],
    "quote": lambda text: "\\" + text,
    "end": lambda text: text.replace("'", '"'),
    "single": lambda text: text.replace("'", '"'),
    "bare": lambda text: json.dumps(text.strip()),
    "python": lambda text: text.replace("None", "null").lower(),
    "list": lambda text: text.rstrip("]") + "]",
    "object": lambda text: text.rstrip("}") + "}",
}


def loads(text: str) -> Any:
    """Returns the value of a JSON text, if it can be written as JSON again.

    Raises ValueError for invalid JSON, infinite numbers, lone surrogates or too many levels.
    """
    value = from_json(text, allow_inf_nan=False)
    json.dumps(value, allow_nan=False)  # A number such as 1e999 has been read as infinite.
    check_value(value)
    return value


def loaded(text: str) -> Any:
    """Like `loads`, but raises BrokenCall instead of ValueError."""
    try:
        return loads(text)
    except ValueError:
        raise BrokenCall from None


def read_value(parser: AnswerParser, emit: Emit, depth: int = 0) -> Reader[None]:
    """Read a value and `emit` it in pieces; raises BrokenCall for text that is not JSON."""
    match = yield from _read_token(parser, emit, _VALUE)
    opening = match[0][-1]
    if opening in _IN_STRING:
        yield from _read_string(parser, emit, opening)
    elif opening in _CLOSING:
        if depth == MAX_LEVELS:  # A later chat, with the same limit, can have the arguments.
            raise BrokenCall
        yield from _read_parts(parser, emit, opening, depth)


def _read_parts(parser: AnswerParser, emit: Emit, opening: str, depth: int) -> Reader[None]:
    """Read the rest of an object or a list."""
    is_first, closing = True, _CLOSING[opening]
    while not (yield from _read_token(parser, emit, closing, optional=True)):
        if not is_first:
            comma = yield from _read_token(parser, lambda _: None, _COMMA)
            if (yield from _read_token(parser, emit, closing, optional=True)):
                return
            emit(comma[0])
        is_first = False
        if opening == "{":
            key = yield from _read_token(parser, emit, _KEY)
            if key.lastgroup != "bare":
                yield from _read_string(parser, emit, key[0][-1])
            yield from _read_token(parser, emit, _COLON)
        yield from read_value(parser, emit, depth + 1)


def _read_string(parser: AnswerParser, emit: Emit, quote: str) -> Reader[None]:
    """Read the rest of a string, in which control characters are escaped."""
    pattern = _IN_STRING[quote]
    while True:
        while parser.pos == len(parser.text):
            if parser.over:
                raise AnswerOver
            yield
        if parser.text[parser.pos] == "<":
            if (yield from parser.match(_SHUT)):
                raise BrokenCall
        elif (plain := pattern.match(parser.text, parser.pos)) and plain.lastgroup is None:
            emit(plain[0])  # a fast path for the usual case
            parser.pos = plain.end()
            continue
        match = yield from _read_token(parser, emit, pattern)
        if match.lastgroup == "end":
            return


def _read_token(
    parser: AnswerParser, emit: Emit, pattern: Any, *, optional: bool = False
) -> Reader[Any]:
    """Read and emit a JSON token, in part only if the answer ends within it."""
    try:
        match = yield from parser.match(pattern)
    except AnswerOver:
        # Emit only text that is also the beginning of the token as it would be emitted.
        begun = parser.rest if pattern is not _KEY else _BLANK.match(parser.rest)[0]
        emit("" if begun.lstrip()[:1] in ("'", "T", "F", "N") else begun)
        raise
    if match:
        if match.lastgroup == "scalar":
            loaded(match["scalar"])
        written = _WRITTEN.get(match.lastgroup)
        emit(written(match[0]) if written else match[0])
    elif not optional:
        space = _BLANK.match(parser.text, parser.pos)
        parser.pos = space.end()
        emit(space[0])
        raise BrokenCall
    return match


def begun_value(text: str) -> str | None:
    """Returns the text, repaired, as the beginning of a JSON value; None if it can't be one."""
    return _value_of(text, whole=False)


def whole_value(text: str) -> str | None:
    """Returns the text, repaired, as a JSON value; None if it is not a whole one."""
    return _value_of(text, whole=True)


def _value_of(text: str, *, whole: bool) -> str | None:
    read: list[str] = []
    parser = PlainParser()
    parser.text, parser.over = text, True
    try:
        next(read_value(parser, read.append), None)
    except AnswerOver:
        return None if whole else "".join(read) or None
    except BrokenCall:
        return None
    return None if parser.rest.strip() else "".join(read)
