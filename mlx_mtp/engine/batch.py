"""Rows on the device: one batch's arrays, and all batches by the state of their rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Container, Iterator
from collections.abc import Sequence as Many

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.distributed import all_gather
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import StepRow
from mlx_mtp.sampling.grammar_masks import GrammarMasks
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.drafter import HeadState


class Batch:
    """Rows that run together; row i of every array attribute is that of `sequences[i]`."""

    def __init__(
        self,
        sequences: Many[Sequence],
        cache: BatchCache,
        draft_state: HeadState | None,
        vocab_size: int,
    ) -> None:
        count = len(sequences)
        self.sequences = list(sequences)
        self.cache = cache
        self.draft_state = draft_state
        params, prompts = [s.request.sampling for s in sequences], [s.prompt for s in sequences]
        self.sampler = Sampler(params, prompts, vocab_size, [s.stop_ids for s in sequences])
        self.last = mx.zeros(count, dtype=mx.int32)  # emitted last, not in the caches yet
        # int32 [B, k], proposed to follow it, and how many of them each row has.
        self.drafts = mx.zeros((count, 0), dtype=mx.int32)
        self.num_drafts = [0] * count
        self.kept = mx.zeros(count, dtype=mx.int32)  # tokens that its last window brought
        # int32 [B], tokens each row may still emit.
        self.remaining = mx.array([s.max_new_tokens for s in sequences], dtype=mx.int32)
        self.ended = mx.zeros(count, dtype=mx.bool_)  # rows that emit nothing any more
        self.last_hidden = mx.zeros((count, 1, 0))  # [B, 1, H], post-norm, of the last position
        # int32 [B, S], S > 0, padded with -1
        self.stop_ids = _padded([s.stop_ids for s in sequences])
        self.masks = GrammarMasks(())  # of the step that is being launched; false: nothing masked

    def __len__(self) -> int:
        return len(self.sequences)

    def draft_limits(self) -> mx.array | None:
        """`num_drafts` as int32 [B]; None where all drafts of all rows count."""
        if min(self.num_drafts) == self.drafts.shape[1]:
            return None
        return mx.array(self.num_drafts, dtype=mx.int32)

    def draft_on_host(self, rows: Many[StepRow]) -> None:
        """Let the next window verify the runs of its plan's rows, in place of the head's drafts.

        A run goes on behind what the window in flight brings: if that was something else, it fails.
        """
        if not any(row.run for row in rows):
            return
        self.num_drafts = [row.num_host_drafts or n for row, n in zip(rows, self.num_drafts)]
        width = max(self.num_drafts)
        table = np.zeros((len(rows), width + max(row.ahead for row in rows)), dtype=np.int32)
        for ids, row in zip(table, rows):
            ids[: len(row.run)] = row.run
        first = mx.where(mx.array([row.ahead > 0 for row in rows]), self.kept, 0)
        runs = mx.take_along_axis(mx.array(table), first[:, None] + mx.arange(width), axis=1)
        on_host = mx.array([row.num_host_drafts > 0 for row in rows])[:, None]
        self.drafts = mx.where(on_host, runs, _widen(self.drafts[:, :width], width, 0))

    def keep_hidden(self, hidden: mx.array, num_kept: mx.array) -> None:
        """Set `last_hidden` from those of a window, [B, H], where it keeps any (int32 [B])."""
        newest = hidden[:, None]
        if self.last_hidden.shape[-1]:
            newest = mx.where(num_kept[:, None, None] > 0, newest, self.last_hidden)
        self.last_hidden = newest

    def settle(self) -> None:
        """Complete the caches, before rows come, go, or are copied."""
        if self.draft_state is not None:
            self.draft_state.settle(self.cache)

    def filter(self, wanted: Callable[[Sequence], bool]) -> Batch:
        """A batch of the wanted rows; itself when that is all of them."""
        chosen = [i for i, s in enumerate(self.sequences) if wanted(s)]
        if len(chosen) == len(self):
            return self
        self.settle()
        rows = mx.array(chosen, dtype=mx.int32)
        batch = copy.copy(self)
        batch.sequences = [self.sequences[i] for i in chosen]
        batch.cache = self.cache.select(chosen)
        batch.sampler = self.sampler.select(chosen)
        if self.draft_state is not None:
            batch.draft_state = self.draft_state.select(rows)
        for name, array in self._row_arrays().items():
            setattr(batch, name, array[rows])
        batch.num_drafts = [self.num_drafts[i] for i in chosen]
        batch.drafts = batch.drafts[:, : max(batch.num_drafts, default=0)]
        return batch

    def join(self, other: Batch) -> None:
        self.settle()
        other.settle()
        self.sequences += other.sequences
        self.cache.extend(other.cache)
        self.sampler.extend(other.sampler)
        if self.draft_state is not None and other.draft_state is not None:
            self.draft_state.extend(other.draft_state)
        self.num_drafts = self.num_drafts + other.num_drafts
        theirs, fill = other._row_arrays(), {"stop_ids": -1, "drafts": 0}
        for name, array in self._row_arrays().items():
            pair = [array, theirs[name]]
            if name in fill:
                width = max(each.shape[1] for each in pair)
                pair = [_widen(each, width, fill[name]) for each in pair]
            setattr(self, name, mx.concatenate(pair))

    def arrays(self) -> Iterator[mx.array]:
        yield from self._row_arrays().values()
        yield from self.cache.arrays()
        yield from self.sampler.arrays()
        if self.draft_state is not None:
            yield from self.draft_state.arrays()

    def _row_arrays(self) -> dict[str, mx.array]:
        return {name: v for name, v in vars(self).items() if isinstance(v, mx.array)}


class Batches:
    """All rows on the device: those that prefill, those with a computed prompt, those that run."""

    def __init__(self) -> None:
        self.prefilling: list[Batch] = []  # each a group of prompts
        # They join the running rows when their first token has been read. Until then they share
        # nothing with them, so a prefill that fails affects no other request.
        self.ready: list[Batch] = []
        self.decoding: Batch | None = None

    @property
    def all(self) -> list[Batch]:
        running = [] if self.decoding is None else [self.decoding]
        return [*running, *self.ready, *self.prefilling]

    def take(self, rows: Many[Sequence]) -> Batch | None:
        """The group of these prompts, until it is stored again; None before its first chunk."""
        found = next((b for b in self.prefilling if b.sequences == [*rows]), None)
        self.prefilling = [b for b in self.prefilling if b is not found]
        return found

    def store(self, batch: Batch, is_last: Many[bool]) -> None:
        """Keep a group after its chunk; rows with `is_last` are ready."""
        done = {s for s, last in zip(batch.sequences, is_last, strict=True) if last}
        if done:
            self.ready.append(batch.filter(lambda s: s in done))
        if len(done) < len(batch):
            self.prefilling.append(batch.filter(lambda s: s not in done))

    def gather(self, wanted: Collection[Sequence]) -> Batch:
        """The running batch with exactly these rows: others leave it, and ready ones join."""
        rows = frozenset(wanted)
        parts = [self.decoding] if self.decoding is not None else []
        waiting: list[Batch] = []
        for batch in self.ready:
            (parts if rows.issuperset(batch.sequences) else waiting).append(batch)
        kept = [p for p in (part.filter(lambda s: s in rows) for part in parts) if len(p)]
        self.decoding, self.ready = kept[0], waiting
        for batch in kept[1:]:
            self.decoding.join(batch)
        assert set(self.decoding.sequences) == rows, "the plan and the batches disagree"
        return self.decoding

    def prune(self, live: Container[Sequence]) -> None:
        """Drop the rows that are not live; those of the running batch leave it in `gather`."""
        self.prefilling, self.ready = (
            [left for b in batches if len(left := b.filter(lambda s: s in live))]
            for batches in (self.prefilling, self.ready)
        )
        if self.decoding is not None and not any(s in live for s in self.decoding.sequences):
            self.decoding = None

    def drop(self, rows: Many[Sequence]) -> list[Sequence]:
        """Drop every batch that any of these rows is in; returns the rows of those batches."""
        hit = [b for b in self.all if any(s in rows for s in b.sequences)]
        if self.decoding in hit:
            self.decoding = None
        self.ready = [b for b in self.ready if b not in hit]
        self.prefilling = [b for b in self.prefilling if b not in hit]
        return [s for batch in hit for s in batch.sequences]


def hidden_states(batches: Batches) -> mx.array:
    """The running rows' last hidden states, as each rank has them: float32 [ranks, N]."""
    assert batches.decoding is not None
    own = batches.decoding.last_hidden.astype(mx.float32).reshape(1, -1)
    return all_gather(own).reshape(-1, own.size)


def _padded(ids: Many[tuple[int, ...]]) -> mx.array:
    width = max(1, *map(len, ids))  # `accept` takes no empty array.
    rows = [(*values, *[-1] * (width - len(values))) for values in ids]
    return mx.array(rows, dtype=mx.int32).reshape(len(ids), width)


def _widen(ids: mx.array, width: int, fill: int) -> mx.array:
    return mx.pad(ids, [(0, 0), (0, width - ids.shape[1])], constant_values=fill)
