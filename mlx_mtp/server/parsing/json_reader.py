"""JSON read one character at a time and told as it comes: what is told always begins valid JSON.

A client may parse a call's arguments while they come; it must never see what no end could mend.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Generator

from mlx_mtp.server.parsing import strict_json
from mlx_mtp.server.parsing.reading import AnswerOver, BrokenCall, Step, broken

Tell = Callable[[str], None]
Told = Generator[None, str, None]

_MAX_SCALAR = 400
_NUMBER_BEGUN = re.compile(
    r"-?|-?(?:0|[1-9][0-9]*)(?:\.|(?:\.[0-9]+)?[eE][+-]?|(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
)
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
    """What follows a backslash; half of a character is not told unless the answer ends there."""
    read = ["\\"]
    try:
        read.append((yield))
        if read[1] == "u":
            yield from _read_digits(read)
            unit = "".join(read)
            if _LOW.fullmatch(unit):
                broken()
            if _HIGH.fullmatch(unit):
                for expected in "\\u":
                    read.append((yield))
                    if read[-1] != expected:
                        broken()
                yield from _read_digits(read)
                if not _LOW.fullmatch("".join(read[6:])):
                    broken()
        elif read[1] not in '"\\/bfnrt':
            broken()
    except AnswerOver:
        tell("".join(read))
        raise
    tell("".join(read))


def _read_digits(read: list[str]) -> Told:
    for _ in range(4):
        read.append((yield))
        if read[-1] not in string.hexdigits:
            broken()


def _read_scalar(first: str, tell: Tell) -> Step:
    """A number, true, false or null; returns the character after it."""
    text = first
    _check_begun(text)
    try:
        while (character := (yield)) not in ",}]" and not character.isspace():
            text += character
            _check_begun(text)
    except AnswerOver:
        tell(text)
        raise
    try:
        value = strict_json.loads(text)
    except ValueError:
        broken()
    if not isinstance(value, int | float | None):
        broken()
    tell(text)
    return character


def _check_begun(text: str) -> None:
    """What is told where the answer ends must begin valid JSON too."""
    words = ("true", "false", "null")
    if len(text) > _MAX_SCALAR or not (
        _NUMBER_BEGUN.fullmatch(text) or any(word.startswith(text) for word in words)
    ):
        broken()


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


def begun_value(text: str) -> str | None:
    """The JSON value that a text is the beginning of, as far as it goes; None: it begins none."""
    told: list[str] = []
    reader = read_value(text[:1], told.append)
    unread = len(text) - 1
    try:
        next(reader)
        for character in text[1:]:
            unread -= 1
            reader.send(character)
        reader.throw(AnswerOver())
    except AnswerOver:
        return "".join(told)
    except StopIteration:
        return None if unread else "".join(told)  # It is all of a value.
    except BrokenCall:
        return None
    raise AssertionError("a reader that is told of the end ends")
