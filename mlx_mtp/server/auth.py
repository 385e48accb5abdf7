"""--api-key: required on every route but /health and /, unknown routes included."""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_mtp.errors import AuthenticationError, UsageError
from mlx_mtp.flags import key_fault

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/health/"})
"""Agents ask / whether a server is there, and load balancers /health; neither reveals more."""


def read_keys(key: str | None, file: str | None) -> tuple[str, ...]:
    """The keys of --api-key and --api-key-file: one per line, without empty lines and comments (#).

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


def key_check(api_keys: Sequence[str]) -> Callable[[Scope], None]:
    """A check that raises AuthenticationError for a request without one of these keys."""
    # All digests have one length: a comparison does not reveal the keys' lengths either.
    digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    def check(scope: Scope) -> None:
        if scope["path"] in OPEN_PATHS:
            return
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        allowed = False
        # Every given key with every valid one: the time must not reveal which came close.
        for given in (headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""):
            digest = hashlib.sha256(given.strip().encode("latin-1")).digest()
            for known in digests:
                allowed |= hmac.compare_digest(digest, known)
        if not allowed:
            raise AuthenticationError(
                "This server requires its API key, as the header `Authorization: Bearer KEY` or "
                "`x-api-key: KEY`."
            )

    return check
