"""Drafts of the model's multi-token-prediction (MTP) head, made after a window for the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.packing import Index, Packing
from mlx_mtp.kernels.gpu import launch_early, zeros
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.model import DraftVocabulary, LoadedModel
from mlx_mtp.sampling.grammar_masks import TokenSampler

_MOST_DEFERRED = 16  # maximum number of positions per row that are not in the head's KV yet


class Computed(NamedTuple):
    """A prefill chunk or a verify window after its forward pass: N tokens of B rows."""

    hidden: mx.array  # [N, H], the target model's hidden states after its last norm
    targets: mx.array  # int32 [N], the token after each of the N tokens
    last: Index  # [B], the index of each row's last kept token, or of its first if it keeps none
    packing: Packing  # of the N tokens
    cache: BatchCache  # with room for the window, and for all drafts but the last


class DeferredWrites:
    """Windows of a batch that are not in the head's KV yet; always empty without a head.

    While nothing is drafted, windows are collected and written together, so that an unused head
    costs almost nothing.
    """

    def __init__(self, write: Callable[..., object] = lambda *_: None) -> None:
        self._write = write  # see `MTPDrafter._write`
        # Of each window: positions [B], hidden states [B, H], targets [B].
        self._deferred: list[tuple[mx.array, mx.array, mx.array]] = []

    def defer(self, window: Computed) -> None:
        self._deferred.append((window.packing.positions, window.hidden, window.targets))
        if len(self._deferred) == _MOST_DEFERRED:
            self.settle(window.cache)

    def settle(self, cache: BatchCache) -> None:
        """Write the deferred windows; call it before rows join, leave or are copied."""
        if self._deferred:
            starts, *tokens = zip(*self._deferred)
            packing = cache.packing(starts[0], [len(starts)] * starts[0].shape[0])
            hidden, targets = (mx.stack([*each], axis=1).flatten(0, 1) for each in tokens)
            self._write(cache, packing, hidden, targets)
        self._deferred = []

    def select(self, rows: mx.array) -> DeferredWrites:
        """Returns the state of `rows`, int32 [B'], and keeps this one valid; `settle` it first."""
        assert not self._deferred
        return DeferredWrites(self._write)

    def extend(self, other: DeferredWrites) -> None:
        """Append the rows of `other`; call `settle` on both first."""
        assert not (self._deferred or other._deferred)

    def arrays(self) -> list[mx.array]:
        """Returns the arrays that must be evaluated with a step: those of the latest window."""
        return [*self._deferred[-1]] if self._deferred else []


class MTPDrafter:
    """Drafts with a model's head, only the tokens `draft_ids` if given; never waits for the device.

    A draft is accepted only if it equals the token that the model samples, so drafts don't change
    the output (except as `SamplingParams.optimistic` allows).
    """

    def __init__(self, model: LoadedModel, draft_ids: Sequence[int] | None = None) -> None:
        assert model.head is not None
        self._model = model
        self._head: MTPHead = model.head
        self._lm_head = self._ids = None  # None: all tokens
        if draft_ids is not None:
            vocabulary = DraftVocabulary(model, draft_ids)
            self._lm_head, self._ids = vocabulary.layer, vocabulary.ids

    def make_state(self, cache: BatchCache) -> DeferredWrites:
        """Returns the state for a new cache's rows; adds a KV cache for the head to `cache`."""
        cache.head = RaggedKVCache()
        return DeferredWrites(self._write)

    def propose(
        self,
        state: DeferredWrites,
        window: Computed,
        num_drafts: Sequence[int],
        sampler: TokenSampler,
    ) -> mx.array:
        """Update `state` from a window of its rows, and draft `num_drafts[b]` tokens for row b.

        Returns int32 [B, max(num_drafts)]; values beyond a row's number of drafts are undefined.
        Call it after every prefill chunk and every verify window, in order. After a cached prefix
        the first window begins at the prefix's last position, as the head's KV entry there needs
        the token after the prefix. `sampler` uses the noise that will sample the tokens.
        """
        hidden, targets, last, packing, cache = window
        if not any(num_drafts) and packing.longest == 1 and packing.images is None:
            state.defer(window)
            return zeros(len(num_drafts), 0)
        state.settle(cache)
        # Entry p of the head's KV joins the hidden state at p with the token at p + 1. The window's
        # entries, from the target model's hidden states, overwrite those of earlier drafts.
        z = self._write(cache, packing, hidden, targets)
        if not any(num_drafts):
            return zeros(len(num_drafts), 0)
        assert cache.head is not None
        newest, position = targets[last][:, None], packing.positions[last]
        m = z[last][:, None]  # [B, 1, H]: for the first draft z, then the head's output
        drafts: list[mx.array] = []
        for number in range(max(num_drafts)):
            # This pass has only the rows that need another draft.
            packing = cache.packing(position, [int(count > number) for count in num_drafts])
            z = packing.rectangle.flat(m)
            if drafts:
                z = self._write(cache, packing, z, packing.rectangle.flat(drafts[-1]))
            out = self._head.run_layer(z, cache.head, packing)
            m = packing.rectangle.fill(out)
            # The head's output at p predicts the token at p + 2.
            logits = packing.rectangle.fill(self._model.logits(out, self._lm_head))
            before = mx.concatenate([newest, *drafts], axis=1)
            drafts.append(sampler.draw(logits, position[:, None] + 2, before, ids=self._ids))
            launch_early(drafts[-1])
            position = position + 1
        return mx.concatenate(drafts, axis=1)

    def _write(
        self, cache: BatchCache, packing: Packing, hidden: mx.array, targets: mx.array
    ) -> mx.array:
        """Write N tokens to the head's KV; returns their z, [N, H] (see `MTPHead`)."""
        assert cache.head is not None
        embedded = self._model.embed(targets, packing.images)
        return self._head.write(embedded, hidden, cache.head, packing)
