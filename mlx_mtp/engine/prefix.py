"""Prefixes in and out of the batches: saved as prompts and answers are computed, and restored.

Nothing that goes wrong here hits a request: what can't be saved is not saved, and a prompt whose
prefix can't be restored is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import mlx.core as mx

from mlx_mtp.cache.prefix_disk import PrefixDisk
from mlx_mtp.cache.prefix_node import Node
from mlx_mtp.cache.prefix_state import Segment, Snapshot, restore, take_segment, take_snapshot
from mlx_mtp.cache.prefix_store import PrefixStore
from mlx_mtp.cache.prefix_tree import PrefixTree
from mlx_mtp.engine.batch import Batch
from mlx_mtp.engine.sequence import Sequence

logger = logging.getLogger(__name__)

_SWEEP_EVERY = 64
"""After so many prefixes, nodes are forgotten whose files the disk has had no room for."""


@dataclass(frozen=True, slots=True)
class Save:
    """A copy on its way into the cache, once the step that it was made in has gone well.

    Args:
        sequence: whose prefix.
        tokens: of the prefix.
        segment: KV of those of them whose KV is not in the cache; None: all of it is.
        snapshot: the states after the last.
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    segment: Segment | None
    snapshot: Snapshot


class PrefixCache:
    """The arrays behind a tree of prefixes.

    Args:
        limit: bytes that it may take.
        bits: of stored KV, 8 or 4; None: as it is.
        store: keeps them on the disk as well, and what is there already is found; its nodes are of
            these bits. None: memory alone.
    """

    def __init__(
        self, limit: int, bits: int | None = None, store: PrefixStore | None = None
    ) -> None:
        disk = None if store is None else PrefixDisk(store)
        self.tree = PrefixTree(limit, disk)
        if disk is not None:
            disk.fill(self.tree)
        self._num_kept = 0
        self._bits = bits
        self._ends: list[Save] = []
        self._measured = False

    def restore(self, batch: Batch, limit: int) -> bool:
        """Fill a new batch with its rows' prefixes.

        Args:
            batch: its caches are empty.
            limit: tokens that the rows need room for.

        Returns:
            False if that was not possible; the rows then start anew.
        """
        nodes = [_prefix(s) for s in batch.sequences]
        try:
            rows = [_payload(node) for node in nodes]
            batch.last_hidden = restore(batch.cache, batch.draft_kv(), rows, limit)
            mx.eval(*batch.arrays())
        except Exception:
            logger.exception("A prefix could not be restored; its prompt is computed instead")
            for node in nodes:
                self.tree.remove(node)
            return False
        return True

    def save_prompts(self, batch: Batch) -> list[Save]:
        """Copy what is to be saved of rows whose prompt has just been computed up to there."""
        saves = []
        for row, sequence in enumerate(batch.sequences):
            if sequence.num_computed in sequence.save_points:
                save = self._copy(batch, row, sequence.prompt[: sequence.num_computed])
                if save is None:
                    sequence.saved(sequence.num_computed)
                else:
                    saves.append(save)
        return saves

    def save_ends(self, batch: Batch, ended: Collection[Sequence]) -> None:
        """Copy the caches of rows that have ended; the last token is not in them."""
        for row, sequence in enumerate(batch.sequences):
            if sequence in ended:
                tokens = (*sequence.prompt, *sequence.output[:-1])
                save = self._copy(batch, row, tokens)
                self._ends += [] if save is None else [save]

    def clear(self) -> None:
        """Give the memory back, but for what is about to be restored. The disk keeps its own."""
        self._ends.clear()
        self.tree.clear()

    def settle(self) -> None:
        """Take in the ends of answers that were copied."""
        self.commit(self._ends)

    def commit(self, saves: list[Save]) -> None:
        """Take in copies whose step has gone well; the list is emptied."""
        while saves:
            save = saves.pop(0)
            save.sequence.saved(len(save.tokens))
            if save.sequence.finished and not save.sequence.ended:
                # It may have failed in the step before, which this one began with.
                continue
            try:
                self._insert(save)
            except Exception:
                logger.exception("A prefix of %d tokens could not be kept", len(save.tokens))

    def _copy(self, batch: Batch, row: int, tokens: tuple[int, ...]) -> Save | None:
        sequence = batch.sequences[row]
        try:
            # What was copied a step ago will be in the tree when this comes there.
            start = max(self.tree.covered(sequence.salt, tokens), sequence.num_copied)
            segment = None
            if start < len(tokens):
                head = batch.draft_kv()
                segment = take_segment(batch.cache, head, row, start, len(tokens), self._bits)
            snapshot = take_snapshot(batch.cache, row, batch.last_hidden)
            mx.async_eval(snapshot.arrays, {} if segment is None else segment.arrays)
        except Exception:
            logger.exception("A prefix of %d tokens could not be saved", len(tokens))
            return None
        sequence.num_copied = len(tokens)
        return Save(sequence, tokens, segment, snapshot)

    def _insert(self, save: Save) -> None:
        segment, snapshot = save.segment, save.snapshot
        mx.eval(snapshot.arrays, {} if segment is None else segment.arrays)
        start = len(save.tokens) if segment is None else segment.start
        sequence = save.sequence
        lasting = len(save.tokens) == sequence.first_turn
        kept = self.tree.insert(
            sequence.salt, save.tokens, start, segment, snapshot, lasting=lasting
        )
        self._num_kept += kept
        if kept and self._num_kept % _SWEEP_EVERY == 0:
            self.tree.sweep()
        if not self._measured and segment is not None:
            self._measured = True
            per_token = segment.nbytes / (segment.end - segment.start) / 1e3
            logger.info(
                "Measured: a prefix takes %.2f kB a token, and %.2f MB at each place where it was "
                "saved; there is room for %.0f MB.",
                per_token,
                snapshot.nbytes / 1e6,
                self.tree.limit / 1e6,
            )
        logger.debug(
            "Prefix of %d tokens %s: %.1f kB of KV for %d of them, %.1f kB of states; "
            "%d entries take %.1f MB",
            len(save.tokens),
            "kept" if kept else "not kept",
            0.0 if segment is None else segment.nbytes / 1e3,
            len(save.tokens) - start,
            snapshot.nbytes / 1e3,
            len(self.tree),
            self.tree.nbytes / 1e6,
        )


def _prefix(sequence: Sequence) -> Node:
    assert sequence.prefix is not None
    return sequence.prefix


def _payload(node: Node) -> tuple[list[Segment], Snapshot]:
    segments = [n.kv for n in node.path()]
    assert isinstance(node.snapshot, Snapshot)
    assert all(isinstance(segment, Segment) for segment in segments)
    return segments, node.snapshot  # type: ignore[return-value]
