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
    """Returns the text with Python's escapes in place of characters that control a terminal.

    Carriage returns are removed. A text can be cleaned piece by piece.
    """
    return _STEERING.sub(lambda match: "" if match[0] == "\r" else ascii(match[0])[1:-1], text)


def one_line(text: str) -> str:
    """Returns the text with escapes in place of all unprintable characters, newlines included."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say(text: str, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print a cleaned text, to standard output by default.

    All commands print with this function (ruff's rule T201), as names and error messages can
    contain untrusted text.
    """
    stream = file or sys.stdout
    stream.write(clean(text + end))
    stream.flush()


def say_wrapped(text: str, *, file: TextIO | None = None) -> None:
    """Print a cleaned text; on a terminal, lines are broken only between words."""
    stream = file or sys.stdout
    width = width_of(stream) if stream.isatty() else None
    say(hanging("", text, width, break_words=False), file=stream)


def width_of(stream: TextIO | None = None) -> int | None:
    """Returns a terminal's number of columns, or None if `stream` is no terminal.

    The stream defaults to standard output.
    """
    from rich.console import Console

    console = Console(file=stream or sys.stdout)
    return console.width if console.is_terminal else None


def hanging(label: str, text: str, width: int | None, *, break_words: bool = True) -> str:
    """Returns a label and a text with a hanging indent, wrapped to `width` columns if given.

    Without `break_words`, a word that is too long, such as a path, stays whole and can be copied.
    """
    wrapper = textwrap.TextWrapper(break_on_hyphens=False, break_long_words=break_words)
    lines: list[str] = []
    for line in text.split("\n"):
        wrapper.width = sys.maxsize if width is None else max(width - len(label), 20)
        lines += wrapper.wrap(line) if len(line) > wrapper.width else [line]
    return label + f"\n{' ' * len(label)}".join(lines)


def labelled(rows: Mapping[str, str], width: int | None, indent: str = "") -> str:
    """Returns one row per label and its text, wrapped to `width` columns if given."""
    column = max(map(len, rows)) + 1
    return "\n".join(
        hanging(f"{indent}{name:<{column}}", text, width) for name, text in rows.items()
    )


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], left: int, width: int) -> str:
    """Returns a table of at most `width` characters per line.

    The first `left` columns are aligned left, the others right. The table is transposed if only
    that avoids wrapped cells.
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
    """Returns a size such as 3.3 GB, in decimal units."""
    size = float(nbytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def speed_text(
    tokens: int, rate: float, prompt_tokens: int | None, first: float, drafts: int, accepted: int
) -> str:
    """Returns an answer's speed and acceptance on one line.

    `rate` is in tokens per second, and `first` is the time to the first token in seconds.
    """
    prompt = "first" if prompt_tokens is None else f"prompt of {prompt_tokens}"
    share = f"{accepted / drafts:.0%} of {drafts} drafts accepted" if drafts else "no drafts"
    return f"[{tokens} tokens, {rate:.1f}/s; {prompt} in {first:.2f} s; {share}]"
