"""Who may call the server: API keys, the host names that it answers to, and web pages.

Any web page in a browser on this machine can reach a server on 127.0.0.1. The Origin header names
the page. If the page's host name resolves to 127.0.0.1 (DNS rebinding), the Host header has it.
"""

import hashlib
import hmac
import ipaddress
import logging
import re
import socket
import stat
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_mtp.bounded_json import shortened
from mlx_mtp.errors import AuthenticationError, ForbiddenError, UsageError
from mlx_mtp.flags import key_fault
from mlx_mtp.server.http.record import record_of

logger = logging.getLogger(__name__)

ANY = "*"
CLIENT = "x-mlx-mtp-client"
"""Header from a parent process: the SHA-256 of the client's key, the client's address, and the
seconds since the request arrived, separated by slashes; the first two may be empty."""
_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def read_keys(key: str | None, file: str | None) -> tuple[str, ...]:
    """Returns the keys of --api-key and of --api-key-file; raises UsageError.

    The file has one key per line; # begins a comment.
    """
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
    in_file = []
    for number, line in enumerate(map(str.strip, text.split("\n")), start=1):
        if line and not line.startswith("#"):
            if (fault := key_fault(line)) is not None:
                raise UsageError(f"--api-key-file {path}: the key in line {number} {fault}.")
            in_file.append(line)
    if not in_file:
        raise UsageError(f"--api-key-file {path} has no key: write one per line.")
    return tuple(dict.fromkeys([*keys, *in_file]))


def warn_if_open(host: str, cors_origins: Collection[str], *, has_key: bool) -> None:
    """Log a warning if other machines or any web page can use a server without a key."""
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
    """Returns a key's SHA-256, as a comparison of the keys themselves could reveal their length."""
    return hashlib.sha256(key).digest()


def check_key(digests: Collection[bytes], scope: Scope) -> None:
    """Raises AuthenticationError if the route needs a key and the request has none of `digests`."""
    record = record_of(scope)
    if not record.route.needs_key:
        return
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    # Every given key is compared with every valid one: the time must not reveal which one matched.
    for given in (headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""):
        for known in digests:
            if hmac.compare_digest(digest_of(given.strip().encode("latin-1")), known):
                record.key = known.hex()
    if not record.key:
        header = "`Authorization: Bearer KEY` or `x-api-key: KEY`"
        raise AuthenticationError(f"This server requires its API key, as the header {header}.")


def client_header(scope: Scope) -> tuple[bytes, bytes]:
    """Returns the header in which a parent process says whose request it forwards."""
    record, address = record_of(scope), scope["client"][0] if scope.get("client") else ""
    seconds = time.perf_counter() - record.began
    return CLIENT.encode(), f"{record.key}/{address}/{seconds:.4f}".encode()


def take_client(scope: Scope) -> None:
    """Set the client's key and address from the header; only the parent process can connect."""
    record = record_of(scope)
    if (given := Headers(scope=scope).get(CLIENT)) is None:  # The parent's own request.
        record.route = record.route._replace(is_logged=False)
        return
    record.key, address, seconds = given.split("/")
    record.began -= float(seconds)
    scope["client"] = (address, 0) if address else None


def known_names(host: str, more: Iterable[str]) -> frozenset[str]:
    """Returns the valid Host names: localhost, --host, `more`, and maybe this machine's names.

    The machine's names are included if other machines can connect.
    """
    names = {"localhost", host.lower(), *more}
    if not _is_loopback(host):
        full = socket.gethostname().lower()
        short = full.partition(".")[0]
        names |= {full, short, f"{short}.local"}
    return frozenset(names - {""})


def check_host(names: frozenset[str], scope: Scope) -> None:
    """Raises ForbiddenError if the Host header is neither one of `names` nor an IP address."""
    # Every browser sends the header, with an IP address only if the page itself came from there.
    # The status is not 421, after which browsers would try again.
    host = Headers(scope=scope).get("host")
    if host is None or ANY in names:
        return
    name, _ = _host_and_port(host, 0) or ("", 0)
    if not name or (name not in names and _address(name) is None):
        raise ForbiddenError(
            f"This server does not answer to the name {shortened(host)!r}. If it is yours, start "
            f"the server with --allowed-host {shortened(name or 'NAME')}."
        )


def check_origin(origins: Collection[str], scope: Scope) -> None:
    """Raises ForbiddenError for web pages that are neither the server's own nor in `origins`."""
    # Only browsers send an Origin. For the server's own page only host and port are compared:
    # behind a proxy that speaks TLS the server does not know its own scheme.
    headers = Headers(scope=scope)
    values = headers.getlist("origin")
    if not values or ANY in origins:
        return
    origin = values[0].lower()
    scheme, _, page = origin.partition("://")
    port = _DEFAULT_PORTS.get(scheme, 0)
    address = _host_and_port(page, port) if port else None
    is_own = address is not None and address == _host_and_port(headers.get("host", ""), port)
    if len(values) == 1 and (origin in origins or is_own):
        return
    shown = shortened(values[0])
    raise ForbiddenError(
        f"Web pages of the origin {shown!r} may not call this server. If they should, "
        f"start it with --cors-origin {shown if '://' in shown else 'ORIGIN'}."
    )


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
