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
    address = scope["client"][0] if scope.get("client") else ""
    agent = Headers(scope=scope).get("user-agent", "")
    return f"{key_of(scope)}@{address}", _mark(agent)


def key_of(scope: Scope) -> str:
    """A mark of the API key that came with an HTTP request; empty without one."""
    headers = Headers(scope=scope)
    _, _, token = headers.get("authorization", "").partition(" ")
    return _mark((headers.get("x-api-key") or token).strip())


def named(client: Client, user: str | None) -> Client:
    """The same under the name that the request's body gives."""
    return (client[0], f"user {_mark(user)}") if user else client


def _mark(text: str) -> str:
    """Short, whatever the text, and it doesn't tell it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
