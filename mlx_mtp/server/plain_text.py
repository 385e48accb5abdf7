"""Keeps what clients write text: no token that has a meaning of its own is made of it.

A mark is put into each name of such a token, and the prompt is encoded in parts, between the marks.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

# Code points that are no characters, and never will be: the first that a request has not.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_KEPT = frozenset({"role", "type"})  # fields whose values are the API's words


def marked(value: Any, names: Iterable[str]) -> tuple[Any, str | None]:
    """The same with a mark in each of the names, in objects' keys too; None: there was none."""
    pattern = _pattern(frozenset(name for name in names if len(name) > 1))
    texts = list(_texts(value))
    if not any(map(pattern.search, texts)):
        return value, None
    mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), "")

    def within(part: Any) -> Any:
        if isinstance(part, str):
            # Behind the first character of each name, also of those that overlap.
            return pattern.sub(lambda found: found[1] + mark, part)
        if isinstance(part, Mapping):
            return {
                within(key): inner if key in _KEPT else within(inner) for key, inner in part.items()
            }
        return [within(inner) for inner in part] if isinstance(part, list | tuple) else part

    return within(value), mark


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(inner)


@lru_cache(maxsize=1)
def _pattern(names: frozenset[str]) -> re.Pattern[str]:
    whole = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in sorted(names))
    return re.compile(f"({whole})" if names else r"(?!)", re.DOTALL)
