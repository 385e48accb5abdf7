"""The HTTP application, run with uvicorn on a socket that was bound before the model was loaded."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from mlx_mtp.config import ServerConfig
from mlx_mtp.errors import MlxMtpError, UsageError
from mlx_mtp.logs import BackgroundLog
from mlx_mtp.server.context import Context
from mlx_mtp.server.http import access
from mlx_mtp.server.http import errors as http_errors
from mlx_mtp.server.http.protocol import LimitedProtocol
from mlx_mtp.server.http.request_log import IGNORED, REQUEST_ID, RequestLog
from mlx_mtp.server.live import Live
from mlx_mtp.server.routes import ROUTES
from mlx_mtp.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine

logger = logging.getLogger(__name__)

_STOPPING = "Stopping: up to %(seconds).0f s for %(answers)d unfinished; Ctrl-C again ends it now."
_NO_ROOM = "No connection is accepted for %(seconds)g s: %(reason)s."
_NO_ROOM_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
STOP_SECONDS = 10.0  # for the engine's thread to end
FLUSH_SECONDS = 5  # for clients to read the error that ended their response
# The event loop needs the interpreter's lock several times a token: with Python's own 5 ms clients
# would wait for a step to be built.
SWITCH_SECONDS = 0.001
_SPARE_FILES = 64  # Open beside the clients' connections.
_MIN_CONNECTIONS = 16  # With fewer, clients that keep theirs open would lock out the others.
_NUM_THREADS = 16  # Beside the event loop: more than long work of all kinds may keep busy at once.
_PAUSE_SECONDS = 1.0  # without accepting connections, when the system has no room for one


def create_app(
    engine: Engine, tokenizer: Tokenizer, config: ServerConfig, defaults: Mapping[str, Any]
) -> FastAPI:
    """Build the application, which starts and stops the engine, with the model's defaults."""
    context = Context(engine, tokenizer, config, defaults)
    live = Live(context)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mlx-mtp-work")
        asyncio.get_running_loop().set_default_executor(threads)
        context.dispatcher.start()
        background = [asyncio.create_task(live.background())]
        if context.workers is not None:
            background.append(asyncio.create_task(context.workers.keep_running()))
        try:
            yield
        finally:
            for task in background:
                task.cancel()
            await context.dispatcher.stop(STOP_SECONDS)
            context.close()

    # The bodies are read by hand, so FastAPI could not describe them.
    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.context, app.state.live = context, live
    for methods, path, handler, _ in ROUTES:
        # With and without a slash at the end: a redirect would lose some clients' bodies.
        for either in {path, path.rstrip("/") + "/"}:
            app.add_api_route(either, handler, methods=methods.replace("GET", "GET HEAD").split())
    for kind in (MlxMtpError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, http_errors.on_error)
    # The last one added runs first: unknown host names are rejected before all else, and CORS comes
    # before the key, as a browser's preflight has none.
    limiter, origins, check = context.limiter, config.cors_origins, http_errors.CheckMiddleware
    generating = frozenset(path for _, path, _, generates in ROUTES if generates)
    app.add_middleware(check, check=partial(limiter.check, generating), at_end=limiter.release)
    if config.api_keys:
        digests = [access.digest_of(key.encode()) for key in config.api_keys]
        app.add_middleware(check, check=partial(access.check_key, digests))
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],  # SDKs in browsers send a dozen of their own.
            expose_headers=["Retry-After", IGNORED, REQUEST_ID],
            # Some versions of Chrome ask before a page from the internet calls this machine.
            allow_private_network=True,
        )
    app.add_middleware(check, check=partial(access.check_origin, origins))
    names = access.known_names(config.host, config.allowed_hosts)
    app.add_middleware(check, check=partial(access.check_host, names))
    app.add_middleware(http_errors.WriteInPieces, held=context.held)
    paths = frozenset(path for _, path, _, _ in ROUTES)
    app.add_middleware(RequestLog, metrics=context.metrics, paths=paths)
    return app


