"""Counts of a speculative decoder's windows, and the rates that come of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DEPTH = 3


@dataclass
class Windows:
    """Windows of `DEPTH` drafts each.

    Args:
        num_windows: how many.
        num_tried: windows whose d-th draft was compared, for d from 1: those before it were
            accepted, and none of them ended the answer.
        num_accepted: windows whose first d drafts were all accepted.
    """

    num_windows: int = 0
    num_tried: list[int] = field(default_factory=lambda: [0] * DEPTH)
    num_accepted: list[int] = field(default_factory=lambda: [0] * DEPTH)

    def observe(self, num_accepted: int, num_tokens: int) -> None:
        """Count a window, by the tokens that it gave: one more than accepted, or the answer's last.

        Args:
            num_accepted: drafts.
            num_tokens: of the answer.
        """
        self.num_windows += 1
        for depth in range(min(DEPTH, num_tokens)):
            self.num_tried[depth] += 1
        for depth in range(num_accepted):
            self.num_accepted[depth] += 1

    def add(self, other: Windows) -> None:
        """Count another's."""
        self.num_windows += other.num_windows
        self.num_tried = [a + b for a, b in zip(self.num_tried, other.num_tried)]
        self.num_accepted = [a + b for a, b in zip(self.num_accepted, other.num_accepted)]

    @property
    def rates(self) -> list[float]:
        """At each depth, given that all before it were accepted."""
        return [n / tried if tried else 0.0 for n, tried in zip(self.num_accepted, self.num_tried)]

    @property
    def tokens_per_step(self) -> float:
        """Accepted drafts of a window, and the one token more."""
        return 1 + sum(self.num_accepted) / max(1, self.num_windows)

    def figures(self) -> dict[str, Any]:
        """For a file."""
        rates = {f"depth_{d}": round(rate, 4) for d, rate in enumerate(self.rates, 1)}
        per_step = round(self.tokens_per_step, 4)
        return {"windows": self.num_windows, **rates, "tokens_per_step": per_step}


def walk(hits: Sequence[Sequence[bool]], first: int, end: int) -> Windows:
    """The windows of a decoder that knows which drafts would be right.

    Args:
        hits: for each depth d and row q of the head: the d-th draft of the window that began at
            row q - d + 1, for token q + 2, is that token.
        first: row of the first window: the prompt's last token.
        end: number of tokens, prompt and answer.
    """
    windows = Windows()
    row = first
    while row + 2 < end:
        accepted = 0
        while accepted < DEPTH and row + accepted + 2 < end and hits[accepted][row + accepted]:
            accepted += 1
        windows.observe(accepted, min(accepted + 1, end - row - 2))
        row += 1 + accepted
    return windows
