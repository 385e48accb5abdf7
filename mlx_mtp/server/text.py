"""Clients' text: half characters in it, and how much of it an error repeats."""

from __future__ import annotations

import json
import re

MAX_ECHO = 120
"""Most characters of a client's own text in an error's message."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def cut(text: str, limit: int = MAX_ECHO) -> str:
    """The start of a text that may be of any length."""
    return text if len(text) <= limit else text[:limit] + "..."


def has_half_character(source: str, value: object) -> bool:
    r"""Whether JSON had half of a surrogate pair: valid there, but nothing that can be encoded.

    Args:
        source: the JSON; only its escapes, like \ud800, can bring such a half.
        value: what it was parsed to.
    """
    if not _SURROGATE_ESCAPE.search(source):
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
