"""Rows on the device: the arrays of one batch, and all batches by the state of their rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Container
from collections.abc import Sequence as Many
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.distributed import all_gather
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import StepRow
from mlx_mtp.kernels.gpu import fused
from mlx_mtp.sampling.grammar_masks import NO_MASKS
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.drafter import DeferredWrites


class Batch:
    """B rows that run together; row i of each array attribute belongs to `sequences[i]`."""

    def __init__(
        self,
        sequences: Many[Sequence],
        cache: BatchCache,
        draft_state: DeferredWrites,
        vocab_size: int,
        never_sampled: Many[int] = (),
    ) -> None:
        count = len(sequences)
        self.sequences = list(sequences)
        self.cache = cache
        self.draft_state = draft_state
        params, prompts = [s.request.sampling for s in sequences], [s.prompt for s in sequences]
        stop_ids = [s.stop_ids for s in sequences]
        self.sampler = Sampler(params, prompts, vocab_size, stop_ids, never_sampled)
        self.last = mx.zeros(count, dtype=mx.int32)  # last emitted token, not cached yet
        # int32 [B, k], the drafts after `last`; and each row's number of drafts.
        self.drafts = mx.zeros((count, 0), dtype=mx.int32)
        self.num_drafts = [0] * count
        self.num_kept = mx.zeros(count, dtype=mx.int32)  # tokens emitted from the last window
        # int32 [B], tokens that each row may still emit.
        self.remaining = mx.array([s.max_new_tokens for s in sequences], dtype=mx.int32)
        self.ended = mx.zeros(count, dtype=mx.bool_)  # rows that emit nothing more
        self.last_hidden = mx.zeros((count, 1, 0))  # [B, 1, H], post-norm, of the last position
        # int32 [B, S], S > 0, padded with -1; `verify_window` takes no empty array.
        width = max(1, *(len(s.stop_ids) for s in sequences))
        padding = [(-1,) * (width - len(s.stop_ids)) for s in sequences]
        self.stop_ids = mx.array([s.stop_ids + more for s, more in zip(sequences, padding)])
        self.masks = NO_MASKS  # masks of the step being launched; false if no row has one

    def __len__(self) -> int:
        return len(self.sequences)

    def upload_host_drafts(self, rows: Many[StepRow]) -> None:
        """Replace the head's drafts of rows that are planned with a run (see `StepRow.run`).

        A row's drafts are the tokens of its run from index `num_kept` on, as the window in flight
        emits `num_kept` tokens. If these differ from the beginning of the run, the drafts don't fit
        and verification rejects them.
        """
        if not any(row.run for row in rows):
            return
        self.num_drafts = [row.num_host_drafts or n for row, n in zip(rows, self.num_drafts)]
        width = max(self.num_drafts)
        table = np.zeros((len(rows), width + max(row.ahead for row in rows)), dtype=np.int32)
        for ids, row in zip(table, rows):
            ids[: len(row.run)] = row.run
        first = mx.where(mx.array([row.ahead > 0 for row in rows]), self.num_kept, 0)
        runs = mx.take_along_axis(mx.array(table), first[:, None] + mx.arange(width), axis=1)
        on_host = mx.array([row.num_host_drafts > 0 for row in rows])[:, None]
        self.drafts = mx.where(on_host, runs, _widen(self.drafts[:, :width], width, 0))

    def keep_hidden(self, hidden: mx.array, num_kept: mx.array) -> None:
        """Set `last_hidden` to `hidden`, [B, H], in rows with `num_kept` > 0 (int32 [B])."""
        newest = hidden[:, None]
        if self.last_hidden.shape[-1]:
            newest = _where_kept(num_kept, newest, self.last_hidden)
        self.last_hidden = newest

    def settle(self) -> None:
        """Complete the caches before rows join, leave or are copied."""
        self.draft_state.settle(self.cache)

    def filter(self, chosen: Callable[[Sequence], bool]) -> Batch:
        """Returns a batch of the rows for which `chosen` is True; this batch if those are all."""
        places = [i for i, s in enumerate(self.sequences) if chosen(s)]
        if len(places) == len(self):
            return self
        self.settle()
        rows = mx.array(places, dtype=mx.int32)
        batch = copy.copy(self)
        batch.sequences = [self.sequences[i] for i in places]
        batch.cache = self.cache.select(places)
        batch.sampler = self.sampler.select(places)
        batch.draft_state = self.draft_state.select(rows)
        for name, array in self._row_arrays().items():
            setattr(batch, name, array[rows])
        batch.num_drafts = [self.num_drafts[i] for i in places]
        batch.drafts = batch.drafts[:, : max(batch.num_drafts, default=0)]
        return batch

    def extend(self, other: Batch) -> None:
        """Append the rows of `other`, a batch that is not used afterwards."""
        self.settle()
        other.settle()
        self.sequences += other.sequences
        self.cache.extend(other.cache)
        self.sampler.extend(other.sampler)
        self.draft_state.extend(other.draft_state)
        self.num_drafts = self.num_drafts + other.num_drafts
        theirs, fill = other._row_arrays(), {"stop_ids": -1, "drafts": 0}
        for name, array in self._row_arrays().items():
            pair = [array, theirs[name]]
            if name in fill:
                width = max(each.shape[1] for each in pair)
                pair = [_widen(each, width, fill[name]) for each in pair]
            setattr(self, name, mx.concatenate(pair))

    def arrays(self) -> list[Any]:
        """Returns nested lists of all arrays, which must be evaluated with each step."""
        parts = self.cache, self.sampler, self.draft_state
        return [[*self._row_arrays().values()], *(part.arrays() for part in parts)]

    def _row_arrays(self) -> dict[str, mx.array]:
        return {name: v for name, v in vars(self).items() if isinstance(v, mx.array)}


class Batches:
    """All rows on the device: prefilling, ready (with a computed prompt), and decoding."""

    def __init__(self) -> None:
        self.prefilling: list[Batch] = []  # each a group of prompts
        # Rows with a computed prompt join the running rows when their first token has been read.
        # Until then they share no arrays with these, so a failed prefill affects no other request.
        self.ready: list[Batch] = []
        self.decoding: Batch | None = None

    @property
    def all(self) -> list[Batch]:
        running = [] if self.decoding is None else [self.decoding]
        return [*running, *self.ready, *self.prefilling]

    def take(self, rows: Many[Sequence]) -> Batch | None:
        """Remove and return the batch of this group of prompts; None before its first chunk."""
        group = next((b for b in self.prefilling if b.sequences == [*rows]), None)
        self.prefilling = [b for b in self.prefilling if b is not group]
        return group

    def store(self, batch: Batch, is_last: Many[bool]) -> None:
        """Put a group back after its chunk; rows with `is_last` are ready to decode."""
        done = {s for s, last in zip(batch.sequences, is_last, strict=True) if last}
        if done:
            self.ready.append(batch.filter(lambda s: s in done))
        if len(done) < len(batch):
            self.prefilling.append(batch.filter(lambda s: s not in done))

    def gather(self, sequences: Collection[Sequence]) -> Batch:
        """Returns the running batch with exactly these rows: others leave, ready ones join."""
        rows = frozenset(sequences)
        parts = [self.decoding] if self.decoding is not None else []
        waiting: list[Batch] = []
        for batch in self.ready:
            (parts if rows.issuperset(batch.sequences) else waiting).append(batch)
        parts = [p for p in (part.filter(lambda s: s in rows) for part in parts) if len(p)]
        self.decoding, self.ready = parts[0], waiting
        for batch in parts[1:]:
            self.decoding.extend(batch)
        assert set(self.decoding.sequences) == rows, "the plan and the batches disagree"
        return self.decoding

    def prune(self, live: Container[Sequence]) -> None:
        """Drop rows that are not live; those of the running batch leave it in `gather`."""
        self.prefilling, self.ready = (
            [left for b in batches if len(left := b.filter(lambda s: s in live))]
            for batches in (self.prefilling, self.ready)
        )
        if self.decoding is not None and not any(s in live for s in self.decoding.sequences):
            self.decoding = None

    def drop(self, rows: Many[Sequence]) -> list[Sequence]:
        """Drop every batch with any of these rows; returns all rows of the dropped batches."""
        hit = [b for b in self.all if any(s in rows for s in b.sequences)]
        if self.decoding in hit:
            self.decoding = None
        self.ready = [b for b in self.ready if b not in hit]
        self.prefilling = [b for b in self.prefilling if b not in hit]
        return [s for batch in hit for s in batch.sequences]


def hidden_states(batches: Batches) -> mx.array:
    """Returns each rank's last hidden states of the running rows: float32 [ranks, B * H]."""
    assert batches.decoding is not None
    hidden = batches.decoding.last_hidden.astype(mx.float32).reshape(1, -1)
    return all_gather(hidden).reshape(-1, hidden.size)


@fused
def _where_kept(num_kept: mx.array, newest: mx.array, before: mx.array) -> mx.array:
    return mx.where(num_kept[:, None, None] > 0, newest, before)


def _widen(ids: mx.array, width: int, fill: int) -> mx.array:
    return mx.pad(ids, [(0, 0), (0, width - ids.shape[1])], constant_values=fill)
