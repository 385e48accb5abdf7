"""Text for people: what prints it, in a terminal as wide as that is, and how sizes are told."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

# Control characters except newline and tab, separators of lines, marks that reverse the direction
# of what follows, and halves of surrogate pairs, which can't be encoded.
_STEERING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def clean(text: str) -> str:
    """The text with escapes, as Python writes them, in place of what would steer a terminal.

    Character by character, so a text may come in pieces. Carriage returns are left out.
    """
    return _STEERING.sub(lambda found: "" if found[0] == "\r" else ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """The text with escapes in place of everything that is not printable, newlines too."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say(text: str, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print what may have parts that this program has not written, such as names and errors.

    Commands print by this function alone (ruff's rule T201), to standard output by default.
    """
    stream = file or sys.stdout
    stream.write(clean(text + end))
    stream.flush()


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


def size_text(nbytes: int) -> str:
    """A size for people: 3.3 GB."""
    size = float(nbytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def speed_text(
    tokens: int, rate: float, prompt_tokens: int | None, first: float, drafts: int, accepted: int
) -> str:
    """An answer's speed and acceptance in a line; `first`: seconds to the first token."""
    prompt = "first" if prompt_tokens is None else f"prompt of {prompt_tokens}"
    told = f"{accepted / drafts:.0%} of {drafts} drafts accepted" if drafts else "no drafts"
    return f"[{tokens} tokens, {rate:.1f}/s; {prompt} in {first:.2f} s; {told}]"
