"""What a model's server and a parent share: the middleware, the listening socket and uvicorn."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from mlx_mtp.config import ServerConfig
from mlx_mtp.errors import MlxMtpError, UsageError
from mlx_mtp.logs import BackgroundLog
from mlx_mtp.server.http import access
from mlx_mtp.server.http.admission import HeldBytes, RequestLimiter
from mlx_mtp.server.http.middleware import (
    IGNORED,
    REQUEST_ID,
    Check,
    CheckMiddleware,
    RequestCounts,
    RequestLog,
    WriteInPieces,
    on_error,
)
from mlx_mtp.server.http.protocol import LimitedProtocol
from mlx_mtp.server.http.record import Handler, Route

logger = logging.getLogger(__name__)

_STOPPING = "Stopping: up to %(seconds)g s for %(answers)d unfinished; Ctrl-C again ends it now."
_NO_ROOM = "No connection is accepted for %(seconds)g s: %(reason)s."
_NO_ROOM_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
STOP_SECONDS = 10.0  # maximum, for the engine's thread to end
FLUSH_SECONDS = 5  # maximum, for clients to read the error that ended their response
# The event loop needs the GIL several times per token: with Python's default of 5 ms, clients would
# wait until the engine's thread has built a step.
SWITCH_SECONDS = 0.001
_SPARE_FILES = 64  # open files other than the clients' connections
_MIN_CONNECTIONS = 16  # With fewer, a few keep-alive clients would lock out all others.
_PAUSE_SECONDS = 1.0  # without accepting, if the process or the system is out of resources


class ServerState(Protocol):
    """What `Server` needs from its application, which has it in `app.state.context`."""

    config: ServerConfig
    limiter: RequestLimiter
    held: HeldBytes
    loop: str  # uvicorn's name of the event loop

    @property
    def metrics(self) -> RequestCounts: ...

    def end_all(self) -> None:
        """End all open requests with an error."""

    def resume(self) -> None:
        """Recover after the process was suspended (Ctrl-Z) and continued."""


def add_routes_and_checks(
    app: Starlette,
    context: ServerState,
    routes: Iterable[Route],
    find_route: Callable[[str], Route],
) -> None:
    """Add the routes, the request log, the limits and the access checks to an application."""
    app.state.context = context
    app.router.redirect_slashes = False
    # First those that generate, as Starlette compares a request's path with each route's in turn.
    for route in sorted(routes, key=lambda each: not each.generates):
        endpoint: Any = _Endpoint(route.handler)
        for path in route.paths:
            # Not FastAPI's routes, which inspect the handler for parameters. GET includes HEAD.
            methods = route.methods.split()
            app.router.add_route(path, endpoint, methods=methods)
    for kind in (MlxMtpError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
    _add_checks(app, context.config, context.limiter)
    app.add_middleware(WriteInPieces, limiter=context.limiter, held=context.held)
    app.add_middleware(RequestLog, metrics=context.metrics, find_route=find_route)


class _Endpoint:
    """A handler as an ASGI application, which Starlette calls without further layers."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._handler(Request(scope, receive, send))
        await answer(scope, receive, send)


def _add_checks(app: Starlette, config: ServerConfig, limiter: RequestLimiter) -> None:
    inner: list[Check] = [limiter.check_admission]
    if config.parent_keys is not None:  # The parent has checked the rest.
        app.add_middleware(CheckMiddleware, checks=[access.take_client, *inner])
        return
    # Host and origin are checked before CORS, so that a foreign page gets no CORS headers. The key
    # is checked after it, as a browser's preflight has none.
    origins = config.cors_origins
    names = access.known_names(config.host, config.allowed_hosts)
    outer: list[Check] = [
        limiter.check_connection,
        partial(access.check_host, names),
        partial(access.check_origin, origins),
    ]
    if config.api_keys:
        digests = [access.digest_of(key.encode()) for key in config.api_keys]
        inner.insert(0, partial(access.check_key, digests))
    # The last middleware added runs first.
    if origins:
        app.add_middleware(CheckMiddleware, checks=inner)
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],  # SDKs in browsers send a dozen extra headers.
            expose_headers=["Retry-After", IGNORED, REQUEST_ID],
            # Some versions of Chrome ask before a page from the internet calls this machine.
            allow_private_network=True,
        )
    else:
        outer += inner
    app.add_middleware(CheckMiddleware, checks=outer)


def bind(host: str, port: int) -> socket.socket:
    """Listen on the address; port 0 takes a free one. Raises UsageError."""
    needed = _SPARE_FILES + _MIN_CONNECTIONS
    if (limit := _file_limit(needed)) < needed:
        raise UsageError(
            f"The limit of open files is {limit}, and the server needs {needed}: raise it, as by "
            f"`ulimit -n {needed}`."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only if the socket says that its protocol is TCP.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Listen here, as with SO_REUSEADDR an address is in use only once a socket listens on it.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"Port {port} on {host} is in use; choose another --port.") from None
        raise UsageError(f"Can't listen on {host}, port {port}: {error.strerror}.") from None
    return sock


