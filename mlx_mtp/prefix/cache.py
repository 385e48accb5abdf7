"""Copies prefixes out of batches as prompts and answers are computed, and into new batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import mlx.core as mx

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.prefix.policy import PrefixState
from mlx_mtp.prefix.radix_tree import Node, PrefixTree
from mlx_mtp.prefix.segments import Entry, restore, take_segment, take_snapshot

if TYPE_CHECKING:
    from mlx_mtp.prefix.disk import PrefixStore

logger = logging.getLogger(__name__)


class Rows(Protocol):
    """The rows that prefixes are copied from and restored to (see `engine.batch.Batch`)."""

    cache: BatchCache
    last_hidden: mx.array  # [B, 1, H], post-norm

    def settle(self) -> None: ...
    def arrays(self) -> list[Any]: ...


class Save(NamedTuple):
    """A copy of a row's prefix, which is inserted into the tree when its step has succeeded."""

    state: PrefixState
    tokens: tuple[int, ...]
    entry: Entry  # at most one segment, the KV that is not in the tree yet; and the snapshot


class PrefixCache:
    """A tree of prefixes of at most `limit` bytes (0: none are kept), with KV quantized to `bits`.

    No failure here reaches a request: a prefix that can't be saved is dropped, and a prompt whose
    prefix can't be restored is computed.
    """

    def __init__(
        self, limit: int = 0, bits: int | None = None, store: PrefixStore | None = None
    ) -> None:
        self.tree = PrefixTree(limit, store)
        self._bits = bits
        self._ends: list[Save] = []

    def restore(self, batch: Rows, nodes: Many[Node]) -> bool:
        """Fill the empty rows of a batch with a prefix each; returns False if that failed."""
        try:
            batch.last_hidden = restore(batch.cache, [node.entry() for node in nodes])
            mx.eval(*batch.arrays())
        except Exception:
            logger.exception("A prefix could not be restored; its prompt is computed instead")
            for node in nodes:
                self.tree.remove(node)
            return False
        return True

    def save_prompt(self, batch: Rows, row: int, state: PrefixState, end: int) -> list[Save]:
        """Copy a row after the first `end` tokens of its prompt, if that is a save point."""
        if end not in state.save_points:
            return []
        return self._copy(batch, row, state, state.cache_key[:end])

    def save_end(self, batch: Rows, row: int, state: PrefixState, tokens: tuple[int, ...]) -> None:
        """Copy a row that has ended, with `tokens` in its caches, for `insert_saved_answers`."""
        self._ends += self._copy(batch, row, state, tokens)

    def clear(self) -> None:
        """Free all prefixes in memory except those about to be restored; files stay on disk."""
        self._ends.clear()
        self.tree.clear()

    def insert_saved_answers(self) -> None:
        """Insert the copied answers, before the next lookup."""
        if self._ends:
            self.insert_saves(self._ends)

    def insert_saves(self, saves: list[Save]) -> None:
        """Insert copies of steps that have succeeded; empties the list."""
        while saves:
            state, tokens, entry = saves.pop(0)
            state.saved(len(tokens))
            if state.dropped:
                # The sequence may have failed in the step before the one that was copied.
                continue
            lasting = state.message_ends[:1] == [len(tokens)]
            try:
                mx.eval([segment.arrays for segment in entry])
                self.tree.insert(state.salt, tokens, entry, lasting)
            except Exception:
                logger.exception("A prefix of %d tokens could not be kept", len(tokens))

    def _copy(
        self, batch: Rows, row: int, state: PrefixState, tokens: tuple[int, ...]
    ) -> list[Save]:
        if not self.tree.limit:
            return []
        try:
            # The prefix copied in the step before will be in the tree when this one is inserted.
            start = max(self.tree.covered(state.salt, tokens), state.num_copied)
            entry = copy_entry(batch, row, start, len(tokens), self._bits)
        except Exception:
            logger.exception("A prefix of %d tokens could not be saved", len(tokens))
            state.saved(len(tokens))
            return []
        state.num_copied = len(tokens)
        return [Save(state, tokens, entry)]


def copy_entry(batch: Rows, row: int, start: int, end: int, bits: int | None) -> Entry:
    """Copy a row's KV of the tokens `start` to `end`, if any, and the snapshot at `end`."""
    entry: Entry = []
    if start < end:
        batch.settle()
        entry.append(take_segment(batch.cache, row, start, end, bits))
    entry.append(take_snapshot(batch.cache, row, end, batch.last_hidden))
    mx.async_eval([segment.arrays for segment in entry])
    return entry
