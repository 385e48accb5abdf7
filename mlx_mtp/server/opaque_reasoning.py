"""Reasoning in a form that clients keep and send back without looking into it.

OpenAI and Anthropic encrypt it there, for it is theirs. Here it is the user's own: it is only made
unreadable enough that no client takes it for text.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "mlx-mtp:"


def wrap(text: str) -> str:
    """The reasoning in this form."""
    return _MARK + base64.b64encode(text.encode()).decode()


def unwrap(text: str) -> str:
    """The reasoning again; "" for text that `wrap` has not made."""
    if not text.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(text[len(_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
