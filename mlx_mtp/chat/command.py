"""The commands `generate` and `chat`. Heavy imports wait until one of them runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_mtp import backend
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import Flag, add_flags, characters, resolve, secret
from mlx_mtp.options import GENERATE_FLAGS, SAMPLING, SERVE_FLAGS, check_generate
from mlx_mtp.prepare import prepare_command

if TYPE_CHECKING:
    from mlx_mtp.server.serving import Server

_HOST_AND_PORT = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\]):\d+(/.*)?")
_OF_ENGINE = ("model", "multi-token prediction")


_CHANGES: dict[str, dict[str, Any]] = {
    "model": {
        "usage": "model: model MODEL|URL",
        "help": "a directory, a hub id, or the address of a running server; also as --model",
    },
    "max_tokens": {"default_text": "what the context has room for"},
}
CHAT_FLAGS = (
    *(replace(flag, **_CHANGES.get(flag.key, {})) for flag in GENERATE_FLAGS),
    Flag("--api-key KEY", "the running server's API key, if it has one", secret),
)


def add_terminal(commands: Any) -> None:
    """Register `generate` and `chat`."""
    parser = commands.add_parser("generate", help="stream one answer to the terminal")
    add_flags(parser, *GENERATE_FLAGS, reads_environment=True)
    prompt_help = "what to ask; - reads it from standard input"
    parser.add_argument("prompt", help=prompt_help, type=characters)
    parser.set_defaults(run=_generate, environ=None)
    parser = commands.add_parser(
        "chat",
        help="a conversation in the terminal",
        description="A conversation in the terminal, with a running server or with a model that "
        "is loaded for it. /help lists what can be typed.",
    )
    add_flags(parser, *CHAT_FLAGS, reads_environment=True)
    parser.set_defaults(run=_chat, environ=None)


def _generate(given: argparse.Namespace) -> int:
    options = resolve(given, GENERATE_FLAGS, given.environ)
    check_generate(options)
    if options.prompt == "-":
        try:
            options.prompt = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise UsageError("Standard input is not valid UTF-8.") from None
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
            url, proxied = stack.enter_context(_own_server(given)), False
        more: dict[str, Any] = {"timeout": None, "trust_env": proxied}
        if options.api_key:
            more["headers"] = {b"Authorization": f"Bearer {options.api_key}".encode()}
        client = stack.enter_context(httpx.Client(base_url=url, **more))
        fields = {key: value for key in SAMPLING if (value := getattr(options, key)) is not None}
        session = Session(client, console, served_models(client)[0], fields, options.system)
        session.talk(_reader())
    return 0


@contextlib.contextmanager
def _own_server(given: argparse.Namespace) -> Iterator[str]:
    """Serve the model on a thread of this process, with the flags given; yields the base URL."""
    backend.prepare()
    from mlx.core import clear_streams

    from mlx_mtp.cli.serve import serve

    flags = {flag.key: getattr(given, flag.key) for flag in SERVE_FLAGS if flag.key in given}
    flags = {"log_level": "warning", **flags, "host": "127.0.0.1", "port": 0, "api_key_file": None}
    options = resolve(argparse.Namespace(**flags), SERVE_FLAGS, given.environ)
    started: Future[tuple[Server, int]] = Future()

    def run() -> None:
        try:
            serve(options, on_ready=lambda *server: started.set_result(server))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            clear_streams()  # the thread's own, on which it loaded the model

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
    """`input`, with line editing and a history if standard input is a terminal."""
    if not sys.stdin.isatty():
        return lambda _: input()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    return input
