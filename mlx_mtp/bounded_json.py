"""Bounds of what others wrote: of JSON, as text and as a value, and of what an error quotes."""

import json
import re
from collections import Counter
from itertools import accumulate, count
from typing import Any

MAX_LEVELS = 128
"""Most objects and lists within each other in a tool's parameters, a call's arguments or a schema:
what writes them as text recurses."""
MAX_ECHO = 120  # characters of others' text that an error quotes
_STEPS = bytes.maketrans(b"[]{}", b"\2\0\2\0")  # One more than the change of the level.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def shortened(text: str, limit: int = MAX_ECHO) -> str:
    """The text, shortened to `limit` characters and "..." if it is longer."""
    return text if len(text) <= limit else text[:limit] + "..."


class JSONBoundError(ValueError):
    """JSON exceeds a bound; the message is a predicate: "is nested too deeply ..."."""


class DuplicateNameError(ValueError):
    """An object has a name twice: some programs would read the first value, others the last."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"The JSON has the name {shortened(name)!r} twice in one object.")


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, as a decoder's `object_pairs_hook`; raises DuplicateNameError."""
    value = dict(pairs)
    if len(value) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise DuplicateNameError(name)
    return value


def check_text(text: bytes, max_levels: int, max_parts: int, max_values: int) -> None:
    """Raise JSONBoundError if a JSON text has too many levels, parts or values.

    Parts are objects, lists and strings, names included. The counts are right for the text up to
    its first syntax error, and a parser reads no further.
    """
    # An escaped quote ends no string; valid JSON has backslashes in strings alone.
    plain = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    parts = plain.count(b'"') // 2
    outside = b"".join(plain.split(b'"')[::2]) if parts <= max_parts else b""
    opened = outside.count(b"[") + outside.count(b"{")
    for number, limit, what in (
        (parts + opened, max_parts, "objects, lists and strings"),
        (outside.count(b","), max_values, "values"),
    ):
        if number > limit:
            raise JSONBoundError(f"has too many {what}; at most {limit} are allowed")
    if opened > max_levels:
        # Valid JSON closes as many brackets as it opens.
        brackets = outside.translate(_STEPS, _NO_BRACKETS)[: 2 * max_parts]
        if max(accumulate(step - 1 for step in brackets)) > max_levels:
            raise JSONBoundError(f"is nested too deeply; at most {max_levels} levels are allowed")


def check_value(value: Any, max_levels: int = MAX_LEVELS, max_values: int | None = None) -> None:
    """Raise JSONBoundError if a parsed value has too many levels, or values in all of them."""
    level, num_values = [value], 0
    for depth in count():
        containers = [each for each in level if isinstance(each, dict | list)]
        if not containers:
            return
        if depth == max_levels:
            raise JSONBoundError(f"is nested more than {max_levels} levels deep")
        num_values += sum(map(len, containers))
        if max_values is not None and num_values > max_values:
            raise JSONBoundError(f"has too many values in it; at most {max_values} are allowed")
        level = [
            inner
            for each in containers
            for inner in (each.values() if isinstance(each, dict) else each)
        ]


def has_half_character(source: str, value: object) -> bool:
    r"""Whether the value of the JSON text `source` has a lone surrogate, which can't be encoded.

    Only an escape in the text, such as \ud800, can bring one.
    """
    if not _SURROGATE_ESCAPE.search(source):
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
