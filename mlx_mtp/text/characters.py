"""Clients' text: half characters in it, how much of it an error repeats, and opaque reasoning."""

import base64
import binascii
import json
import re

MAX_ECHO = 120  # most characters of a client's own text in an error's message
_MARK = "mlx-mtp:"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def cut(text: str, limit: int = MAX_ECHO) -> str:
    """The start of a text that may be of any length."""
    return text if len(text) <= limit else text[:limit] + "..."


def has_half_character(source: str, value: object) -> bool:
    r"""Whether the value of a JSON text has half of a surrogate pair, which can't be encoded.

    Only escapes in `source`, the text, can bring such a half, like \ud800.
    """
    if not _SURROGATE_ESCAPE.search(source):
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def wrap(text: str) -> str:
    """Reasoning in a form that clients keep and send back, and that none takes for text."""
    return _MARK + base64.b64encode(text.encode()).decode()


def unwrap(text: str) -> str:
    """The reasoning again; "" for text that `wrap` has not made."""
    if not text.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(text[len(_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
