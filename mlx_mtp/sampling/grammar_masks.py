"""Masks of the tokens that grammars, thinking budgets and bad words allow, for windows and drafts.

A mask depends on the tokens before it: a step's tokens are read before the next step's masks are
made, and each draft is read before the next draft's mask is made. A mask has one bit per token, the
lowest bit first.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import accumulate

import mlx.core as mx
import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from mlx_mtp.errors import GrammarError
from mlx_mtp.sampling.bad_words import BadWords
from mlx_mtp.sampling.grammar import Grammar, ThinkingBudget, grammar_error
from mlx_mtp.sampling.sampler import Sampler

_Place = tuple[ThinkingBudget, bytes]
"""State after a token: a budget and what is used of it, and a `tail` (see `BadWords`)."""
_NOTHING_LEFT = (
    "The answer can't be continued: no token fulfils all of bad_words, allowed_token_ids, the "
    "grammar and the thinking budget."
)


class Constraint:
    """The state of one sequence in its grammar, budget and bad words."""

    def __init__(
        self,
        grammar: Grammar | None,
        bad_words: BadWords | None = None,
        allowed: Collection[int] | None = None,  # ids that the sampler allows; None: all
    ) -> None:
        self.error: GrammarError | None = None  # why the sequence can't continue
        self.num_words = max(part.num_words for part in (grammar, bad_words) if part is not None)
        self._start = None if grammar is None else grammar.matcher
        self._matcher = None if self._start is None else self._start.deep_copy()
        self._bad_words = bad_words
        self._allowed = None if allowed is None else frozenset(allowed)
        self._place: _Place = (ThinkingBudget() if grammar is None else grammar.budget), b""
        self._tokens: list[int] = []
        self._stuck: tuple[int, GrammarError] | None = None
        # The matcher also consumes drafts, until one fails; `rewind` rolls them back.
        self._num_drafted = 0
        self._drafting = True
        self._draft_place = self._place

    @property
    def active(self) -> bool:
        """True while it can forbid tokens; once False it stays False."""
        limited = self._matcher is not None or self._bad_words is not None
        return limited or not self._place[0].over

    def rewind(self) -> LLMatcher | None:
        """Roll back the drafts; returns the matcher, if there is one."""
        matcher, drafted = self._matcher, self._num_drafted
        if matcher is not None and (drafted or not self._drafting):
            if matcher.is_error() or (drafted and not matcher.rollback(drafted)):
                self._rebuild()
            self._num_drafted, self._drafting = 0, True
        self._draft_place = self._place
        return self._matcher

    def finish_masks(self, masks: np.ndarray, drafts: Sequence[int]) -> bool:
        """Complete the masks, int32 [T, words], that the matcher made for a window of T-1 drafts.

        Masks after a forbidden draft are all ones. Returns whether any token is forbidden.
        """
        self._stuck = None
        if self._matcher is not None and self._matcher.is_error():
            self._fill_singly(masks, drafts)
        restricted = self._matcher is not None
        for mask, place in zip(masks, accumulate(drafts, self._after, initial=self._place)):
            restricted |= self._restrict(mask, place)
        return restricted

    def advance(self, tokens: Sequence[int]) -> None:
        """Consume the tokens of a step; sets `error` if the grammar does not allow them."""
        if self.error is not None:
            return
        if self._stuck is not None and len(tokens) > self._stuck[0]:
            self.error = self._stuck[1]
            return
        matcher = self.rewind()
        if not all(map(self._advance, tokens)):
            self.error = GrammarError(_NOTHING_LEFT)  # The sampler has drawn a token anyway.
        self._draft_place = self._place
        self._tokens += tokens
        # One by one, as `consume_tokens` refuses the end token of a grammar that has ended.
        if matcher is not None and not all(map(matcher.consume_token, tokens)):
            alone = self._allowed is None and self._bad_words is None
            self.error = _failure(matcher) if alone else GrammarError(_NOTHING_LEFT)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Returns how many of these tokens, from the first on, are allowed to follow."""
        matcher = self.rewind()
        count = len(tokens) if matcher is None else matcher.validate_tokens(list(tokens))
        places = accumulate(tokens[:count], self._after, initial=self._place)
        for number, (token, (budget, tail)) in enumerate(zip(tokens[:count], places)):
            if budget.forced not in (None, token):
                return number
            if self._bad_words is not None and self._bad_words.completed(tail, token):
                return number
        return count

    def draft_mask(self, mask: np.ndarray) -> bool:
        """Write the next draft's mask, int32 [words]; returns False if it allows all tokens."""
        restricted = False
        if self._matcher is not None and self._drafting:
            fill_next_token_bitmask(self._matcher, mask[None])
            self._drafting = restricted = not self._matcher.is_error()
        return self._restrict(mask, self._draft_place) or restricted

    def drafted(self, token: int) -> None:
        self._draft_place = self._after(self._draft_place, token)
        if self._matcher is None or not self._drafting:
            return
        # After the end no draft counts, and a draft that was not masked can be forbidden.
        self._drafting = not self._matcher.is_stopped() and self._matcher.consume_token(token)
        self._num_drafted += self._drafting

    def _after(self, place: _Place, token: int) -> _Place:
        (budget, tail), words = place, self._bad_words
        return budget.advanced(token), tail if words is None else words.next_tail(tail, token)

    def _restrict(self, mask: np.ndarray, place: _Place) -> bool:
        """Apply the budget, or else the bad words, to a mask; returns False if neither does."""
        budget, tail = place
        if (token := budget.forced) is not None:
            mask[:] = 0
            mask.view(np.uint32)[token // 32] = np.uint32(1 << (token % 32))
        elif self._bad_words is not None:
            self._bad_words.forbid(mask, tail)
        return token is not None or self._bad_words is not None

    def _advance(self, token: int) -> bool:
        """Move to the next token; returns False if it was forbidden."""
        (budget, tail), words = self._place, self._bad_words
        self._place = self._after(self._place, token)
        if budget.forced is not None:
            return token == budget.forced
        allowed = self._allowed is None or token in self._allowed
        return allowed and (words is None or not words.completed(tail, token))

    def _rebuild(self) -> None:
        """Make a new matcher: a failed one stays failed, even if a rejected draft caused it."""
        assert self._start is not None
        self._matcher = self._start.deep_copy()
        for token in self._tokens:
            self._matcher.consume_token(token)

    def _fill_singly(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        self._rebuild()
        assert self._matcher is not None
        for position in range(len(masks)):
            fill_next_token_bitmask(self._matcher, masks, position)
            if self._matcher.is_error():
                self._stuck = position, _failure(self._matcher)
                masks[position] = -1
                break
            if position < len(drafts) and not self._matcher.consume_token(drafts[position]):
                break
        self._rebuild()


class GrammarMasks:
    """The masks of a batch's rows for one step; false if no row is constrained."""

    def __init__(self, constraints: Iterable[Constraint | None]) -> None:
        rows = enumerate(constraints)
        self._rows = {row: c for row, c in rows if c is not None and c.active}
        self._num_words = max((c.num_words for c in self._rows.values()), default=0)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def window_mask(self, window: mx.array) -> mx.array | None:
        """Returns the mask after each position of a window: uint8 [B, T, bytes]; None: all allowed.

        `window` is int32 [B, T]; its drafts are read.
        """
        batch, length = window.shape
        drafts = np.array(window[:, 1:]).tolist()
        masks = self._all_allowed(batch, length)
        flat = masks.reshape(batch * length, self._num_words)
        work = [
            (matcher, row * length, drafts[row])
            for row, constraint in self._rows.items()
            if (matcher := constraint.rewind()) is not None
        ]
        if work and length > 1:
            fill_next_token_bitmask_par_with_draft_tokens(_executor(), work, flat)
        elif work:
            fill_next_token_bitmask_par(_executor(), [(m, row) for m, row, _ in work], flat)
        restricted = [c.finish_masks(masks[row], drafts[row]) for row, c in self._rows.items()]
        return mx.array(masks.view(np.uint8)) if any(restricted) else None

    def advance(self, tokens: mx.array, num_kept: mx.array) -> None:
        """Read a step's tokens, int32 [B, T]; each row consumes its first `num_kept[b]`."""
        ids, counts = np.array(tokens).tolist(), np.array(num_kept).tolist()
        for row, constraint in self._rows.items():
            constraint.advance(ids[row][: counts[row]])

    def errors(self) -> dict[int, GrammarError]:
        return {row: c.error for row, c in self._rows.items() if c.error is not None}

    def draft_mask(self, batch: int) -> mx.array | None:
        masks = self._all_allowed(batch, 1)
        restricted = [c.draft_mask(masks[row, 0]) for row, c in self._rows.items()]
        return mx.array(masks.view(np.uint8)) if any(restricted) else None

    def drafted(self, tokens: mx.array) -> None:
        ids = np.array(tokens)[:, 0].tolist()
        for row, constraint in self._rows.items():
            constraint.drafted(ids[row])

    def _all_allowed(self, batch: int, length: int) -> np.ndarray:
        return np.full((batch, length, self._num_words), -1, dtype=np.int32)


NO_MASKS = GrammarMasks(())


class DraftSampler:
    """Samples a batch's drafts in order, each masked like the token that it guesses."""

    def __init__(self, sampler: Sampler, masks: GrammarMasks) -> None:
        self._sampler, self._masks = sampler, masks
        self._last: mx.array | None = None

    def draw(
        self, logits: mx.array, positions: mx.array, window: mx.array, ids: mx.array | None = None
    ) -> mx.array:
        """Like `Sampler.draw`, but first reads the previous draft; the last draft is not read."""
        if self._last is not None:
            self._masks.drafted(self._last)
        mask = self._masks.draft_mask(logits.shape[0])
        self._last = self._sampler.draw(logits, positions, window, ids, mask)
        return self._last


TokenSampler = Sampler | DraftSampler


def _failure(matcher: LLMatcher) -> GrammarError:
    return GrammarError(f"The answer's grammar can't be continued: {grammar_error(matcher)}")


_executor = cache(LLExecutor)
