"""The rows of the table of routes, and the record of a request, which each layer adds to."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Scope

from mlx_mtp.server.http.errors import error_body

if TYPE_CHECKING:
    from mlx_mtp.server.generation.generation import Generation

_RECORD = "mlx_mtp.record"
_API = re.compile(r"(/v1)?/[^/]*")  # The start of a path, which tells the APIs apart.


Handler = Callable[[Request], Awaitable[Response]]


class Route(NamedTuple):
    """A row of the table. Rows with the same path differ in methods, handler and `generates`."""

    methods: str  # GET includes HEAD.
    path: str
    handler: Handler
    generates: bool = False  # a POST needs slots of the engine
    embeds: bool = False  # the route is for models that make embeddings
    needs_key: bool = True  # on a server with API keys
    while_draining: bool = False  # answered while the server is shutting down
    when_full: bool = False  # answered when all connections are in use
    is_logged: bool = True
    error_body: Callable[[Exception], dict[str, Any]] = error_body  # the API's form of an error

    @property
    def paths(self) -> set[str]:
        """The path with and without a trailing slash: some clients lose the body in a redirect."""
        return {self.path, self.path.rstrip("/") + "/"}


NO_ROUTE = Route("", "other", cast(Any, None))
"""The row for all paths without a route; its path is their label in the metrics."""


def route_finder(routes: Iterable[Route]) -> Callable[[str], Route]:
    """Returns a function that finds the first row for a path, with or without a trailing slash.

    For a path without a row it returns `NO_ROUTE`, with the error body of the API whose paths have
    the same beginning.
    """
    fixed: dict[str, Route] = {}
    patterns: list[tuple[re.Pattern[str], Route]] = []
    unknown: dict[str, Route] = {}
    for route in routes:
        for path in route.paths:
            if "{" in path:
                patterns.append((compile_path(path)[0], route))
            else:
                fixed.setdefault(path, route)
        if start := _API.match(route.path):
            unknown.setdefault(start[0], NO_ROUTE._replace(error_body=route.error_body))

    def find(path: str) -> Route:
        if (route := fixed.get(path)) is not None:
            return route
        for pattern, route in patterns:
            if pattern.match(path):
                return route
        start = _API.match(path)
        return unknown.get(start[0], NO_ROUTE) if start else NO_ROUTE

    return find


class Ignored(list[str]):
    """The body's ignored parameters, and what the validation must know about the model."""

    sees = False  # the model takes images


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, from its head to the end of its response."""

    route: Route = NO_ROUTE
    began: float = field(default_factory=time.perf_counter)
    id: str = field(default_factory=lambda: f"req-{os.urandom(12).hex()}")  # later the answer's id
    key: str = ""  # hex SHA-256 of the request's API key; empty on a server without keys
    num_slots: int = 0  # reserved in the engine and its queue
    body_bytes: int = 0  # of text to read: the body, and a stored response that it continues
    num_bytes: int = 0  # of the body and the unread answer, as `HeldBytes` counts them
    ignored: Ignored = field(default_factory=Ignored)
    generation: Generation | None = None
    status: int = 0  # of the response, once there is one
    reason: str | None = None  # why the request failed


def record_of(scope: Scope) -> RequestRecord:
    """Returns the record of the request with this ASGI scope; the first call makes it."""
    record: RequestRecord | None = scope.get(_RECORD)
    if record is None:
        record = scope[_RECORD] = RequestRecord()
    return record


def client_of(scope: Scope, user: str | None = None) -> tuple[str, str]:
    """Returns a request's client: (key and address, digest of the body's `user` or the user agent).

    A client can choose the second name freely, but not the first. Waiting clients take turns by the
    first name, and those with the same first name by the second (`engine.fair_queue`). So agents on
    one machine are told apart, and inventing names gains nothing.
    """
    name = user or Headers(scope=scope).get("user-agent", "")
    digest = hashlib.sha256(name.encode()).hexdigest()[:16] if name else ""
    return known_client(scope), f"user {digest}" if user else digest


def known_client(scope: Scope) -> str:
    """Returns the part of a request's client that the client can't choose: key and address."""
    address = scope["client"][0] if scope.get("client") else ""
    return f"{record_of(scope).key[:16]}@{address}"
