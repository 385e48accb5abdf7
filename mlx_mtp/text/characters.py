"""Clients' text: lone surrogates, what an error quotes of it, and reasoning in an opaque form."""

import base64
import binascii
import json
import re

MAX_ECHO = 120  # characters of a client's text that an error quotes
_MARK = "mlx-mtp:"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def cut(text: str, limit: int = MAX_ECHO) -> str:
    """The text, shortened to `limit` characters and "..." if it is longer."""
    return text if len(text) <= limit else text[:limit] + "..."


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


def wrap(text: str) -> str:
    """Encode reasoning as a token that clients keep and send back, and don't take for text."""
    return _MARK + base64.b64encode(text.encode()).decode()


def unwrap(text: str) -> str:
    """Decode what `wrap` returned; "" for any other text."""
    if not text.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(text[len(_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
