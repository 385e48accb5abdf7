"""Text for a terminal, as wide as that is, and for files and pipes, as it comes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO


def width_of(stream: TextIO | None = None) -> int | None:
    """The columns of a terminal, by default of standard output; None for other streams."""
    from rich.console import Console

    console = Console(file=stream or sys.stdout)
    return console.width if console.is_terminal else None


def hanging(label: str, text: str, width: int | None) -> str:
    """A label and a text, whose lines all begin to the right of the label."""
    lines: list[str] = []
    for line in text.split("\n"):
        room = sys.maxsize if width is None else max(width - len(label), 20)
        lines += textwrap.wrap(line, room, break_on_hyphens=False) if len(line) > room else [line]
    return label + f"\n{' ' * len(label)}".join(lines)


def labelled(rows: Mapping[str, str], width: int | None, indent: str = "") -> str:
    """Rows of a label and its text, one below the other."""
    column = max(map(len, rows)) + 1
    return "\n".join(
        hanging(f"{indent}{name:<{column}}", text, width) for name, text in rows.items()
    )


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], left: int, width: int) -> str:
    """A table as wide as the terminal at most; all columns but the first `left` are flush right.

    Rows and columns change places where only then no cell needs two lines.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells: list[Sequence[str]] = [header, *rows]
    turned: list[Sequence[str]] = list(zip(*cells))
    if not _fits(cells, width) and _fits(turned, width):
        cells, left = turned, 1
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, header_style="")
    for number, name in enumerate(cells[0]):
        table.add_column(Text(name), justify="left" if number < left else "right", overflow="fold")
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as shown:
        console.print(table)
    return "\n".join(line.rstrip() for line in shown.get().strip("\n").split("\n"))


def _fits(cells: Sequence[Sequence[str]], width: int) -> bool:
    return sum(1 + max(map(len, column)) for column in zip(*cells)) < width
