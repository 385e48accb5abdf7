"""What one sequence may say next: where it stands in its grammar, and in its budget.

Plain Python and numpy, on the engine's thread, between the steps of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from mlx_mtp.errors import GrammarError
from mlx_mtp.sampling.grammar import Budget, Grammar, grammar_error


@dataclass(frozen=True, slots=True)
class BudgetState:
    """How far a budget is used up.

    Args:
        budget: what is allowed.
        used: tokens so far, those of the forced end included.
        matched: how much of the end the last tokens were.
    """

    budget: Budget
    used: int = 0
    matched: int = 0

    @property
    def over(self) -> bool:
        """The end has come, by itself or forced."""
        return self.matched == len(self.budget.end)

    @property
    def forced(self) -> int | None:
        """The one token that may come next; None while that is free."""
        if self.over or self.used < self.budget.max_tokens:
            return None
        return self.budget.end[self.matched]

    def after(self, token: int) -> BudgetState:
        """The state once this token has come."""
        if self.over:
            return self
        end = self.budget.end
        going_on = token == end[self.matched]
        matched = self.matched + 1 if going_on else int(token == end[0])
        return replace(self, used=self.used + 1, matched=matched)


class Constraint:
    """One sequence's grammar and budget.

    A mask has a bit for each token, 1 where it is allowed, in 32-bit words, the lowest bit first.

    Args:
        grammar: compiled.

    Attributes:
        error: why the sequence can't go on; None while it can.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.error: GrammarError | None = None
        self.num_words = grammar.num_words
        self._grammar = grammar
        self._matcher = None if grammar.matcher is None else grammar.matcher.deep_copy()
        self._budget = BudgetState(grammar.budget) if grammar.budget is not None else None
        self._tokens: list[int] = []
        self._stuck: tuple[int, GrammarError] | None = None
        self._num_drafted = 0
        self._drafting = True
        self._draft_budget = self._budget

    @property
    def active(self) -> bool:
        """It may still forbid a token. Once it may not, it never will again."""
        return self._matcher is not None or (self._budget is not None and not self._budget.over)

    def rewind(self) -> LLMatcher | None:
        """Take the drafts back: the grammar's state after the tokens so far, if there is one."""
        matcher, drafted = self._matcher, self._num_drafted
        if matcher is not None and (drafted or not self._drafting):
            if matcher.is_error() or (drafted and not matcher.rollback(drafted)):
                self._rebuild()
            self._num_drafted, self._drafting = 0, True
        self._draft_budget = self._budget
        return self._matcher

    def finish_masks(self, masks: np.ndarray, drafts: Sequence[int]) -> bool:
        """Correct the masks that the matcher made of a window.

        Args:
            masks: int32 [T, words], after the last token and after each draft; all ones where the
                matcher wrote none, which is after a draft that is not allowed.
            drafts: T - 1 token ids.

        Returns:
            Whether some token is forbidden, as far as this row knows.
        """
        self._stuck = None
        if self._matcher is not None and self._matcher.is_error():
            self._fill_singly(masks, drafts)
        restricted = self._matcher is not None
        budget = self._budget
        for position in range(len(masks)):
            restricted |= _force(masks[position], budget)
            if budget is not None and position < len(drafts):
                budget = budget.after(drafts[position])
        return restricted

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the tokens that a step brought; `error` tells if that went wrong."""
        if self.error is not None:
            return
        if self._stuck is not None and len(tokens) > self._stuck[0]:
            self.error = self._stuck[1]
            return
        matcher = self.rewind()
        for token in tokens:
            self._budget = self._budget and self._budget.after(token)
        self._draft_budget = self._budget
        self._tokens += tokens
        # One by one: `consume_tokens` refuses the end-of-sequence token of a grammar that is over.
        if matcher is not None and not all(map(matcher.consume_token, tokens)):
            self.error = _failure(matcher)

    def draft_mask(self, mask: np.ndarray) -> bool:
        """Write what the next draft may be, int32 [words]; False if that is anything."""
        restricted = False
        if self._matcher is not None and self._drafting:
            fill_next_token_bitmask(self._matcher, mask[None])
            self._drafting = restricted = not self._matcher.is_error()
        return _force(mask, self._draft_budget) or restricted

    def drafted(self, token: int) -> None:
        """A draft has been drawn."""
        self._draft_budget = self._draft_budget and self._draft_budget.after(token)
        if self._matcher is None or not self._drafting:
            return
        # After the end nothing counts, and whatever was not masked may be wrong.
        self._drafting = not self._matcher.is_stopped() and self._matcher.consume_token(token)
        self._num_drafted += self._drafting

    def _rebuild(self) -> None:
        """A matcher that has failed once stays so: begin anew. What drafts meet may never come."""
        assert self._grammar.matcher is not None
        self._matcher = self._grammar.matcher.deep_copy()
        for token in self._tokens:
            self._matcher.consume_token(token)

    def _fill_singly(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """Find out which position of a window it is that the matcher fails at."""
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


def _failure(matcher: LLMatcher) -> GrammarError:
    return GrammarError(f"The answer's grammar can't be continued: {grammar_error(matcher)}")


def _force(mask: np.ndarray, budget: BudgetState | None) -> bool:
    """Allow nothing but the token that a budget forces, if it does."""
    token = None if budget is None else budget.forced
    if token is None:
        return False
    mask[:] = 0
    mask.view(np.uint32)[token // 32] = np.uint32(1 << (token % 32))
    return True
