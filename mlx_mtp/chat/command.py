"""The commands `generate` and `chat`. Heavy imports are deferred until a command runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from mlx_mtp import backend
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import characters
from mlx_mtp.options import CHAT_FLAGS, GENERATE_FLAGS, SAMPLING, SERVE_FLAGS, check_generate
from mlx_mtp.prepare import prepare_command
from mlx_mtp.settings import add_settings, resolve

if TYPE_CHECKING:
    from mlx_mtp.server.serving import Server

_HOST_AND_PORT = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\]):\d+(/.*)?")
_PASTE_SECONDS = 0.05  # maximum time between two lines of a paste
_OF_ENGINE = ("model", "multi-token prediction")


def add_terminal(commands: Any) -> None:
    """Register `generate` and `chat`."""
    parser = commands.add_parser("generate", help="stream one answer to the terminal")
    add_settings(parser, *GENERATE_FLAGS)
    prompt_help = "what to ask; - reads it from standard input"
    parser.add_argument("prompt", help=prompt_help, type=characters)
    parser.set_defaults(run=_generate, environ=None)
    parser = commands.add_parser(
        "chat",
        aliases=["run"],
        help="a conversation in the terminal",
        description="A conversation in the terminal, with a running server or with a model that "
        "is loaded for it. /help lists what can be typed.",
    )
    add_settings(parser, *CHAT_FLAGS)
    parser.set_defaults(run=_chat, environ=None, command="chat")  # also as `run`


def _generate(given: argparse.Namespace) -> int:
    options = resolve(given, GENERATE_FLAGS, given.environ)
    check_generate(options)
    if options.prompt == "-":
        try:
            options.prompt = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise UsageError("Standard input is not valid UTF-8.") from None
    if not options.prompt.strip():
        raise UsageError("The prompt is empty: say what to ask, or - to read it from a pipe.")
    prepare_command(options, options.log_level)
    from mlx_mtp.cli.generate import generate

    return generate(options)


def _chat(given: argparse.Namespace) -> int:
    import httpx
    from rich.console import Console

    from mlx_mtp.bench.client import base_url
    from mlx_mtp.chat.session import Session, served_models

    options, console = resolve(given, CHAT_FLAGS, given.environ), Console()
    with contextlib.ExitStack() as stack:
        address = options.model or ""
        if _HOST_AND_PORT.fullmatch(address) and not os.path.exists(address):
            address = f"http://{address}"
        if address.startswith(("http://", "https://")):
            typed = [flag for flag in CHAT_FLAGS if flag.key in given and flag.group in _OF_ENGINE]
            if wrong := [
                f"--no-{flag.key.replace('_', '-')}"
                if getattr(given, flag.key) is False
                else flag.name
                for flag in typed
                if flag.key != "model"
            ]:
                raise UsageError(
                    f"{', '.join(wrong)} is for a model that is loaded here, not for "
                    "a running server."
                )
            url, proxied = base_url(address), True
        else:
            if console.is_terminal:
                console.print("Loading the model. /help lists the commands.", style="dim")
            url, proxied = stack.enter_context(_own_server(options)), False
        more: dict[str, Any] = {"timeout": None, "trust_env": proxied}
        if options.api_key:
            more["headers"] = {b"Authorization": f"Bearer {options.api_key}".encode()}
        client = stack.enter_context(httpx.Client(base_url=url, **more))
        fields = {key: value for key in SAMPLING if (value := getattr(options, key)) is not None}
        session = Session(client, console, served_models(client)[0], fields, options.system)
        session.talk(_reader())
    return 0


@contextlib.contextmanager
def _own_server(options: argparse.Namespace) -> Iterator[str]:
    """Serve the model on a thread of this process; yields the base URL.

    The server has the settings of `chat`, and for flags that `chat` lacks, those for all commands.
    """
    backend.prepare()
    from mlx.core import clear_streams

    from mlx_mtp.cli.serve import serve

    shared = {flag.key for flag in SERVE_FLAGS} & set(options.given)
    values = {key: getattr(options, key) for key in shared} | {"log_level": options.log_level}
    values |= {"command": "chat", "host": "127.0.0.1", "port": 0, "api_key_file": None}
    served = resolve(argparse.Namespace(**values), SERVE_FLAGS, options.environ)
    started: Future[tuple[Server, int]] = Future()

    def run() -> None:
        try:
            serve(served, on_ready=lambda *server: started.set_result(server))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            clear_streams()  # of this thread, which loaded the model

    thread = threading.Thread(target=run, name="mlx-mtp-serve", daemon=True)
    thread.start()
    try:
        server, port = started.result()
    except KeyboardInterrupt:
        os._exit(130)  # A thread that is loading can't be ended.
    except BaseException:
        thread.join()  # mlx aborts the process if it ends while the thread cleans up.
        raise
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()


def _reader() -> Callable[[str], str]:
    """Returns `input` or a function like it.

    In a terminal, it has line editing and a history, and returns pasted lines as one text.
    """
    if not sys.stdin.isatty():
        return lambda _: input()
    with contextlib.suppress(ImportError):
        import readline

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off.
            return input

    def read(prompt: str) -> str:
        # Without GNU readline, as on most Macs, a paste is several lines in quick succession.
        text = input(prompt)
        while _more_waits():
            text += f"\n{input('  ')}"
        return text

    return read


def _more_waits() -> bool:
    """Returns True if more input is waiting, even if it is not a whole line."""
    mode = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin, termios.TCSANOW)
    try:
        return bool(select.select([sys.stdin], [], [], _PASTE_SECONDS)[0])
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)
