"""Patterns and formats of JSON schemas as regular expressions of llguidance's Lark."""

from __future__ import annotations

import re
from collections.abc import Mapping

_DAY = r"(0[1-9]|1[0-9]|2[0-8])"
_LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    rf"([0-9]{{4}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    rf"|{_LEAP}-02-29)"
)
_HOUR = r"([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR}:[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9_+-]+"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "email": rf"{_ATOM}(\.{_ATOM})*@({_LABEL}\.){{1,3}}[A-Za-z]{{2,63}}",
}
"""Formats that can be enforced. Dates and times are RFC 3339's; of host names and e-mail addresses
the common ones are allowed, not all."""

_ANY = "(?s:.*)"
_TOKEN = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)|.", re.DOTALL)
# Classes of ASCII alone, as JavaScript has them.
_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\/": r"\/",
}
_KEPT = frozenset([r"\n", r"\r", r"\t", r"\f", r"\v", r"\s", r"\S"])


def pattern_regex(pattern: str) -> str | None:
    """A schema's `pattern` as an expression that all of a text has to match.

    Args:
        pattern: in JavaScript's syntax; it may match anywhere in a text.

    Returns:
        The expression, without its slashes; None: this needs what no grammar has (assertions within
        the pattern, look-around, references).
    """
    branches = _branches(pattern)
    if branches is None:
        return None
    whole = []
    for branch in branches:
        start = "" if branch[:1] == ["^"] else _ANY
        end = "" if branch[-1:] == ["$"] else _ANY
        inner = branch[1 if not start else 0 : len(branch) - (1 if not end else 0)]
        if "^" in inner or "$" in inner:
            return None
        whole.append(f"{start}({''.join(inner)}){end}")
    return "|".join(whole)


def _branches(pattern: str) -> list[list[str]] | None:
    """The tokens of each alternative; what is within a class is one token."""
    branches: list[list[str]] = [[]]
    level, position = 0, 0
    while position < len(pattern):
        if pattern[position] == "[":
            read = _class(pattern, position)
            if read is None:
                return None
            token, position = read
            branches[-1].append(token)
            continue
        if pattern.startswith("(?", position) and not pattern.startswith("(?:", position):
            return None
        found = _TOKEN.match(pattern, position)
        assert found is not None, "any character is a token"
        translated, position = _translated(found[0]), found.end()
        if translated is None:
            return None
        token = translated
        level += (token == "(") - (token == ")")
        if token == "|" and level == 0:
            branches.append([])
        else:
            branches[-1].append(token)
    return branches


def _class(pattern: str, start: int) -> tuple[str, int] | None:
    """A class of characters, and where it ends."""
    token, position = "[", start + 1
    if pattern.startswith("^", position):
        token, position = "[^", position + 1
    first = position
    while position < len(pattern):
        found = _TOKEN.match(pattern, position)
        assert found is not None, "any character is a token"
        position = found.end()
        if found[0] == "]":
            # An empty class matches nothing in JavaScript, and is an error elsewhere.
            return (token + "]", position) if position > first + 1 else None
        part = r"\x08" if found[0] == r"\b" else _translated(found[0])
        if part is None:
            return None
        # These mean more in a class of the other syntax than they do in JavaScript's.
        token += "\\" + part if part in ("[", "&", "~", "^") else part
    return None


def _translated(token: str) -> str | None:
    """A character or an escape in the other syntax."""
    if token in ("/", "\n", "\r"):
        return {"/": r"\/", "\n": r"\n", "\r": r"\r"}[token]
    if not token.startswith("\\"):
        return token
    if token == "\\":
        return None  # It ends the pattern, with nothing to escape.
    if token in _CLASSES:
        return _CLASSES[token]
    if token in _KEPT or (token[1] == "x" and len(token) == 4):
        return token
    if token[1] == "u" and len(token) == 6:
        return f"\\x{{{token[2:]}}}"
    # A letter or a digit stands for a reference, an assertion or a property.
    return token if len(token) == 2 and not token[1].isalnum() and token.isascii() else None
