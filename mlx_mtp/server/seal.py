"""Reasoning in a form that clients keep and send back without looking into it.

OpenAI and Anthropic encrypt it there, for it is theirs. Here it is the user's own: it is only made
unreadable enough that no client takes it for text.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "mlx-mtp:"


def sealed(text: str) -> str:
    """The text, sealed."""
    return _MARK + base64.b64encode(text.encode()).decode()


def unsealed(text: str) -> str:
    """The text again; "" if it is no seal of this server."""
    if not text.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(text[len(_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
