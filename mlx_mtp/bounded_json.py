"""Bounds on untrusted input: the size and depth of JSON, and the text that an error quotes."""

import json
import re
from collections import Counter
from itertools import accumulate, count
from typing import Any

MAX_LEVELS = 128
"""Maximum nesting depth of objects and lists in a tool's parameters, a call's arguments or a
schema: the code that writes them as text is recursive."""
MAX_ECHO = 120  # maximum characters of untrusted text that an error quotes
_STEPS = bytes.maketrans(b"[]{}", b"\2\0\2\0")  # 1 + the change in depth
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def shortened(text: str, limit: int = MAX_ECHO) -> str:
    """Returns the text, cut to `limit` characters and followed by "..." if it is longer."""
    return text if len(text) <= limit else text[:limit] + "..."


class JSONBoundError(ValueError):
    """JSON exceeds a bound; the message is a predicate such as "is nested too deeply ..."."""


class DuplicateNameError(ValueError):
    """A JSON object has a name twice: some programs read the first value, others the last."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"The JSON has the name {shortened(name)!r} twice in one object.")


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, as `object_pairs_hook` of `json.loads`; raises DuplicateNameError."""
    value = dict(pairs)
    if len(value) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise DuplicateNameError(name)
    return value


def check_text(text: bytes, max_levels: int, max_parts: int, max_values: int) -> None:
    """Raise JSONBoundError if a JSON text has too many levels, parts or values.

    Parts are objects, lists and strings, names included. The counts are correct up to the text's
    first syntax error, where a parser stops.
    """
    # An escaped quote doesn't end a string; valid JSON has backslashes only in strings.
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
    """Raise JSONBoundError if a parsed value has too many levels, or too many values in total."""
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
    r"""Returns True if the value of the JSON text `source` has a lone surrogate.

    A lone surrogate can't be encoded. Only an escape in the text, such as \ud800, can produce one.
    """
    if not _SURROGATE_ESCAPE.search(source):
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
