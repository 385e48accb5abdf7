"""The command `mlx-mtp launch`: runs a client on a local server, which is started if necessary."""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_mtp import backend
from mlx_mtp.connect.command import SESSION_NAMES
from mlx_mtp.console import say, say_wrapped
from mlx_mtp.errors import UsageError
from mlx_mtp.options import CLIENT_KEY, SERVE_FLAGS
from mlx_mtp.server.adopted import OWNED
from mlx_mtp.settings import add_settings, resolve

_END_SECONDS = 30.0  # a server that takes longer to end is killed
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_TAIL_LINES = 20  # of the log of a server that did not start


def add_launch(commands: Any) -> None:
    """Register `launch`."""
    parser = commands.add_parser(
        "launch",
        help="run a client on a local model, for this session alone",
        description="Run a client on a server of this machine, without changing the client's "
        "files. If no server has the model, one is started, and ended with the client.",
        epilog="What follows `--` is passed to the client.",
    )
    parser.passes_on = True
    clients = f"the client: {', '.join(SESSION_NAMES)}"
    parser.add_argument("client", choices=SESSION_NAMES, metavar="CLIENT", help=clients)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="as for serve (default: that of the server that was started last, else auto)",
    )
    parser.add_argument("--url", metavar="URL", help="the address of another server")
    add_settings(parser, CLIENT_KEY)
    parser.set_defaults(run=run_launch, environ=None)


def run_launch(given: argparse.Namespace) -> int:
    """Run a client to its end; returns its exit status."""
    from mlx_mtp.connect.clients import look_up
    from mlx_mtp.connect.sessions import LAUNCHERS, NO_KEY, SessionStart

    launcher = LAUNCHERS[given.client]
    if shutil.which(launcher.program) is None:
        raise UsageError(
            f"{launcher.program} is not installed, or not on the PATH. Install it with "
            f"`{launcher.install}`, or as its own documentation says."
        )
    key = resolve(given, [CLIENT_KEY], given.environ).api_key
    # If the terminal is closed while a model loads, the server must end too.
    for number in _ENDING:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as stack:
        url, model = given.url, given.model
        if url is None:
            url, model = _find(model) or stack.enter_context(_started(model, given.environ))
        served = look_up(url, key, model)
        folder = stack.enter_context(TemporaryDirectory(prefix="mlx-mtp-"))
        own = launcher.session(SessionStart(served, key or NO_KEY, Path(folder)))
        say_wrapped(f"{given.client} uses {served.model} at {served.url}.", file=sys.stderr)
        command = [launcher.program, *own.arguments, *given.passed_on]
        return _run(command, {**given.environ, **own.variables})


def _find(model: str | None) -> tuple[str, str | None] | None:
    """Returns the address of the last started server with the model, and its name for the model.

    If `model` is None, any server will do, and its first model is used.
    """
    from mlx_mtp.models.published import releases_named
    from mlx_mtp.running import running_servers

    wanted = None if model is None else {model, *(each.repo_id for each in releases_named(model))}
    for server in reversed(running_servers()):
        if wanted is None:
            return server.url, None
        for name in wanted.intersection(server.models):
            return server.url, name
    return None


@contextlib.contextmanager
def _started(model: str | None, environ: Mapping[str, str]) -> Iterator[tuple[str, None]]:
    """Start a server for this session alone, which writes to a log file; yields its address."""
    import platformdirs

    backend.prepare()
    from mlx_mtp.inspect.disk import download_missing

    # The server reads the same variables and settings file.
    options = resolve(argparse.Namespace(command="serve"), SERVE_FLAGS, environ)
    model = download_missing(model or options.model or "auto", options.memory_limit)
    path = platformdirs.user_log_path("mlx-mtp", ensure_exists=True) / f"launch-{os.getpid()}.log"
    command = [sys.executable, "-m", "mlx_mtp", "serve", model, "--port", "0"]
    say_wrapped(f"Starting a server of {model}; its log: {path}", file=sys.stderr)
    with path.open("w") as log:
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # The server sees the pipe close when this process ends.
            stdout=log,
            stderr=log,
            env={**environ, OWNED: "1"},
            start_new_session=True,  # Ctrl-C is for the client.
        )
    try:
        yield _ready(server, path), None
    finally:
        server.terminate()
        try:
            server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    path.unlink(missing_ok=True)


def _ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until a server answers; returns its address."""
    from mlx_mtp.running import running_servers

    while server.poll() is None:
        for each in running_servers():
            if each.pid == server.pid:
                return each.url
        time.sleep(0.1)
    say("\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]), file=sys.stderr)
    raise UsageError(f"The server did not start; above is the end of its log, {log}.")


def _run(command: list[str], environ: dict[str, str]) -> int:
    # The terminal also sends Ctrl-C to the client, which decides what to do. (With SIG_IGN here,
    # the client would inherit it and ignore Ctrl-C.)
    before = signal.signal(signal.SIGINT, lambda *_: None)
    client = subprocess.Popen(command, env=environ)
    for number in _ENDING:
        signal.signal(number, lambda *_: client.terminate())
    try:
        status = client.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status
