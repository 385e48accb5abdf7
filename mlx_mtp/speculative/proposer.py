"""What a source of drafts must do, and the model's own multi-token-prediction head as one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import mlx.core as mx

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.loaded import DraftHead, LoadedModel
from mlx_mtp.sampling.sampler import TokenSampler

logger = logging.getLogger(__name__)

_MOST_DEFERRED = 16  # positions that the head's KV may be behind while nothing is drafted


class Computed(NamedTuple):
    """A window that was just computed: a prefill chunk or a verify window, T positions of B rows.

    A row's last token is `targets[b, num_kept[b] - 1]`, at position `start[b] + num_kept[b]`.
    """

    hidden: mx.array  # [B, T, H], the trunk's post-norm hidden states
    targets: mx.array  # int32 [B, T], the token after each position
    start: mx.array  # int32 [B], absolute position of the first one
    num_kept: mx.array  # int32 [B], how many positions are valid; 0 for ended rows
    limit: int  # a bound of every row's length after the window


class DraftState(Protocol):
    """What a proposer keeps for the B rows of one batch."""

    def select(self, rows: mx.array) -> Self:
        """State of these rows, int32 [B'], in the order given; this one stays valid."""

    def extend(self, other: Self) -> None:
        """Append the other's rows."""

    def prefix_kv(self) -> RaggedKVCache | None:
        """KV, empty in a new state, that a cached prefix must hold besides the trunk's, if any."""

    def arrays(self) -> list[mx.array]:
        """What must be evaluated with a step."""


class DraftProposer(Protocol):
    """A source of drafts. Nothing in it may wait for the device.

    A draft changes no token: it is only accepted if it equals the token that the model draws.
    """

    def make_state(
        self, request_ids: Sequence[str], prompts: Sequence[Sequence[int]]
    ) -> DraftState:
        """State for B new rows."""

    def propose(
        self, state: Any, window: Computed, num_draft_tokens: int, sampler: TokenSampler
    ) -> mx.array:
        """Update a state from a window of its rows, and draft the k next tokens: int32 [B, k].

        Called after every prefill chunk and every verify window, in order; k may be 0. With a
        prefix from the cache, the first window begins at the prefix's last position. `sampler`
        draws drafts from logits with the noise that will draw the tokens themselves.
        """


# Writes positions: (cache, hidden [B, T, H], targets int32 [B, T], start int32 [B]).
Write = Callable[[RaggedKVCache, mx.array, mx.array, mx.array], object]


class HeadState:
    """The head's own KV of the rows of a batch, and the positions that are not written yet.

    While nothing is drafted these are deferred, so that a parked head costs almost nothing.
    """

    def __init__(self, cache: RaggedKVCache, write: Write) -> None:
        self.cache = cache
        self._write = write
        self._deferred: list[tuple[mx.array, mx.array]] = []
        self._start: mx.array | None = None

    def defer(self, window: Computed) -> None:
        if self._start is None:
            self._start = window.start
        self._deferred.append((window.hidden, window.targets))
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
        self, state: HeadState, window: Computed, num_draft_tokens: int, sampler: TokenSampler
    ) -> mx.array:
        hidden, targets, start, num_kept, limit = window
        state.cache.reserve(limit + max(num_draft_tokens - 1, 0))
        if num_draft_tokens == 0 and targets.shape[1] == 1:
            state.defer(window)
            return targets[:, :0]
        state.catch_up()
        # Row p of the head's KV joins the hidden state at p with the token at p+1, so the kept rows
        # are written from the trunk's true hidden states, over what the recursion wrote before.
        z = self._write(state.cache, hidden, targets, start)
        if num_draft_tokens == 0:
            return targets[:, :0]
        last = mx.maximum(num_kept - 1, 0)
        z = mx.take_along_axis(z, last[:, None, None], axis=1)
        history = mx.take_along_axis(targets, last[:, None], axis=1)
        return self._recur(state.cache, z, history, start + last, num_draft_tokens, sampler)

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
        history: mx.array,
        position: mx.array,
        num_draft_tokens: int,
        sampler: TokenSampler,
    ) -> mx.array:
        """k passes of the head from row `position` and last token `history` on: [B, k]."""
        while True:
            m = self._head.run(z, cache, position)
            # The head's row p predicts the token at p + 2.
            logits = self._model.logits(m, self._lm_head)
            draft = sampler.draw(logits, position[:, None] + 2, history, ids=self._ids)
            history = mx.concatenate([history, draft], axis=1)
            if history.shape[1] > num_draft_tokens:
                return history[:, 1:]
            position = position + 1
            z = self._write(cache, m, draft, position)


def make_mtp_proposer(model: LoadedModel, draft_ids: Sequence[int] | None) -> MTPProposer | None:
    """The "mtp" source; None for a model that was loaded without its head."""
    if model.head is None:
        return None
    if draft_ids is None:
        return MTPProposer(model)
    vocabulary = DraftHead(model, draft_ids)
    logger.info("The copy of lm_head's rows to draft with takes %.1f MB.", vocabulary.nbytes / 1e6)
    return MTPProposer(model, vocabulary)
