"""Run the application with uvicorn, on a socket that was bound before the model was loaded."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Collection
from types import FrameType

import uvicorn
from fastapi import FastAPI

from mlx_mtp.errors import UsageError
from mlx_mtp.server.dispatch import Dispatcher
from mlx_mtp.server.hosts import ANY, is_loopback
from mlx_mtp.server.http_protocol import BoundedProtocol

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5
"""How long answers in progress may go on after ctrl-C."""
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Take the address; port 0 takes a free one. Clients that come early wait to be accepted.

    Raises:
        UsageError: the address is in use, or isn't this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only for sockets that say that they are TCP's; left on,
    # it delays each event of a stream by 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # At once: with SO_REUSEADDR an address is in use only where somebody listens.
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"Port {port} on {host} is in use; choose another --port.") from None
        raise UsageError(f"Can't listen on {host}, port {port}: {error.strerror}.") from None
    return sock


def warn_if_open(host: str, cors_origins: Collection[str], *, has_key: bool) -> None:
    """Say who else can use a server without a key."""
    if has_key:
        return
    if not is_loopback(host):
        logger.warning(
            "Whoever reaches %s on the network can use this server: it has no key. Add --api-key "
            "or --api-key-file, or leave out --host.",
            host,
        )
    if ANY in cors_origins:
        logger.warning(
            "Every web page that a browser on this machine opens can use this server: it has no "
            "key, and --cors-origin is *. Name the origins, or add --api-key."
        )


class Server(uvicorn.Server):
    """uvicorn, which tells when it is ready and ends open answers when it is stopped.

    Args:
        config: uvicorn's.
        dispatcher: the application's.
        on_ready: called once, when requests are taken.
    """

    def __init__(
        self, config: uvicorn.Config, dispatcher: Dispatcher, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._dispatcher = dispatcher
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first ctrl-C lets answers go on for a while, the second ends them, the third all."""
        if self.should_exit and not self._hurried and self._loop is not None:
            self._hurried = True
            self._loop.call_soon_threadsafe(self._dispatcher.end_all)
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and tell."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: answers in progress get a little time, then an error that says why."""
        timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._dispatcher.end_all)
        await super().shutdown(sockets)
        timer.cancel()


def make_server(
    app: FastAPI, *, log_level: str = "info", on_ready: Callable[[], None] = lambda: None
) -> Server:
    """The server for `create_app`'s application; run it with the bound socket."""
    config = uvicorn.Config(
        app,
        log_level=log_level,
        http=BoundedProtocol,
        ws="none",
        # Whoever connects could name any address: no proxy is trusted to name its client's.
        proxy_headers=False,
        # Twice the grace: clients that don't read their error must not keep the process alive.
        timeout_graceful_shutdown=2 * GRACE_SECONDS,
        server_header=False,
    )
    return Server(config, app.state.context.dispatcher, on_ready)
