"""Where drafts come from. The MTP head is one source; others can follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.sampler import Sampler


class DraftState(Protocol):
    """What a proposer keeps for the rows of one batch."""

    def take(self, rows: Sequence[int]) -> DraftState:
        """State of these rows alone, in the order given."""

    def extend(self, other: DraftState) -> None:
        """Append the other's rows."""

    def arrays(self) -> list[mx.array]:
        """What must be evaluated with a step."""


class Proposer(Protocol):
    """Drafts tokens for the rows of a batch."""

    def make_state(self, request_ids: Sequence[str]) -> DraftState:
        """State for rows that have not begun."""

    def propose(
        self,
        state: DraftState,
        *,
        hidden: mx.array,
        targets: mx.array,
        start: mx.array,
        num_kept: mx.array,
        num_draft_tokens: int,
        limit: int,
        sampler: Sampler,
    ) -> mx.array:
        """Take in a window that was just computed, and draft what follows its kept part.

        Args:
            state: of these rows.
            hidden: the trunk's post-norm hidden states of the window, [B, T, H].
            targets: the token after each of the window's positions, int32 [B, T].
            start: absolute position of the window's first token, int32 [B].
            num_kept: how many of the window's positions are valid, int32 [B].
            num_draft_tokens: k, how many to draft; 0 to take in the window alone.
            limit: a bound of every row's length after the window.
            sampler: draws the drafts with the noise that will draw the tokens themselves.

        Returns:
            int32 [B, k].
        """


class HeadState:
    """The head's own KV of the rows of a batch."""

    def __init__(self, cache: RaggedKVCache) -> None:
        self.cache = cache

    def take(self, rows: Sequence[int]) -> HeadState:
        """See `DraftState`."""
        return HeadState(self.cache.take(mx.array(list(rows), dtype=mx.int32)))

    def extend(self, other: DraftState) -> None:
        """See `DraftState`."""
        assert isinstance(other, HeadState)
        self.cache.extend(other.cache)

    def arrays(self) -> list[mx.array]:
        """See `DraftState`."""
        return self.cache.arrays()


class MTPProposer:
    """Drafts with the model's own head.

    Args:
        model: a loaded model that has a head.
    """

    def __init__(self, model: LoadedModel) -> None:
        assert model.head is not None
        self._model = model
        self._head: MTPHead = model.head

    def make_state(self, request_ids: Sequence[str]) -> HeadState:
        """See `Proposer`."""
        return HeadState(RaggedKVCache(len(request_ids)))

    def propose(
        self,
        state: DraftState,
        *,
        hidden: mx.array,
        targets: mx.array,
        start: mx.array,
        num_kept: mx.array,
        num_draft_tokens: int,
        limit: int,
        sampler: Sampler,
    ) -> mx.array:
        """See `Proposer`.

        Row p of the head's KV joins the hidden state at p with the token at p+1, so the kept rows
        are written from the trunk's true hidden states, over what a recursion guessed before.
        """
        assert isinstance(state, HeadState)
        cache = state.cache
        cache.reserve(limit + max(num_draft_tokens - 1, 0))
        z = self._head.join(self._model.embed(targets), hidden)
        self._head.write(z, cache, start)
        if num_draft_tokens == 0:
            return mx.zeros((targets.shape[0], 0), dtype=mx.int32)
        last = mx.maximum(num_kept - 1, 0)
        z = mx.take_along_axis(z, last[:, None, None], axis=1)
        token = mx.take_along_axis(targets, last[:, None], axis=1)
        return self._recur(cache, z, token, start + last, num_draft_tokens, sampler)

    def _recur(
        self,
        cache: RaggedKVCache,
        z: mx.array,
        token: mx.array,
        position: mx.array,
        num_draft_tokens: int,
        sampler: Sampler,
    ) -> mx.array:
        """k passes of the head from row `position` on, each fed the draft before it: [B, k]."""
        drafts: list[mx.array] = []
        while True:
            m = self._head.run(z, cache, position)
            # The head's row p predicts the token at p + 2.
            logits = self._model.logits(m)
            history = mx.concatenate([token, *drafts], axis=1)
            drafts.append(sampler.draw(logits, position[:, None] + 2, history))
            if len(drafts) == num_draft_tokens:
                return mx.concatenate(drafts, axis=1)
            position = position + 1
            z = self._head.join(self._model.embed(drafts[-1]), m)
            self._head.write(z, cache, position)
