"""Stands before all routes: refuses what can't be served now, and bounds how long a body may take.

Pure ASGI, so that disconnects and streams pass through it untouched.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_mtp.errors import BodyTimeoutError, MlxMtpError
from mlx_mtp.server.clients import Client, client_of
from mlx_mtp.server.gate import Gate, Ticket
from mlx_mtp.server.http_errors import error_response
from mlx_mtp.server.routes import generates
from mlx_mtp.server.within import within

_ALWAYS_OPEN = frozenset({"/health", "/metrics"})
"""Who watches the server may ask while it ends."""
_VISIT = "mlx_mtp.visit"


class Visit:
    """What an HTTP request holds.

    Args:
        client: whose it is.
        ticket: its places among the sequences.
    """

    def __init__(self, client: Client, ticket: Ticket) -> None:
        self.client = client
        self.ticket = ticket


def visit_of(scope: Scope) -> Visit:
    """The visit that the guard noted."""
    visit = scope[_VISIT]
    assert isinstance(visit, Visit)
    return visit


class Guard:
    """The middleware.

    Args:
        app: what it stands before.
        gate: says whether a request may come in.
        body_seconds: most time that a body may take to come.
    """

    def __init__(self, app: ASGIApp, gate: Gate, body_seconds: float) -> None:
        self._app = app
        self._gate = gate
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the call through, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/")
        try:
            if self._gate.draining and path not in _ALWAYS_OPEN:
                raise self._gate.draining_error()
            if scope["method"] == "POST" and generates(path):
                self._gate.check()
        except MlxMtpError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        visit = Visit(client_of(scope), self._gate.enter())
        scope[_VISIT] = visit
        try:
            await self._app(scope, self._timed(receive), send)
        finally:
            visit.ticket.close()

    def _timed(self, receive: Receive) -> Receive:
        """`receive`, until the body is there; afterwards it only tells of a disconnect."""
        deadline = time.monotonic() + self._body_seconds
        complete = False

        async def timed() -> Message:
            nonlocal complete
            if complete:
                return await receive()
            late = BodyTimeoutError(
                f"The request's body did not arrive within {self._body_seconds:g} seconds."
            )
            message = await within(deadline - time.monotonic(), receive(), late)
            complete = not message.get("more_body", False)
            return message

        return timed
