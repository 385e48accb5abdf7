"""--api-key: before every route but /health and /, unknown routes included."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_mtp.errors import AuthenticationError
from mlx_mtp.server.http_errors import error_response

_OPEN_PATHS = frozenset({"/", "/health", "/health/"})


class ApiKeyMiddleware:
    """Pure ASGI, so that disconnects and streams pass through it untouched.

    Args:
        app: what is protected.
        api_key: the one key that opens it.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the call through, or answer 401."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError(
            "This server wants its API key, as the header `Authorization: Bearer KEY` or "
            "`x-api-key: KEY`."
        )
        response = error_response(error, scope["path"], {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            given.append(token)
        # Compared as bytes and in constant time; headers are Latin-1.
        return any(hmac.compare_digest(key.strip().encode("latin-1"), self._key) for key in given)
