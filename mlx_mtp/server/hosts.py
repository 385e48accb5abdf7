"""Which host names clients may call the server by, and which web pages may call it.

A server on 127.0.0.1 is reached by every program of the machine, also by its browser, which runs
whatever a web page brings. Two checks keep such pages out. The Origin header names the page that
sent a request; only pages of the server's own address and those of --cors-origin are served. A page
can make itself "of the server's own address" by letting its own name point to 127.0.0.1 (DNS
rebinding), so the name in the Host header must be one that the server knows.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from mlx_mtp.errors import ForbiddenError
from mlx_mtp.server.text import cut

ANY = "*"
_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def is_loopback(host: str) -> bool:
    """Whether only this machine's programs reach the address."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def known_names(host: str, more: Iterable[str]) -> frozenset[str]:
    """The names that the Host header may have: --host, this machine's own name if other machines
    reach that address, and `more` (--allowed-host)."""
    names = {"localhost", host.lower(), *more}
    if not is_loopback(host):
        full = socket.gethostname().lower()
        short = full.partition(".")[0]
        names |= {full, short, f"{short}.local"}
    return frozenset(names - {""})


def host_check(names: frozenset[str]) -> Callable[[Scope], None]:
    """A check that raises ForbiddenError where the Host header names another server.

    Addresses always pass: a browser sends one only if the page itself came from there. So do
    requests without the header, which HTTP/1.0 has; every browser sends it. The status is not 421
    (misdirected request), on which browsers try again by themselves.
    """

    def check(scope: Scope) -> None:
        host = Headers(scope=scope).get("host")
        if host is None or ANY in names:
            return
        name, _ = _host_and_port(host, 0) or ("", 0)
        if not name or (name not in names and _address(name) is None):
            raise ForbiddenError(
                f"This server does not answer to the name {cut(host)!r}. If it is yours, start "
                f"the server with --allowed-host {cut(name or 'NAME')}."
            )

    return check


def origin_check(origins: Iterable[str]) -> Callable[[Scope], None]:
    """A check that raises ForbiddenError for web pages that are neither ours nor in `origins`.

    Requests without an Origin are those of programs (SDKs, curl). A page's is compared by host and
    port alone: behind a proxy that speaks TLS the server does not know its own scheme.
    """
    allowed = frozenset(origins)

    def check(scope: Scope) -> None:
        headers = Headers(scope=scope)
        given = headers.getlist("origin")
        if not given or ANY in allowed:
            return
        origin = given[0].lower()
        if len(given) == 1 and (origin in allowed or _is_same(origin, headers.get("host"))):
            return
        shown = cut(given[0])
        raise ForbiddenError(
            f"Web pages of the origin {shown!r} may not call this server. If they should, "
            f"start it with --cors-origin {shown if '://' in shown else 'ORIGIN'}."
        )

    return check


def cors(app: ASGIApp, origins: Iterable[str]) -> CORSMiddleware:
    """Tell browsers that the pages of these origins may read the responses."""
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "HEAD", "POST", "DELETE"],
        allow_headers=["*"],  # SDKs in browsers send a dozen of their own.
        expose_headers=["Retry-After"],
    )


def _is_same(origin: str, host: str | None) -> bool:
    scheme, _, rest = origin.partition("://")
    default = _DEFAULT_PORTS.get(scheme)
    if host is None or default is None:
        return False
    own = _host_and_port(host, default)
    return own is not None and own == _host_and_port(rest, default)


def _host_and_port(host: str, default: int) -> tuple[str, int] | None:
    """A Host header's two parts; None if it is not valid."""
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
