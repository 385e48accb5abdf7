"""The command itself: print a configuration, or write it."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_mtp.config import ServerConfig
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import Flag, add_flags, resolve, text

OPEN_WEBUI = "open-webui"
NAMES = ("opencode", "claude", "codex", "continue", OPEN_WEBUI)

_DEFAULTS = ServerConfig(model_name="")
_URL = f"http://{_DEFAULTS.host}:{_DEFAULTS.port}"
_API_KEY = Flag("--api-key", "the server's API key, if it has one", text, None, "KEY")


def add_connect(commands: Any) -> None:
    """Add the command to the command line's."""
    parser = commands.add_parser(
        "connect", help="print or write a client's configuration for a running server"
    )
    parser.add_argument("client", choices=NAMES, help="the client")
    parser.add_argument(
        "--url", type=text, default=_URL, help="the server's address (default: %(default)s)"
    )
    add_flags(parser, [_API_KEY])
    parser.add_argument(
        "--write",
        action="store_true",
        help="change the client's own file; the old one is kept beside it as .bak",
    )
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    key = resolve(given, [_API_KEY], os.environ).api_key
    told = connect(given.client, given.url, key, write=given.write, environ=os.environ)
    print(told)
    return 0


def connect(
    name: str, url: str, api_key: str | None, *, write: bool, environ: Mapping[str, str]
) -> str:
    """What to tell the user.

    Args:
        name: of the client, one of `NAMES`.
        url: of the server.
        api_key: the server's.
        write: put the configuration into the client's file.
        environ: the process's; it says where some clients keep their files.

    Raises:
        UsageError: the server doesn't answer, or the file can't be written.
    """
    # Imported here, so that other commands need not wait for the formats of files.
    from mlx_mtp.connect import files
    from mlx_mtp.connect.clients import CLIENTS, KEY_VARIABLE, open_webui
    from mlx_mtp.connect.served import ask

    served = ask(url, api_key)
    note = f"Set {KEY_VARIABLE} to the server's API key where the client runs.\n"
    key = note if served.wants_key else ""
    if name == OPEN_WEBUI:
        if write:
            raise UsageError(
                "Open WebUI keeps its connections in its database, so there is no file to write; "
                "leave out --write to see how it is started."
            )
        return open_webui(served) + key
    client = CLIENTS[name]
    path = client.path(Path.home(), environ)
    config = client.config(served)
    if not write:
        new = config if path.exists() else {**client.needed, **config}
        once = ""
        if client.once is not None:
            once = f"# For one session, without changing any file:\n{client.once(served)}\n\n"
            once += f"# For every session (--write puts it there): {client.changes}\n"
        return f"{once}# {path}\n{files.shown(path, new)}{key}"
    backup = files.write(path, files.merged(path, config, client.needed))
    undo = f"mv {shlex.quote(str(backup))} {shlex.quote(str(path))}"
    if backup is None:
        undo = f"rm {shlex.quote(str(path))}"
    return (
        f"Wrote {path}. {client.changes}\nTo undo this: {undo}\nStart it with: {client.run}\n{key}"
    )
