"""Text for people: safe printing, layout for the width of a terminal, sizes and speeds."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

# Control characters except newline and tab, line separators, bidirectional marks, and halves of
# surrogate pairs, which can't be encoded.
_STEERING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def clean(text: str) -> str:
    """The text with Python's escapes in place of characters that would control a terminal.

    Carriage returns are left out. A text may be cleaned in pieces.
    """
    return _STEERING.sub(lambda match: "" if match[0] == "\r" else ascii(match[0])[1:-1], text)


def one_line(text: str) -> str:
    """The text with escapes in place of all characters that are not printable, newlines too."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say(text: str, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print a cleaned text, to standard output by default.

    All commands print with this function (ruff's rule T201), as names and errors are foreign text.
    """
    stream = file or sys.stdout
    stream.write(clean(text + end))
    stream.flush()


def say_wrapped(text: str, *, file: TextIO | None = None) -> None:
    """Print a cleaned text, of which a terminal's lines are broken between words only."""
    stream = file or sys.stdout
    width = width_of(stream) if stream.isatty() else None
    say(hanging("", text, width, break_words=False), file=stream)


def width_of(stream: TextIO | None = None) -> int | None:
    """The columns of a terminal, by default standard output; None if a stream is none."""
    from rich.console import Console

    console = Console(file=stream or sys.stdout)
    return console.width if console.is_terminal else None


def hanging(label: str, text: str, width: int | None, *, break_words: bool = True) -> str:
    """A label and a text, wrapped to a width, whose lines all begin to the right of the label.

    Without `break_words` a word that is too long, such as a path, stays whole for who copies it.
    """
    wrapper = textwrap.TextWrapper(break_on_hyphens=False, break_long_words=break_words)
    lines: list[str] = []
    for line in text.split("\n"):
        wrapper.width = sys.maxsize if width is None else max(width - len(label), 20)
        lines += wrapper.wrap(line) if len(line) > wrapper.width else [line]
    return label + f"\n{' ' * len(label)}".join(lines)


def labelled(rows: Mapping[str, str], width: int | None, indent: str = "") -> str:
    """A row per label and text, one below the other, wrapped to a width."""
    column = max(map(len, rows)) + 1
    return "\n".join(
        hanging(f"{indent}{name:<{column}}", text, width) for name, text in rows.items()
    )


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], left: int, width: int) -> str:
    """A table at most `width` wide; all columns but the first `left` are flush right.

    Rows and columns change places if the table fits only so without wrapped cells.
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
    """A size such as 3.3 GB, in decimal units."""
    size = float(nbytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def speed_text(
    tokens: int, rate: float, prompt_tokens: int | None, first: float, drafts: int, accepted: int
) -> str:
    """An answer's speed and acceptance on a line; `first` are seconds to the first token."""
    prompt = "first" if prompt_tokens is None else f"prompt of {prompt_tokens}"
    share = f"{accepted / drafts:.0%} of {drafts} drafts accepted" if drafts else "no drafts"
    return f"[{tokens} tokens, {rate:.1f}/s; {prompt} in {first:.2f} s; {share}]"
