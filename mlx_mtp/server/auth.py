"""--api-key: before every route but /health and /, unknown routes included."""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_mtp.errors import AuthenticationError, UsageError
from mlx_mtp.flags import key_fault
from mlx_mtp.server.http_errors import error_response

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/health/"})
"""Agents ask / whether anybody is there, and load balancers ask /health; neither tells more."""


def read_keys(key: str | None, file: str | None) -> tuple[str, ...]:
    """The keys that open the server: of --api-key and of --api-key-file.

    Args:
        key: a key; None without one.
        file: one key per line; empty lines and those that begin with # are left out.

    Raises:
        UsageError: the file can't be read, has no key, or has one that no client could send.
    """
    keys = [] if key is None else [key]
    if file is not None:
        keys += _keys_in(Path(file).expanduser())
    return tuple(dict.fromkeys(keys))


def _keys_in(path: Path) -> list[str]:
    try:
        text = path.read_text("utf-8")
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"--api-key-file {path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"--api-key-file {path} is not valid UTF-8.") from None
    if mode & stat.S_IROTH:
        logger.warning("Every user of this machine can read %s; chmod 600 it.", path)
    keys = []
    for number, line in enumerate(text.split("\n"), start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        fault = key_fault(key)
        if fault is not None:
            raise UsageError(f"--api-key-file {path}: the key in line {number} {fault}.")
        keys.append(key)
    if not keys:
        raise UsageError(f"--api-key-file {path} has no key: write one per line.")
    return keys


class ApiKeyMiddleware:
    """Pure ASGI, so that disconnects and streams pass through it untouched.

    Args:
        app: what is protected.
        api_keys: each of them opens it.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        # Digests are of one length, so a comparison tells nothing of the keys' lengths either.
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the call through, or answer 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError(
            "This server requires its API key, as the header `Authorization: Bearer KEY` or "
            "`x-api-key: KEY`."
        )
        response = error_response(error, scope["path"], {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""]
        allowed = False
        # Each with each and to the end: the time must not tell which key came close.
        for key in given:
            digest = _digest(key.strip().encode("latin-1"))
            for known in self._digests:
                allowed |= hmac.compare_digest(digest, known)
        return allowed


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
