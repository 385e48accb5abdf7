#!/usr/bin/env python
"""Print docs/flags.md: python scripts/flags_doc.py > docs/flags.md

A test checks that the file is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_mtp.flags import Flag
from mlx_mtp.options import COMMAND_FLAGS

_HEAD = """# Flags

Made from the code by `python scripts/flags_doc.py > docs/flags.md`; `--help` shows the same.

Each flag below can also be set by an environment variable (`--port` by `MLX_MTP_PORT`,
`--mtp-draft-vocab` by `MLX_MTP_MTP_DRAFT_VOCAB`, and so on) and in the [settings file](settings.md)
(by `port`, `mtp-draft-vocab`). What is typed comes first, then the variable, then the file. A
variable for a repeatable flag has commas between its values.
"""
_COMMANDS = {
    "serve": "## `mlx-mtp serve [MODEL]`\n",
    "generate": "## `mlx-mtp generate [MODEL] PROMPT`\n\nOne answer, streamed to the terminal.\n",
    "chat": "## `mlx-mtp chat [MODEL|URL]`\n\nA conversation in the terminal.\n",
}


def page() -> str:
    """Returns the whole page in Markdown."""
    parts = [
        part
        for command, heading in _COMMANDS.items()
        for part in (heading, _tables(COMMAND_FLAGS[command]))
    ]
    return "\n".join((_HEAD, *parts))


def _tables(flags: Sequence[Flag]) -> str:
    def heading(flag: Flag) -> str:
        return flag.group or "general"

    parts = []
    for name, group in groupby(flags, heading):
        parts.append(
            f"### {name[0].upper()}{name[1:]}\n\n| flag | what it does | default |\n|---|---|---|"
        )
        parts += [_row(flag) for flag in group]
        parts.append("")
    return "\n".join(parts)


def _row(flag: Flag) -> str:
    name = flag.metavar if not flag.name.startswith("-") else flag.name
    if flag.name.startswith("-") and flag.metavar:
        name = f"{flag.name} {flag.metavar}"
    default = flag.shown_default
    if flag.parse is None and not default:
        default = "off"
    shown = default if flag.default_text or not default else f"`{default}`"
    return " | ".join((f"| `{_escaped(name or '')}`", _escaped(flag.help), f"{_escaped(shown)} |"))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
