"""argparse, with errors of one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong and where help is; exit status 2. Its subparsers are of this class too.

    argparse would print the usage first, which for `serve` is a screen of flags.
    """

    def error(self, message: str) -> NoReturn:
        """Print one line on standard error, whatever the arguments contain, and exit."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse's, but nothing is left over: it's the subcommand's parser that knows best."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest
