"""The terminal's side of the commands: errors of one line, and a closed standard output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

CLOSED_PIPE_STATUS = 141
"""What a shell reports for a program that SIGPIPE ended."""


class CommandParser(argparse.ArgumentParser):
    """argparse with one-line errors and exit status 2; its subparsers are of this class too.

    argparse prints the usage first, which for `serve` is a screen of flags.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Reject what is left over here, so that the error names the subcommand's help."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest


def print_or_discard(text: str) -> None:
    """Print; if standard output is closed (`mlx-mtp serve | head`), discard all further output."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard(sys.stdout)


def discard(*streams: TextIO) -> None:
    """Redirect streams to nowhere: Python flushes what is left in them at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
