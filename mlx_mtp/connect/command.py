"""The command `mlx-mtp connect`: print a client's configuration, or write it."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from mlx_mtp.config import ServerConfig
from mlx_mtp.console import say
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import Flag, add_flags, nonempty_text
from mlx_mtp.options import CLIENT_KEY
from mlx_mtp.settings import add_settings, resolve

# The keys of two tables in `clients`, whose import would slow down --help.
NAMES = (
    *("opencode", "claude", "codex", "continue", "aider", "qwen", "zed"),
    *("open-webui", "cline", "llm"),
)
SESSION_NAMES = ("opencode", "claude", "codex", "aider", "qwen", "llm")  # those of `launch`

_DEFAULTS = ServerConfig(model_name="")
URL = f"http://{_DEFAULTS.host}:{_DEFAULTS.port}"


def add_connect(commands: Any) -> None:
    """Register `connect`."""
    parser = commands.add_parser(
        "connect", help="print or write a client's configuration for a running server"
    )
    clients = f"the client: {', '.join(NAMES)}"
    parser.add_argument("client", choices=NAMES, metavar="CLIENT", help=clients)
    add_flags(
        parser,
        Flag("url URL", "the server's address; also as --url", nonempty_text, default_text=URL),
    )
    add_settings(parser, CLIENT_KEY)
    parser.add_argument(
        "--write",
        action="store_true",
        help="change the client's own file; the old one is kept beside it as .bak",
    )
    parser.set_defaults(run=run_connect, environ=None)


def run_connect(given: argparse.Namespace) -> int:
    """Print a client's configuration, or write it; returns the exit status."""
    from mlx_mtp.connect import files
    from mlx_mtp.connect.clients import CLIENTS, key_hint, look_up, setup_text

    served = look_up(given.url or URL, resolve(given, [CLIENT_KEY], given.environ).api_key)
    client = CLIENTS.get(given.client)
    if client is None and given.write:
        raise UsageError(
            f"{given.client} has no file of settings to write; leave out --write to see what to "
            "type."
        )
    path = None
    if client is not None:
        variable, below_home, name = client.where
        path = Path(given.environ.get(variable) or Path.home() / below_home, name)
    if client is None or path is None or not given.write:
        say(setup_text(given.client, served, path))
        return 0
    backup = files.replace_file(path, files.merged_text(path, client.config(served), client.needed))
    undo = ["rm", path] if backup is None else ["mv", backup, path]
    say(
        f"Wrote {path}. {client.changes}\nTo undo this: {shlex.join(map(str, undo))}\n"
        f"Start it with: {client.run or given.client}\n{key_hint(given.client, served)}"
    )
    return 0
