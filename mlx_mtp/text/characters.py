"""Clients' text: what an error quotes of it, and reasoning in an opaque form."""

import base64
import binascii

MAX_ECHO = 120  # characters of a client's text that an error quotes
_MARK = "mlx-mtp:"


def cut(text: str, limit: int = MAX_ECHO) -> str:
    """The text, shortened to `limit` characters and "..." if it is longer."""
    return text if len(text) <= limit else text[:limit] + "..."


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
