"""Drafts of the model's multi-token-prediction (MTP) head: after a window, for the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.packing import Index, Packing
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.model import DraftVocabulary, LoadedModel
from mlx_mtp.sampling.grammar_masks import TokenSampler

logger = logging.getLogger(__name__)

_MOST_DEFERRED = 16  # positions per row that the head's KV may lack while nothing is drafted


class Computed(NamedTuple):
    """A prefill chunk or a verify window that was just computed: N tokens of B rows."""

    hidden: mx.array  # [N, H], the target model's hidden states after its last norm
    targets: mx.array  # int32 [N], the token after each of the N
    last: Index  # [B], which of the N is the last one that a row keeps; its first if it has ended
    packing: Packing  # of the N tokens
    cache: BatchCache  # has room for the window, and for all drafts but the last


# Writes tokens, int32 [N], with hidden states [N, H].
Write = Callable[[BatchCache, Packing, mx.array, mx.array], object]


class DeferredWrites:
    """Positions of a batch's rows that are not in the head's KV yet.

    They are deferred while nothing is drafted, so that a parked head costs almost nothing. Without
    a head there are none.
    """

    def __init__(self, write: Write = lambda *_: None) -> None:
        self._write = write
        # By window: first positions, hidden states, targets.
        self._deferred: list[tuple[mx.array, mx.array, mx.array]] = []

    def defer(self, window: Computed) -> None:
        self._deferred.append((window.packing.positions, window.hidden, window.targets))
        if len(self._deferred) == _MOST_DEFERRED:
            self.settle(window.cache)

    def settle(self, cache: BatchCache) -> None:
        """Write what is deferred to the head's KV: before rows come, go, or are copied."""
        if self._deferred:
            starts, *tokens = zip(*self._deferred)
            packing = cache.packing(starts[0], [len(starts)] * starts[0].shape[0])
            hidden, targets = (mx.stack([*each], axis=1).flatten(0, 1) for each in tokens)
            self._write(cache, packing, hidden, targets)
        self._deferred = []

    def select(self, rows: mx.array) -> DeferredWrites:
        """The state of these rows, int32 [B'], after `settle`; this one stays valid."""
        assert not self._deferred
        return DeferredWrites(self._write)

    def extend(self, other: DeferredWrites) -> None:
        """Append the other's rows; both are settled."""
        assert not (self._deferred or other._deferred)

    def arrays(self) -> list[mx.array]:
        """What must be evaluated with a step."""
        return [array for window in self._deferred for array in window]


class MTPDrafter:
    """Drafts with a model's head; `vocabulary` limits its tokens. Nothing waits for the device.

    A draft changes no token: it is accepted only if it equals the token that the model samples.
    """

    def __init__(self, model: LoadedModel, vocabulary: DraftVocabulary | None = None) -> None:
        assert model.head is not None
        self._model = model
        self._head: MTPHead = model.head
        self._lm_head = None if vocabulary is None else vocabulary.layer
        self._ids = None if vocabulary is None else vocabulary.ids

    def make_state(self, cache: BatchCache) -> DeferredWrites:
        """State for the new rows of a cache, which gets a KV cache for the head."""
        cache.head = RaggedKVCache()
        return DeferredWrites(self._write)

    def propose(
        self,
        state: DeferredWrites,
        window: Computed,
        num_drafts: Sequence[int],
        sampler: TokenSampler,
    ) -> mx.array:
        """Update a state from a window of its rows, and draft `num_drafts[b]` tokens for each.

        Returns int32 [B, k], k the largest of these numbers; what a row did not ask for means
        nothing. Call it after every prefill chunk and every verify window, in order. After a cached
        prefix the first window begins at the prefix's last position, whose entry needs the token
        after the prefix. `sampler` draws drafts with the noise that will sample the tokens.
        """
        hidden, targets, last, packing, cache = window
        nothing = mx.zeros((len(num_drafts), 0), dtype=mx.int32)
        if not any(num_drafts) and packing.longest == 1 and packing.images is None:
            state.defer(window)
            return nothing
        state.settle(cache)
        # Entry p of the head's KV joins the hidden state at p with the token at p + 1. Those of the
        # window are written from the target model's hidden states, over those of earlier drafts.
        z = self._write(cache, packing, hidden, targets)
        if not any(num_drafts):
            return nothing
        assert cache.head is not None
        newest, position, z = targets[last][:, None], packing.positions[last], z[last]
        m: mx.array | None = None  # [B, 1, H], the head's output
        drafts: list[mx.array] = []
        for number in range(max(num_drafts)):
            # A pass of the head for the rows with a draft left.
            lengths = [int(count > number) for count in num_drafts]
            packing = cache.packing(position, lengths)
            if m is None:
                z = packing.rectangle.flat(z[:, None])
            else:
                tokens = packing.rectangle.flat(drafts[-1])
                z = self._write(cache, packing, packing.rectangle.flat(m), tokens)
            out = self._head.run_layer(z, cache.head, packing)
            m = packing.rectangle.fill(out)
            # The head's output at p predicts the token at p + 2.
            logits = packing.rectangle.fill(self._model.logits(out, self._lm_head))
            before = mx.concatenate([newest, *drafts], axis=1)
            drafts.append(sampler.draw(logits, position[:, None] + 2, before, ids=self._ids))
            position = position + 1
        return mx.concatenate(drafts, axis=1)

    def _write(
        self, cache: BatchCache, packing: Packing, hidden: mx.array, targets: mx.array
    ) -> mx.array:
        """Write tokens to the head's KV; returns their z, [N, H] (see `MTPHead`)."""
        assert cache.head is not None
        embedded = self._model.embed(targets, packing.images)
        return self._head.write(embedded, hidden, cache.head, packing)


def make_drafter(model: LoadedModel, draft_ids: Sequence[int] | None) -> MTPDrafter | None:
    """The drafter of a model, limited to `draft_ids`; None if it was loaded without its head."""
    if model.head is None:
        return None
    if draft_ids is None:
        return MTPDrafter(model)
    vocabulary = DraftVocabulary(model, draft_ids)
    logger.info("The copy of lm_head's rows to draft with takes %.1f MB.", vocabulary.nbytes / 1e6)
    return MTPDrafter(model, vocabulary)
