"""Prefixes in and out of the batches: saved as prompts and answers are computed, and restored."""

import logging
from collections.abc import Collection
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.engine.batch import Batch
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.prefix.radix_tree import PrefixTree
from mlx_mtp.prefix.segments import Entry, restore, take_segment, take_snapshot
from mlx_mtp.speculative.host_sources import HostSources

logger = logging.getLogger(__name__)


class Save(NamedTuple):
    """A copy of a row's prefix, to enter the cache when the step it was made in has succeeded."""

    sequence: Sequence
    tokens: tuple[int, ...]
    entry: Entry  # with the KV that is not in the cache: one segment, or none


class PrefixCache:
    """The arrays behind a tree of prefixes, which may take `limit` bytes; KV is stored in `bits`.

    With a limit of 0 nothing is kept. Nothing that goes wrong here hits a request: what can't be
    saved is not saved, and a prompt whose prefix can't be restored is computed.
    """

    def __init__(
        self, limit: int = 0, bits: int | None = None, store: PrefixStore | None = None
    ) -> None:
        self.tree = PrefixTree(limit, store)
        self._bits = bits
        self.host_sources: HostSources | None = None  # of the same requests, dropped with it
        self._ends: list[Save] = []

    def restore(self, batch: Batch) -> bool:
        """Fill a new batch, which has its layout, with its rows' prefixes; False: failed."""
        nodes = [s.prefix for s in batch.sequences if s.prefix is not None]
        try:
            rows = [node.entry() for node in nodes]
            assert len(rows) == len(batch.sequences)
            batch.last_hidden = restore(batch.cache, rows)
            mx.eval(*batch.arrays())
        except Exception:
            logger.exception("A prefix could not be restored; its prompt is computed instead")
            for node in nodes:
                self.tree.remove(node)
            return False
        return True

    def save_prompts(self, batch: Batch) -> list[Save]:
        saves = []
        for row, sequence in enumerate(batch.sequences):
            if (end := sequence.num_computed) in sequence.save_points:
                saves += self._copy(batch, row, sequence.key[:end])
        return saves

    def save_ends(self, batch: Batch, ended: Collection[Sequence]) -> None:
        """Copy the caches of rows that have ended, for `commit_ends`; they lack the last token."""
        for row, sequence in enumerate(batch.sequences):
            if sequence in ended:
                self._ends += self._copy(batch, row, (*sequence.prompt, *sequence.output[:-1]))

    def clear(self) -> None:
        """Give the memory back, but for what is about to be restored. The disk keeps its own."""
        self._ends.clear()
        self.tree.clear()
        if self.host_sources is not None:
            self.host_sources.clear()

    def commit_ends(self) -> None:
        """Insert the copied ends of answers, for the next lookup."""
        self.commit(self._ends)

    def commit(self, saves: list[Save]) -> None:
        """Insert copies from steps that have succeeded; the list is emptied."""
        while saves:
            sequence, tokens, entry = saves.pop(0)
            sequence.saved(len(tokens))
            if sequence.finished and not sequence.ended:
                # It may have failed in the step before, which this one began with.
                continue
            lasting = sequence.turns[:1] == [len(tokens)]
            try:
                mx.eval([segment.arrays for segment in entry])
                self.tree.insert(sequence.salt, tokens, entry, lasting)
            except Exception:
                logger.exception("A prefix of %d tokens could not be kept", len(tokens))

    def _copy(self, batch: Batch, row: int, tokens: tuple[int, ...]) -> list[Save]:
        if not self.tree.limit:
            return []
        sequence = batch.sequences[row]
        try:
            # What was copied a step ago will be in the tree when this is inserted.
            start = max(self.tree.covered(sequence.salt, tokens), sequence.num_copied)
            entry = take(batch, row, start, len(tokens), self._bits)
        except Exception:
            logger.exception("A prefix of %d tokens could not be saved", len(tokens))
            sequence.saved(len(tokens))
            return []
        sequence.num_copied = len(tokens)
        return [Save(sequence, tokens, entry)]


def take(batch: Batch, row: int, start: int, end: int, bits: int | None) -> Entry:
    """Copy a row's KV from `start` to `end`, if that is any, and its snapshot there."""
    entry: Entry = []
    if start < end:
        batch.settle()
        entry.append(take_segment(batch.cache, row, start, end, bits))
    entry.append(take_snapshot(batch.cache, row, end, batch.last_hidden))
    mx.async_eval([segment.arrays for segment in entry])
    return entry