def bind(host: str, port: int) -> socket.socket:
    """Listen on the address, or raise a UsageError; port 0 takes a free one."""
    needed = _SPARE_FILES + _MIN_CONNECTIONS
    if (limit := _file_limit(needed)) < needed:
        raise UsageError(
            f"The limit of open files is {limit}, and the server needs {needed}: raise it, as by "
            f"`ulimit -n {needed}`."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only for sockets that say that they are TCP's asyncio switches Nagle's algorithm off.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # At once: with SO_REUSEADDR an address is in use only where a socket listens.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"Port {port} on {host} is in use; choose another --port.") from None
        raise UsageError(f"Can't listen on {host}, port {port}: {error.strerror}.") from None
    return sock


class Server(uvicorn.Server):
    """uvicorn, which drains when it is stopped, for `drain_timeout` seconds at most.

    A second signal ends open requests at once, a third doesn't wait for clients to read that.
    """

    def __init__(
        self, config: uvicorn.Config, context: Context, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.engine = context.engine
        self._context, self._limiter, self._on_ready = context, context.limiter, on_ready
        self._told = False  # that it stops

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            self.force_exit = True
        elif self._limiter.draining:
            self.should_exit = True
        else:
            self._limiter.drain(self._context.config.drain_timeout)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._accepting = [asyncio.create_task(self._accept(sock)) for sock in sockets or ()]
        if self.started:
            self._on_ready()

    async def _accept(self, sock: socket.socket) -> None:
        """Accept connections one at a time, so that those beyond the limit are closed in between.

        asyncio's own listener accepts the whole backlog at once, and goes on when the process has
        no more files, with an error for each connection.
        """
        loop, config = asyncio.get_running_loop(), self.config
        sock.setblocking(False)
        make: Any = config.http_protocol_class
        protocol = partial(
            make,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        while True:
            try:
                connection, _ = await loop.sock_accept(sock)
            except OSError as error:  # Others are the one connection's, whose client has left.
                if error.errno in _NO_ROOM_ERRORS:
                    fields = {"reason": error.strerror, "seconds": _PAUSE_SECONDS}
                    logger.warning(_NO_ROOM, fields)
                await asyncio.sleep(_PAUSE_SECONDS if error.errno in _NO_ROOM_ERRORS else 0)
                continue
            try:
                await loop.connect_accepted_socket(protocol, connection)
            except Exception as error:
                if not isinstance(error, OSError):  # which its client has caused
                    logger.exception("a connection could not be served")
                connection.close()

    async def on_tick(self, counter: int) -> bool:
        stop = await super().on_tick(counter)
        if not self._limiter.draining:
            return stop
        left, held = self._limiter.drain_seconds, self._limiter.held
        if not self._told:
            # Not where the signal is handled: the log's lock may be held there.
            self._told = True
            fields = {"answers": held, "seconds": left}
            logger.info(_STOPPING if held and not stop else "Stopping.", fields)
        return stop or left <= 0 or not self.server_state.tasks

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._limiter.drain(0.0)
        for task in self._accepting:
            task.cancel()
        if held := self._limiter.held:
            logger.info("Ending what is unfinished: %(answers)d.", {"answers": held})

        async def end_requests() -> None:
            while True:  # Some may be about to be submitted.
                self._context.dispatcher.end_all()
                await asyncio.sleep(0.05)

        ending = asyncio.create_task(end_requests())
        await super().shutdown(sockets)
        ending.cancel()


def make_server(
    app: FastAPI, *, log_level: str = "info", on_ready: Callable[[], None] = lambda: None
) -> Server:
    """The server for `create_app`'s application; run it with the bound socket."""
    context = app.state.context
    settings = context.config
    wanted = max(settings.max_connections, context.limiter.capacity + _SPARE_FILES)
    most = min(wanted, _file_limit(wanted + _SPARE_FILES) - _SPARE_FILES)
    protocol: Any = partial(LimitedProtocol, settings, context.limiter, most)
    config = uvicorn.Config(
        app,
        log_config=None,  # It goes where our own lines go,
        access_log=False,  # and these are `server.request_log`'s.
        http=protocol,
        ws="none",
        proxy_headers=False,  # Any client on this machine could write X-Forwarded-For.
        log_level="warning" if log_level == "info" else log_level,  # The banner says as much.
        # Later than clients do (most after 5 s), as these may send on what is just being closed.
        timeout_keep_alive=math.ceil(settings.head_timeout),
        timeout_graceful_shutdown=FLUSH_SECONDS,
        server_header=False,
        loop="asyncio",
    )
    return Server(config, context, on_ready)


def run(server: Server, sock: socket.socket, stop_engine: Callable[[float], bool]) -> bool:
    """Serve until a signal, then stop the engine; returns whether that has ended."""
    sys.setswitchinterval(SWITCH_SECONDS)
    if threading.current_thread() is threading.main_thread():
        _handle_signals(server)
    log = BackgroundLog()
    with log.attached():
        try:
            server.run(sockets=[sock])
        finally:
            ended = stop_engine(STOP_SECONDS)  # Leaving by force, uvicorn doesn't do it.
            logger.info("Stopped.")
    if not log.close():
        os._exit(0 if ended else 1)  # The log is not read: writing to it would block.
    return ended


def _handle_signals(server: Server) -> None:
    # uvicorn handles SIGINT and SIGTERM. By default these, which tools send to have logs reopened
    # or states shown, would end the process with its requests. nohup's SIGHUP stays ignored.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, server.handle_exit)
    signal.signal(signal.SIGCONT, lambda *_: server.engine.resume())


def give_up(reason: str) -> NoReturn:
    """End the process with status 1 where its threads don't allow an orderly end."""
    logger.critical("The process is ended: %s.", reason)
    sys.stdout.flush()
    os._exit(1)


def _file_limit(wanted: int) -> int:
    # The limit of open files is 256 on a Mac; returns what it can be raised to.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    aim = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= aim:
        return aim
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (aim, hard))
    except (ValueError, OSError):
        logger.warning("The limit of open files stays at %d.", soft)
        return soft
    return aim
