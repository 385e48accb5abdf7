"""The command `mlx-mtp config`: shows the settings of a command, and the source of each."""

import argparse
from collections.abc import Mapping
from typing import Any

from mlx_mtp.console import labelled, say, say_wrapped, width_of
from mlx_mtp.flags import Flag, secret
from mlx_mtp.options import COMMAND_FLAGS, MODEL_FLAG
from mlx_mtp.settings import VARIABLE, add_settings, resolve, settings_path


def add_config(commands: Any) -> None:
    """Register `config`."""
    parser = commands.add_parser(
        "config",
        help="show the settings of a command, and where each is from",
        description="Show the settings that a command would have, and where each is from: an "
        "environment variable, the settings file, or the flag's default.",
    )
    shown = f"whose settings: {', '.join(COMMAND_FLAGS)} (default: serve)"
    parser.add_argument(
        "of", metavar="COMMAND", nargs="?", choices=COMMAND_FLAGS, default="serve", help=shown
    )
    add_settings(parser, MODEL_FLAG)
    parser.set_defaults(run=_show, environ=None)


def _show(given: argparse.Namespace) -> int:
    flags, path = COMMAND_FLAGS[given.of], settings_path(given.environ)
    typed = {"model": given.model} if "model" in given else {}
    options = resolve(argparse.Namespace(command=given.of, **typed), flags, given.environ)
    if path is None:
        say_wrapped(f"No settings file is read: {VARIABLE} is empty.\n")
    else:
        state = "" if path.exists() else ", which is not there"
        say_wrapped(f"The settings file is {path}{state} ({VARIABLE} names another).\n")
    rows = {flag.toml_key: _row(flag, options, options.given) for flag in flags}
    say(labelled(rows, width_of()))
    return 0


def _row(flag: Flag, options: argparse.Namespace, sources: Mapping[str, str]) -> str:
    value, source = getattr(options, flag.key), sources.get(flag.key, "default")
    if flag.parse is secret and value is not None:
        text = "not shown"
    elif flag.parse is None and value is not None:
        text = "on" if value else "off"
    elif flag.key not in sources:
        text = flag.shown_default or "none"
    else:
        text = ", ".join(map(str, value)) if flag.repeated else str(value)
    return f"{text} ({source or 'typed'})"
