"""An answer on the screen as it comes: Markdown and dimmed reasoning, or plain text."""

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from mlx_mtp.console import clean, say

_FENCE = "```"
_REFRESHES = 8  # a second


class Screen:
    """Shows one answer; a context manager.

    What a blank line has ended is printed for good, and only the rest is drawn again as it grows:
    terminals can't redraw what they have scrolled away. Reasoning goes to standard error when
    there is no terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._block, self._reasoning = console, "", False
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console,
                refresh_per_second=_REFRESHES,
                vertical_overflow="crop",
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._live is None:
            say("")
            return
        self._print()
        self._live.update("")
        self._live.stop()

    def add(self, text: str, *, reasoning: bool) -> None:
        """Show more of the answer."""
        text = clean(text)
        if self._live is None:
            say(text, end="", file=sys.stderr if reasoning else sys.stdout)
            return
        if reasoning != self._reasoning:
            self._print()
            self._reasoning = reasoning
        self._block += text
        *done, self._block = _blocks(self._block)
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
        # Addresses are shown: a link would be an escape, and its words may name another place.
        markdown = Markdown(block, hyperlinks=False)
        _clean_tokens(markdown.parsed)
        return markdown


def _clean_tokens(tokens: Iterable[Any]) -> None:
    """Again: Markdown has words of its own for any character, such as &#x202e; or <http:%1b>."""
    for token in tokens:
        token.content = clean(token.content)
        _clean_tokens(token.children or ())


def _blocks(text: str) -> list[str]:
    """Split at the blank lines that are in no fenced code; the last block may grow."""
    blocks, fenced = [""], False
    for line in text.splitlines(keepends=True):
        fenced ^= line.lstrip().startswith(_FENCE)
        blocks[-1] += line
        if not fenced and line == "\n" and blocks[-1].strip():
            blocks.append("")
    return blocks
