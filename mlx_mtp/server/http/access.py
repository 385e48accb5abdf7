"""Who may call the server: API keys, the host names it answers to, and web pages.

Any web page in a browser on this machine reaches a server on 127.0.0.1. The Origin header names the
page; one that lets its own name point to 127.0.0.1 (DNS rebinding) is found by the Host header.
"""

import hashlib
import hmac
import ipaddress
import logging
import re
import socket
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_mtp.errors import AuthenticationError, ForbiddenError, UsageError
from mlx_mtp.flags import key_fault
from mlx_mtp.text.characters import cut

logger = logging.getLogger(__name__)

_OPEN_PATHS = re.compile("/(health/?|page/.*)?")  # the page's files have nothing of the user's
ANY = "*"
_KEY = "mlx_mtp.key"
_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def read_keys(key: str | None, file: str | None) -> tuple[str, ...]:
    """The keys of --api-key and --api-key-file, or a UsageError: one a line, # begins a comment."""
    keys = [] if key is None else [key]
    if file is None:
        return tuple(keys)
    path = Path(file).expanduser()
    try:
        text = path.read_text("utf-8")
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"--api-key-file {path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"--api-key-file {path} is not valid UTF-8.") from None
    if mode & stat.S_IROTH:
        logger.warning("Every user of this machine can read %s; chmod 600 it.", path)
    found = []
    for number, line in enumerate(map(str.strip, text.split("\n")), start=1):
        if line and not line.startswith("#"):
            if (fault := key_fault(line)) is not None:
                raise UsageError(f"--api-key-file {path}: the key in line {number} {fault}.")
            found.append(line)
    if not found:
        raise UsageError(f"--api-key-file {path} has no key: write one per line.")
    return tuple(dict.fromkeys([*keys, *found]))


def warn_if_open(host: str, cors_origins: Collection[str], *, has_key: bool) -> None:
    """Log a warning if a server without a key can be used from elsewhere."""
    if not has_key and not _is_loopback(host):
        logger.warning(
            "Everyone who can reach %s on the network can use this server: it has no key. Add "
            "--api-key or --api-key-file, or leave out --host.",
            host,
        )
    if not has_key and ANY in cors_origins:
        logger.warning(
            "Every web page that a browser on this machine opens can use this server: it has no "
            "key, and --cors-origin is *. Name the origins, or add --api-key."
        )


def digest_of(key: bytes) -> bytes:
    """All digests have one length: to compare them does not reveal the keys' lengths either."""
    return hashlib.sha256(key).digest()


def check_key(digests: Collection[bytes], scope: Scope) -> None:
    """Raise AuthenticationError without one of the keys, on all but the open paths."""
    if _OPEN_PATHS.fullmatch(scope["path"]):
        return
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    # Every given key with every valid one: the time must not reveal which came close.
    for given in (headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""):
        for known in digests:
            if hmac.compare_digest(digest_of(given.strip().encode("latin-1")), known):
                scope[_KEY] = known.hex()
    if _KEY not in scope:
        header = "`Authorization: Bearer KEY` or `x-api-key: KEY`"
        raise AuthenticationError(f"This server requires its API key, as the header {header}.")


def key_of(scope: Scope) -> str:
    """A digest of the key that let a request in; empty on a server without keys."""
    # Not of the headers: what they say beside that key is the client's invention.
    return str(scope.get(_KEY, ""))


def known_names(host: str, more: Iterable[str]) -> frozenset[str]:
    """For the Host header: --host, `more`, and this machine's name if others reach that address."""
    names = {"localhost", host.lower(), *more}
    if not _is_loopback(host):
        full = socket.gethostname().lower()
        short = full.partition(".")[0]
        names |= {full, short, f"{short}.local"}
    return frozenset(names - {""})


def check_host(names: frozenset[str], scope: Scope) -> None:
    """Raise ForbiddenError where the Host header has none of these names."""
    # Every browser sends it, and an address only if the page itself came from there. On a status of
    # 421 browsers would try again.
    host = Headers(scope=scope).get("host")
    if host is None or ANY in names:
        return
    name, _ = _host_and_port(host, 0) or ("", 0)
    if not name or (name not in names and _address(name) is None):
        raise ForbiddenError(
            f"This server does not answer to the name {cut(host)!r}. If it is yours, start "
            f"the server with --allowed-host {cut(name or 'NAME')}."
        )


def check_origin(origins: Collection[str], scope: Scope) -> None:
    """Raise ForbiddenError for web pages that are neither ours nor in `origins`."""
    # Programs send no Origin. A page's is compared by host and port alone: behind a proxy that
    # speaks TLS the server does not know its own scheme.
    headers = Headers(scope=scope)
    given = headers.getlist("origin")
    if not given or ANY in origins:
        return
    origin = given[0].lower()
    if len(given) == 1 and (origin in origins or _is_same(origin, headers.get("host", ""))):
        return
    shown = cut(given[0])
    raise ForbiddenError(
        f"Web pages of the origin {shown!r} may not call this server. If they should, "
        f"start it with --cors-origin {shown if '://' in shown else 'ORIGIN'}."
    )


def _is_same(origin: str, host: str) -> bool:
    scheme, _, rest = origin.partition("://")
    default = _DEFAULT_PORTS.get(scheme, 0)
    page = _host_and_port(rest, default)
    return default > 0 and page is not None and page == _host_and_port(host, default)


def _host_and_port(host: str, default: int) -> tuple[str, int] | None:
    parts = _HOST.fullmatch(host.lower())
    if parts is None:
        return None
    name, port = parts.groups()
    return name.strip("[]").rstrip("."), default if port is None else int(port)


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
