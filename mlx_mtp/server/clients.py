"""Whose a request is, as far as a local server can tell.

The first name is one that a client can't choose freely: its API key and its address. The second is
what it says of itself: the request's `user` (Anthropic's `metadata.user_id`), else the User-Agent.
Waiting clients take turns by the first name, and only within it by the second (see
`engine.fair_queue`), so agents on one machine are told apart, and inventing names gains nothing.
"""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers
from starlette.types import Scope

Client = tuple[str, str]


def client_of(scope: Scope) -> Client:
    """(key and address, agent) of an HTTP request."""
    headers = Headers(scope=scope)
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    address = scope["client"][0] if scope.get("client") else ""
    return f"{_mark(key)}@{address}", _mark(headers.get("user-agent", ""))


def named(client: Client, user: str | None) -> Client:
    """The same under the name that the request's body gives."""
    return (client[0], f"user {_mark(user)}") if user else client


def _mark(text: str) -> str:
    """Short, whatever the text, and it doesn't tell it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
