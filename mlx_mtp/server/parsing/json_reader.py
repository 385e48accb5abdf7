"""JSON read one character at a time and told as it comes: what is told always begins valid JSON.

A client may parse a call's arguments while they come; it must never see what no end could mend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from mlx_mtp.server.parsing import strict_json
from mlx_mtp.server.parsing.reading import Step, broken

Tell = Callable[[str], None]
Told = Generator[None, str, None]

_MAX_SCALAR = 400
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")


def read_value(first: str, tell: Tell, depth: int = 0) -> Step:
    """Any value; returns the character after it if it had to be read, else "".

    Args:
        first: its first character, which is read already.
        tell: gets the value in pieces, joined a valid JSON text.
        depth: of the objects and lists around it.

    Raises:
        BrokenCall: it is no JSON; what has been told begins some all the same.
    """
    if first == '"':
        yield from read_string(tell)
    elif first == "{":
        yield from read_object(tell, depth)
    elif first == "[":
        yield from _read_list(tell, depth)
    else:
        return (yield from _read_scalar(first, tell))
    return ""


def read_object(tell: Tell, depth: int = 0) -> Told:
    """An object, whose brace is read already."""
    _check_depth(depth)
    tell("{")
    character = yield from _space(tell)
    while character != "}":
        if character != '"':
            broken()
        yield from read_string(tell)
        if (yield from _space(tell)) != ":":
            broken()
        tell(":")
        character = yield from read_value((yield from _space(tell)), tell, depth + 1)
        character = yield from _after_value(character, "}", tell)
    tell("}")


def _read_list(tell: Tell, depth: int) -> Told:
    _check_depth(depth)
    tell("[")
    character = yield from _space(tell)
    while character != "]":
        character = yield from read_value(character, tell, depth + 1)
        character = yield from _after_value(character, "]", tell)
    tell("]")


def _after_value(read: str, end: str, tell: Tell) -> Step:
    """What follows a value: the end of what is around it, or the next one's first character."""
    character = yield from _space(tell, unless=read)
    if character == end:
        return end
    if character != ",":
        broken()
    tell(",")
    character = yield from _space(tell)
    return character if character != end else broken()


def read_string(tell: Tell) -> Told:
    """A string, whose quote is read already; line breaks and the like in it are escaped."""
    tell('"')
    while (character := (yield)) != '"':
        if character == "\\":
            yield from _read_escape(tell)
        else:
            tell(json.dumps(character)[1:-1] if character < " " else character)
    tell('"')


def _read_escape(tell: Tell) -> Told:
    escape = "\\" + (yield)
    if escape[1] == "u":
        escape = yield from _read_unit(escape)
        if _HIGH.fullmatch(escape):
            low = yield from _read_unit((yield) + (yield))
            if not _LOW.fullmatch(low):
                broken()
            escape += low
        elif _LOW.fullmatch(escape):
            broken()
    elif escape[1] not in '"\\/bfnrt':
        broken()
    tell(escape)


def _read_unit(start: str) -> Step:
    """The four digits after a backslash and a u."""
    if start != "\\u":
        broken()
    digits = ""
    for _ in range(4):
        digits += yield
    if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
        broken()
    return start + digits


def _read_scalar(first: str, tell: Tell) -> Step:
    """A number, true, false or null; returns the character after it."""
    text = first
    while (character := (yield)) not in ",}]" and not character.isspace():
        text += character
        if len(text) > _MAX_SCALAR:
            broken()
    try:
        value = strict_json.loads(text)
    except ValueError:
        broken()
    if not isinstance(value, int | float | None):
        broken()
    tell(text)
    return character


def _space(tell: Tell, unless: str = "") -> Step:
    """Skip white space, all of which is told; returns the first character after it."""
    character = unless or (yield)
    while character in " \t\r\n":
        tell(character)
        character = yield
    return character


def _check_depth(depth: int) -> None:
    if depth >= strict_json.MAX_DEPTH:
        broken()
