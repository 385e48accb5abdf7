"""Shows an answer as it arrives: Markdown and dimmed reasoning, or plain text."""

import sys
from collections.abc import Iterable
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from mlx_mtp.console import clean, say

_FENCE = "```"
_REFRESHES = 8  # per second


class Screen:
    """Shows one answer; a context manager.

    A block that a blank line has ended is printed once, and only the last block is redrawn as it
    grows: terminals can't redraw lines that have scrolled away. Without a terminal, the answer goes
    to standard output and its reasoning to standard error.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._block, self._reasoning = console, "", False
        self._live = Live(
            console=console,
            refresh_per_second=_REFRESHES,
            vertical_overflow="crop",
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._console.is_terminal:
            say("")
            return
        self._print()
        self._live.update("")
        self._live.stop()

    def append(self, text: str, *, reasoning: bool) -> None:
        """Show more of the answer."""
        text = clean(text)
        if not self._console.is_terminal:
            say(text, end="", file=sys.stderr if reasoning else sys.stdout)
            return
        if reasoning != self._reasoning:
            self._print()
            self._reasoning = reasoning
        self._block += text
        *done, self._block = _markdown_blocks(self._block)
        for block in done:
            self._console.print(self._drawn(block))
            self._console.print()
        self._live.update(self._drawn(self._block))

    def _print(self) -> None:
        if self._block.strip():
            self._console.print(self._drawn(self._block))
        self._block = ""

    def _drawn(self, block: str) -> RenderableType:
        if self._reasoning:
            return Text(block.rstrip("\n"), style="dim")
        # URLs are shown as text: a hyperlink is an escape, and its text may name another place.
        markdown = Markdown(block, hyperlinks=False)
        _clean_tokens(markdown.parsed)
        return markdown


def _clean_tokens(tokens: Iterable[Any]) -> None:
    """Clean parsed text again: Markdown can spell any character, as &#x202e; or <http:%1b>."""
    for token in tokens:
        token.content = clean(token.content)
        _clean_tokens(token.children or ())


def _markdown_blocks(text: str) -> list[str]:
    """Split text at blank lines outside of fenced code; the last block can still grow."""
    blocks, fenced = [""], False
    for line in text.splitlines(keepends=True):
        fenced ^= line.lstrip().startswith(_FENCE)
        blocks[-1] += line
        if not fenced and line == "\n" and blocks[-1].strip():
            blocks.append("")
    return blocks
