"""Drafts of the model's own multi-token-prediction head."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.loaded import DraftHead, LoadedModel
from mlx_mtp.sampling.sampler import TokenSampler

logger = logging.getLogger(__name__)

_MOST_DEFERRED = 16
"""Positions that the head's KV may be behind while nothing is drafted."""

Write = Callable[[RaggedKVCache, mx.array, mx.array, mx.array], object]
"""Writes positions: (cache, hidden [B, T, H], targets int32 [B, T], start int32 [B])."""


class HeadState:
    """The head's own KV of the rows of a batch, and the positions that are not written yet.

    While nothing is drafted a step adds one position a row, and the head's KV is not read. These
    positions are deferred and written together, so that a parked head costs almost nothing.
    """

    def __init__(self, cache: RaggedKVCache, write: Write) -> None:
        self.cache = cache
        self._write = write
        self._deferred: list[tuple[mx.array, mx.array]] = []
        self._start: mx.array | None = None

    def defer(self, hidden: mx.array, targets: mx.array, start: mx.array) -> None:
        """Keep one position a row for later: hidden [B, 1, H], targets int32 [B, 1], start [B]."""
        if self._start is None:
            self._start = start
        self._deferred.append((hidden, targets))
        if len(self._deferred) == _MOST_DEFERRED:
            self.catch_up()

    def catch_up(self) -> None:
        """Write the deferred positions. The cache must have room for them (`reserve`)."""
        if self._start is None:
            return
        hidden, targets = (mx.concatenate(list(each), axis=1) for each in zip(*self._deferred))
        self._write(self.cache, hidden, targets, self._start)
        self._deferred, self._start = [], None

    def select(self, rows: mx.array) -> HeadState:
        self.catch_up()
        return HeadState(self.cache.select(rows), self._write)

    def extend(self, other: HeadState) -> None:
        self.catch_up()
        other.catch_up()
        self.cache.extend(other.cache)

    def prefix_kv(self) -> RaggedKVCache:
        self.catch_up()
        return self.cache

    def arrays(self) -> list[mx.array]:
        deferred = [a for position in self._deferred for a in position]
        return [*self.cache.arrays(), *deferred, *([] if self._start is None else [self._start])]


class MTPProposer:
    """A `DraftProposer` with a model's head; `vocabulary` limits its tokens."""

    def __init__(self, model: LoadedModel, vocabulary: DraftHead | None = None) -> None:
        assert model.head is not None
        self._model = model
        self._head: MTPHead = model.head
        self._lm_head = None if vocabulary is None else vocabulary.layer
        self._ids = None if vocabulary is None else vocabulary.ids

    def make_state(
        self, request_ids: Sequence[str], prompts: Sequence[Sequence[int]] = ()
    ) -> HeadState:
        return HeadState(RaggedKVCache(len(request_ids)), self._write)

    def propose(
        self,
        state: HeadState,
        *,
        hidden: mx.array,
        targets: mx.array,
        start: mx.array,
        num_kept: mx.array,
        num_draft_tokens: int,
        limit: int,
        sampler: TokenSampler,
    ) -> mx.array:
        cache, none = state.cache, mx.zeros((targets.shape[0], 0), dtype=mx.int32)
        cache.reserve(limit + max(num_draft_tokens - 1, 0))
        if num_draft_tokens == 0 and targets.shape[1] == 1:
            state.defer(hidden, targets, start)
            return none
        state.catch_up()
        # Row p of the head's KV joins the hidden state at p with the token at p+1, so the kept rows
        # are written from the trunk's true hidden states, over what the recursion wrote before.
        z = self._write(cache, hidden, targets, start)
        if num_draft_tokens == 0:
            return none
        last = mx.maximum(num_kept - 1, 0)
        z = mx.take_along_axis(z, last[:, None, None], axis=1)
        token = mx.take_along_axis(targets, last[:, None], axis=1)
        return self._recur(cache, z, token, start + last, num_draft_tokens, sampler)

    def _write(
        self, cache: RaggedKVCache, hidden: mx.array, targets: mx.array, start: mx.array
    ) -> mx.array:
        """Write positions to the head's KV; returns their `MTPHead.join`, [B, T, H]."""
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


def make_mtp_proposer(model: LoadedModel, draft_ids: Sequence[int] | None) -> MTPProposer | None:
    """The "mtp" source (see `SOURCES`); None for a model that was loaded without its head."""
    if model.head is None:
        return None
    if draft_ids is None:
        return MTPProposer(model)
    vocabulary = DraftHead(model, draft_ids)
    logger.info("The copy of lm_head's rows to draft with takes %.1f MB.", vocabulary.nbytes / 1e6)
    return MTPProposer(model, vocabulary)
