"""Small readers that the formats are made of: generators that take one character at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NoReturn

CALL_END = "</tool_call>"
MAX_NAME = 256

Reader = Generator[None, str, str]
"""Reads a call; returns the characters that it read and that belong to what follows."""
Step = Generator[None, str, str]
"""Reads a part of a call; returns a text."""


class BrokenCall(Exception):  # noqa: N818 - not an error: the text is content after all
    """What looked like a call is none; the character that showed it is read again as content."""


class AnswerOver(Exception):  # noqa: N818 - not an error: thrown into a reader where it waits
    """The answer ended within a call; what was read and not told is told now."""


def broken() -> NoReturn:
    """Say that this is no call."""
    raise BrokenCall


def space(unless: str = "") -> Step:
    """Skip white space; returns the first character after it."""
    character = unless or (yield)
    while character.isspace():
        character = yield
    return character


def one_of(first: str, *words: str) -> Step:
    """Read one of some words, none of which begins another; `first` is read already."""
    read = first
    while read not in words:
        if not any(word.startswith(read) for word in words):
            broken()
        read += yield
    return read


def until(end: str, cut: Callable[[str], None] | None = None) -> Step:
    """Read a name, up to the character that ends it, which is left out.

    Args:
        end: the character.
        cut: gets what there is of the name where the answer ends in it.
    """
    name = ""
    try:
        while (character := (yield)) != end:
            if character in "\r\n<" or len(name) >= MAX_NAME:
                broken()
            name += character
    except AnswerOver:
        if cut is not None:
            cut(name)
        raise
    return name.strip()


def closing(read: str = "", skip: str = "") -> Step:
    """Read the tag that ends a call if it is there; returns what was read if it is not.

    Args:
        read: what was read of it already.
        skip: characters that may come before it, beside white space.
    """
    read = read or (yield)
    while True:
        rest = read.lstrip(skip + " \t\r\n")
        if rest == CALL_END:
            return ""
        if not CALL_END.startswith(rest):
            return read
        read += yield