class Server(uvicorn.Server):
    """A uvicorn server that drains when a signal stops it, for at most `drain_timeout` seconds.

    A second signal ends the open requests with an error; a third exits without waiting until
    clients have read it.
    """

    def __init__(
        self, config: uvicorn.Config, context: ServerState, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.context, self._limiter, self._on_ready = context, context.limiter, on_ready
        self._is_drain_logged = False

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            self.force_exit = True
        elif self._limiter.draining:
            self.should_exit = True
        else:
            self._limiter.drain(self.context.config.drain_timeout)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._accepting = [asyncio.create_task(self._accept(sock)) for sock in sockets or ()]
        if self.started:
            self._on_ready()

    async def _accept(self, sock: socket.socket) -> None:
        """Accept connections one at a time, so that `LimitedProtocol` can close some in between.

        asyncio's own listener accepts the whole backlog in one go. When the process has no more
        file descriptors, it keeps trying and logs an error per connection.
        """
        loop, config = asyncio.get_running_loop(), self.config
        sock.setblocking(False)
        protocol_class: Any = config.http_protocol_class
        protocol = partial(
            protocol_class,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        while True:
            try:
                connection, _ = await loop.sock_accept(sock)
            except OSError as error:
                # Any other error concerns only this connection: its client has left.
                if error.errno in _NO_ROOM_ERRORS:
                    fields = {"reason": error.strerror, "seconds": _PAUSE_SECONDS}
                    logger.warning(_NO_ROOM, fields)
                await asyncio.sleep(_PAUSE_SECONDS if error.errno in _NO_ROOM_ERRORS else 0)
                continue
            try:
                await loop.connect_accepted_socket(protocol, connection)
            except Exception as error:
                if not isinstance(error, OSError):  # The client causes an OSError.
                    logger.exception("a connection could not be served")
                connection.close()

    async def on_tick(self, counter: int) -> bool:
        stop = await super().on_tick(counter)
        if not self._limiter.draining:
            return stop
        left, held = self._limiter.drain_seconds, self._limiter.num_reserved
        if not self._is_drain_logged:
            # Not in the signal handler: the interrupted code may hold the log's lock.
            self._is_drain_logged = True
            fields = {"answers": held, "seconds": self.context.config.drain_timeout}
            logger.info(_STOPPING if held and not stop else "Stopping.", fields)
        return stop or left <= 0 or not self.server_state.tasks

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._limiter.drain(0.0)
        for task in self._accepting:
            task.cancel()
        if held := self._limiter.num_reserved:
            logger.info("Ending what is unfinished: %(answers)d.", {"answers": held})

        async def end_requests() -> None:
            while True:  # Repeatedly, as requests may still be submitted.
                self.context.end_all()
                await asyncio.sleep(0.05)

        ending = asyncio.create_task(end_requests())
        await super().shutdown(sockets)
        ending.cancel()


def make_server(
    app: Starlette, *, log_level: str = "info", on_ready: Callable[[], None] = lambda: None
) -> Server:
    """Build the server of an application whose `state.context` is a `ServerState`."""
    context: ServerState = app.state.context
    settings = context.config
    max_connections = max(settings.max_connections, context.limiter.capacity + _SPARE_FILES)
    file_limit = _file_limit(max_connections + _SPARE_FILES)
    max_connections = min(max_connections, file_limit - _SPARE_FILES)
    protocol: Any = partial(LimitedProtocol, settings, max_connections)
    config = uvicorn.Config(
        app,
        log_config=None,  # uvicorn's lines go where ours go.
        access_log=False,  # `http.middleware` writes them.
        http=protocol,
        ws="none",
        proxy_headers=False,  # Any client on this machine could write X-Forwarded-For.
        log_level="warning" if log_level == "info" else log_level,  # The banner replaces uvicorn's.
        # Longer than clients keep idle connections (mostly 5 s): a request that is sent while the
        # server closes the connection is lost.
        timeout_keep_alive=math.ceil(settings.head_timeout),
        timeout_graceful_shutdown=FLUSH_SECONDS,
        server_header=False,
        loop=context.loop,
    )
    return Server(config, context, on_ready)


def run_server(server: Server, sock: socket.socket, stop_engine: Callable[[float], bool]) -> bool:
    """Serve until a signal, then stop the engine; return True if its thread has ended."""
    sys.setswitchinterval(SWITCH_SECONDS)
    if threading.current_thread() is threading.main_thread():
        # uvicorn handles SIGINT and SIGTERM. Tools send SIGUSR1 and SIGUSR2 to reopen logs or to
        # show states; by default they end a process. Under nohup, SIGHUP stays ignored.
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, server.handle_exit)
        signal.signal(signal.SIGCONT, lambda *_: server.context.resume())
    log = BackgroundLog()
    with log.attached():
        try:
            server.run(sockets=[sock])
        finally:
            ended = stop_engine(STOP_SECONDS)  # A forced exit skips the lifespan's end.
            logger.info("Stopped.")
    if not log.close():
        os._exit(0 if ended else 1)  # Nobody reads the log: writing to it would block.
    return ended


def give_up(reason: str) -> NoReturn:
    """End the process with status 1, without waiting for its threads."""
    logger.critical("The process is ended: %s.", reason)
    sys.stdout.flush()
    os._exit(1)


def _file_limit(needed: int) -> int:
    """Raise the limit of open files, 256 on a Mac, up to `needed`; return min(limit, needed)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return limit
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (ValueError, OSError):
        logger.warning("The limit of open files stays at %d.", soft)
        return soft
    return limit
