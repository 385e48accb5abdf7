"""The table of routes: what a row says, and which row the path of a request belongs to."""

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from mlx_mtp.server.http.errors import error_body

_API = re.compile(r"(/v1)?/[^/]*")  # The start of a path, which tells the APIs apart.


class Route(NamedTuple):
    """A row of the table. Rows with the same path differ in methods, handler and `generates`."""

    methods: str  # GET includes HEAD.
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    generates: bool = False  # a POST takes slots of the engine
    needs_key: bool = True  # on a server with API keys
    while_draining: bool = False  # answered while the server is shutting down
    when_full: bool = False  # answered when all connections are in use
    is_logged: bool = True
    error_body: Callable[[Exception], dict[str, Any]] = error_body  # the API's form of an error

    @property
    def paths(self) -> set[str]:
        """The path with and without a slash at its end: a redirect loses some clients' bodies."""
        return {self.path, self.path.rstrip("/") + "/"}


NO_ROUTE = Route("", "other", cast(Any, None))
"""The row of all paths that have none; its path is their label in the metrics."""


def route_finder(routes: Iterable[Route]) -> Callable[[str], Route]:
    """Return a function from a path, with or without a slash at the end, to its first row.

    A path without a row gets `NO_ROUTE` with the error body of the API that it seems to be meant
    for.
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
