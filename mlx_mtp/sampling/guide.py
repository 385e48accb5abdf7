"""The masks of a batch's step, for the rows whose constraints allow some tokens only.

The host is needed between a row's tokens: a mask depends on the token before it. So the tokens of
a step are read before the next step's masks are made, and each draft before the next draft's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import mlx.core as mx
import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from mlx_mtp.errors import GrammarError
from mlx_mtp.sampling.constraint import Constraint
from mlx_mtp.sampling.sampler import Sampler


class Guide:
    """The constraints of a batch's rows, for one step.

    Args:
        constraints: one per row; None where anything may be said.
    """

    def __init__(self, constraints: Iterable[Constraint | None]) -> None:
        rows = enumerate(constraints)
        self._rows = {row: c for row, c in rows if c is not None and c.active}
        self._num_words = max((c.num_words for c in self._rows.values()), default=0)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def window_mask(self, window: mx.array) -> mx.array | None:
        """What may follow each position of a window, given the drafts before it.

        Args:
            window: int32 [B, T], the last token and T-1 drafts; they are read here.

        Returns:
            uint8 [B, T, bytes], a bit for each token; None if anything may.
        """
        batch, length = window.shape
        drafts = np.array(window[:, 1:]).tolist() if length > 1 else [[]] * batch
        masks = self._all_allowed(batch, length)
        work = [
            (matcher, row * length, drafts[row])
            for row, constraint in self._rows.items()
            if (matcher := constraint.rewind()) is not None
        ]
        if work:
            _fill(work, masks.reshape(batch * length, self._num_words))
        finished = [c.finish_masks(masks[row], drafts[row]) for row, c in self._rows.items()]
        return _as_bytes(masks) if any(finished) else None

    def advance(self, tokens: mx.array, num_kept: mx.array) -> None:
        """Read the tokens int32 [B, T] that a step drew, and take the first `num_kept[b]`."""
        drawn, kept = np.array(tokens).tolist(), np.array(num_kept).tolist()
        for row, constraint in self._rows.items():
            constraint.advance(drawn[row][: kept[row]])

    def errors(self) -> dict[int, GrammarError]:
        """Why rows can't go on, by row."""
        return {row: c.error for row, c in self._rows.items() if c.error is not None}

    def draft_mask(self, batch: int) -> mx.array | None:
        """What the next draft of each row may be: uint8 [B, 1, bytes]; None: anything."""
        masks = self._all_allowed(batch, 1)
        restricted = [c.draft_mask(masks[row, 0]) for row, c in self._rows.items()]
        return _as_bytes(masks) if any(restricted) else None

    def drafted(self, tokens: mx.array) -> None:
        """Read the drafts int32 [B, 1] that were drawn."""
        drawn = np.array(tokens)[:, 0].tolist()
        for row, constraint in self._rows.items():
            constraint.drafted(drawn[row])

    def _all_allowed(self, batch: int, length: int) -> np.ndarray:
        return np.full((batch, length, self._num_words), -1, dtype=np.int32)


class DraftSampler:
    """Draws a batch's drafts, in order: each is masked, so that it can be accepted.

    Args:
        sampler: the batch's own.
        guide: its step's, advanced to the tokens that the drafts follow.
    """

    def __init__(self, sampler: Sampler, guide: Guide) -> None:
        self._sampler, self._guide = sampler, guide
        self._last: mx.array | None = None

    def draw(
        self,
        logits: mx.array,
        positions: mx.array,
        window: mx.array,
        *,
        ids: mx.array | None = None,
    ) -> mx.array:
        """See `Sampler`. The draft before is read first; the last one of all never is."""
        if self._last is not None:
            self._guide.drafted(self._last)
        mask = self._guide.draft_mask(logits.shape[0])
        self._last = self._sampler.draw(logits, positions, window, mask=mask, ids=ids)
        return self._last


def _fill(work: list[tuple[LLMatcher, int, list[int]]], masks: np.ndarray) -> None:
    """Masks of several matchers at once: (matcher, its first row of `masks`, drafts) each."""
    if work[0][2]:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), work, masks)
    else:
        fill_next_token_bitmask_par(_executor(), [(m, row) for m, row, _ in work], masks)


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


def _as_bytes(masks: np.ndarray) -> mx.array:
    return mx.array(masks.view(np.uint8))
