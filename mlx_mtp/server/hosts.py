"""By which names clients may call the server, and which web pages may.

A server on 127.0.0.1 is reached by every program of the machine, its browser among them, and the
browser runs whatever a web page brings. Two checks keep such pages out. The Origin header names
the page that sent a request; only pages of the server's own address and those of --cors-origin are
served. A page can make itself "of the server's own address" by letting its own name point to
127.0.0.1 (DNS rebinding), so the name in the Host header must be one that the server knows.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_mtp.errors import ForbiddenError
from mlx_mtp.server.http_errors import error_response
from mlx_mtp.server.text import cut

ANY = "*"
_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def is_loopback(host: str) -> bool:
    """Only this machine's programs reach the address."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def known_names(host: str, more: Iterable[str]) -> frozenset[str]:
    """The names that the Host header may have.

    Args:
        host: the address that is listened on. If other machines reach it, this machine's own name
            is among the known ones.
        more: --allowed-host.
    """
    names = {"localhost", host.lower(), *more}
    if not is_loopback(host):
        full = socket.gethostname().lower()
        short = full.partition(".")[0]
        names |= {full, short, f"{short}.local"}
    return frozenset(names - {""})


class HostMiddleware:
    """Answers 403 to requests for a name that is not this server's.

    Addresses always pass: a browser sends one only if the page itself was got from there. So do
    requests without the header, which HTTP/1.0 has; every browser sends it.

    Not 421 (misdirected request): on it browsers try again by themselves.

    Args:
        app: what is protected.
        names: see `known_names`.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the call through, or refuse it."""
        if scope["type"] == "http" and ANY not in self._names:
            host = Headers(scope=scope).get("host")
            name = None if host is None else _host_name(host)
            if host is not None and not (name and self._is_known(name)):
                error = ForbiddenError(
                    f"This server does not answer to the name {cut(host)!r}. If it is yours, start "
                    f"the server with --allowed-host {cut(name or 'NAME')}."
                )
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, name: str) -> bool:
        return name in self._names or _address(name) is not None


class OriginMiddleware:
    """Answers 403 to web pages from elsewhere, whatever they ask for.

    Requests without an Origin are those of programs (SDKs, curl). A page's is compared by host and
    port alone: behind a proxy that speaks TLS the server does not know its own scheme.

    Args:
        app: what is protected.
        origins: --cors-origin.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the call through, or refuse it."""
        if scope["type"] == "http" and not self._is_allowed(Headers(scope=scope)):
            given = Headers(scope=scope)["origin"]
            error = ForbiddenError(
                f"Web pages of the origin {cut(given)!r} may not call this server. If they should, "
                f"start it with --cors-origin {cut(given) if '://' in given else 'ORIGIN'}."
            )
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        given = headers.getlist("origin")
        if not given or ANY in self._origins:
            return True
        if len(given) > 1:
            return False
        origin = given[0].lower()
        return origin in self._origins or _is_same(origin, headers.get("host"))


def cors(app: ASGIApp, origins: Iterable[str]) -> CORSMiddleware:
    """Tell browsers that the pages of these origins may read the answers."""
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "HEAD", "POST", "DELETE"],
        # SDKs in browsers send a dozen of their own.
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )


def _is_same(origin: str, host: str | None) -> bool:
    scheme, _, rest = origin.partition("://")
    default = _DEFAULT_PORTS.get(scheme)
    if host is None or default is None:
        return False
    mine = _host_and_port(host, default)
    return mine is not None and mine == _host_and_port(rest, default)


def _host_name(host: str) -> str | None:
    parts = _host_and_port(host, 0)
    return None if parts is None else parts[0]


def _host_and_port(host: str, default: int) -> tuple[str, int] | None:
    """A Host header's two parts; None if it is none."""
    parts = _HOST.fullmatch(host.lower())
    if parts is None:
        return None
    name, port = parts.groups()
    return name.strip("[]").rstrip("."), default if port is None else int(port)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
