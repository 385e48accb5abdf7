"""Where drafts come from. The MTP head is one source; others can follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.models.draft_head import DraftHead
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.sampler import TokenSampler

_MOST_LATE = 16
"""Positions that the head's KV may be behind by while nothing is drafted."""


class DraftState(Protocol):
    """What a proposer keeps for the rows of one batch."""

    def take(self, rows: Sequence[int]) -> DraftState:
        """State of these rows alone, in the order given."""

    def extend(self, other: DraftState) -> None:
        """Append the other's rows."""

    def prefix_kv(self) -> RaggedKVCache | None:
        """KV that a cached prefix must hold besides the trunk's; None if there is none.

        Row p is that of the hidden state at p and the token at p+1 (`cache/prefix_state.py`). That
        of a new state may be filled.
        """

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
        sampler: TokenSampler,
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
    """The head's own KV of the rows of a batch, and the positions it has yet to take in.

    While nothing is drafted a step brings one position a row, and no one reads the head's KV. They
    are kept and written together, so that a head that is not used costs next to nothing.

    Args:
        cache: the head's KV.
        write: writes positions of all rows: (cache, hidden [B, T, H], targets int32 [B, T],
            start int32 [B]).
    """

    def __init__(
        self,
        cache: RaggedKVCache,
        write: Callable[[RaggedKVCache, mx.array, mx.array, mx.array], object],
    ) -> None:
        self.cache = cache
        self._write = write
        self._late: list[tuple[mx.array, mx.array]] = []
        self._start: mx.array | None = None

    def put_off(self, hidden: mx.array, targets: mx.array, start: mx.array) -> None:
        """Keep one position of each row for later; a row that has ended brings what is not read.

        Args:
            hidden: [B, 1, H].
            targets: int32 [B, 1].
            start: int32 [B].
        """
        if self._start is None:
            self._start = start
        self._late.append((hidden, targets))
        if len(self._late) == _MOST_LATE:
            self.catch_up()

    def catch_up(self) -> None:
        """Write what was put off. The cache must have room for it (`reserve`)."""
        if self._start is None:
            return
        hidden, targets = (mx.concatenate(list(each), axis=1) for each in zip(*self._late))
        self._write(self.cache, hidden, targets, self._start)
        self._late, self._start = [], None

    def take(self, rows: Sequence[int]) -> HeadState:
        """See `DraftState`."""
        self.catch_up()
        return HeadState(self.cache.take(mx.array(list(rows), dtype=mx.int32)), self._write)

    def extend(self, other: DraftState) -> None:
        """See `DraftState`."""
        assert isinstance(other, HeadState)
        self.catch_up()
        other.catch_up()
        self.cache.extend(other.cache)

    def prefix_kv(self) -> RaggedKVCache:
        """See `DraftState`."""
        self.catch_up()
        return self.cache

    def arrays(self) -> list[mx.array]:
        """See `DraftState`."""
        late = [a for position in self._late for a in position]
        return [*self.cache.arrays(), *late, *([] if self._start is None else [self._start])]


class MTPProposer:
    """Drafts with the model's own head.

    Args:
        model: a loaded model that has a head.
        vocabulary: rows of lm_head to draft from; None for all of them.
    """

    def __init__(self, model: LoadedModel, vocabulary: DraftHead | None = None) -> None:
        assert model.head is not None
        self._model = model
        self._head: MTPHead = model.head
        self._lm_head = None if vocabulary is None else vocabulary.layer
        self._ids = None if vocabulary is None else vocabulary.ids

    def make_state(self, request_ids: Sequence[str]) -> HeadState:
        """See `Proposer`."""
        return HeadState(RaggedKVCache(len(request_ids)), self._write)

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
        sampler: TokenSampler,
    ) -> mx.array:
        """See `Proposer`.

        Row p of the head's KV joins the hidden state at p with the token at p+1, so the kept rows
        are written from the trunk's true hidden states, over what a recursion guessed before.
        """
        assert isinstance(state, HeadState)
        cache = state.cache
        cache.reserve(limit + max(num_draft_tokens - 1, 0))
        if num_draft_tokens == 0 and targets.shape[1] == 1:
            state.put_off(hidden, targets, start)
            return mx.zeros((targets.shape[0], 0), dtype=mx.int32)
        state.catch_up()
        z = self._write(cache, hidden, targets, start)
        if num_draft_tokens == 0:
            return mx.zeros((targets.shape[0], 0), dtype=mx.int32)
        last = mx.maximum(num_kept - 1, 0)
        z = mx.take_along_axis(z, last[:, None, None], axis=1)
        token = mx.take_along_axis(targets, last[:, None], axis=1)
        return self._recur(cache, z, token, start + last, num_draft_tokens, sampler)

    def _write(
        self, cache: RaggedKVCache, hidden: mx.array, targets: mx.array, start: mx.array
    ) -> mx.array:
        """Take positions into the head's KV; returns their `MTPHead.join`, [B, T, H]."""
        z = self._head.join(self._model.embed(targets), hidden)
        self._head.write(z, cache, start)
        return z

    def _recur(
        self,
        cache: RaggedKVCache,
        z: mx.array,
        token: mx.array,
        position: mx.array,
        num_draft_tokens: int,
        sampler: TokenSampler,
    ) -> mx.array:
        """k passes of the head from row `position` on, each fed the draft before it: [B, k]."""
        drafts: list[mx.array] = []
        while True:
            m = self._head.run(z, cache, position)
            # The head's row p predicts the token at p + 2.
            logits = self._model.logits(m, self._lm_head)
            history = mx.concatenate([token, *drafts], axis=1)
            drafts.append(sampler.draw(logits, position[:, None] + 2, history, ids=self._ids))
            if len(drafts) == num_draft_tokens:
                return mx.concatenate(drafts, axis=1)
            position = position + 1
            z = self._head.join(self._model.embed(drafts[-1]), m)
            self._head.write(z, cache, position)
