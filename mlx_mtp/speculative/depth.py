"""How many drafts a step proposes."""

from __future__ import annotations

from typing import Protocol


class DepthPolicy(Protocol):
    """Chooses the depth k of each step."""

    def depth(self, batch_size: int) -> int:
        """Drafts to propose for the next window of `batch_size` rows, 0 or more."""


class FixedDepth:
    """The same depth always.

    Args:
        num_draft_tokens: k.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens

    def depth(self, batch_size: int) -> int:
        """See `DepthPolicy`."""
        return self._num_draft_tokens
