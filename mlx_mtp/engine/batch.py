"""The device's side of a set of rows: caches, last tokens, drafts, limits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.sampling.grammar_masks import DraftSampler, GrammarMasks
from mlx_mtp.sampling.sampler import Sampler, TokenSampler
from mlx_mtp.speculative.acceptance import Verdict
from mlx_mtp.speculative.proposer import DraftState


class Batch:
    """Rows that run together. A row is one `Sequence`; row i of every array is `sequences[i]`.

    Every attribute that is an array has a line for each row: `take` and `join` rely on it.

    Args:
        sequences: the rows.
        cache: of the trunk.
        draft_state: of the proposer; None without one.
        vocab_size: of the tokenizer.

    Attributes:
        last: int32 [B], the last token each row emitted, which is not in the caches yet.
        drafts: int32 [B, k], proposed to follow it.
        num_drafts: how many of them count, for each row; k for one of them at least.
        remaining: int32 [B], tokens each row may still emit.
        ended: bool [B], rows that emit nothing any more; their caches stand still.
        last_hidden: the trunk's post-norm hidden state of the last position in the caches,
            [B, 1, H]; H is 0 before the first.
        stop_ids: int32 [B, S], padded with -1.
        guide: the constraints of the step that is being launched; false if there are none.
    """

    def __init__(
        self,
        sequences: Many[Sequence],
        cache: BatchCache,
        draft_state: DraftState | None,
        vocab_size: int,
    ) -> None:
        count = len(sequences)
        self.sequences = list(sequences)
        self.cache = cache
        self.draft_state = draft_state
        self.sampler = Sampler(
            [s.request.sampling for s in sequences], [s.prompt for s in sequences], vocab_size
        )
        self.last = mx.zeros(count, dtype=mx.int32)
        self.drafts = mx.zeros((count, 0), dtype=mx.int32)
        self.num_drafts = [0] * count
        self.remaining = mx.array([s.max_new_tokens for s in sequences], dtype=mx.int32)
        self.ended = mx.zeros(count, dtype=mx.bool_)
        self.last_hidden = mx.zeros((count, 1, 0))
        self.stop_ids = mx.array(_padded([s.stop_ids for s in sequences]))
        self.guide = GrammarMasks(())

    def __len__(self) -> int:
        return len(self.sequences)

    def draw(self, logits: mx.array, positions: mx.array, window: mx.array) -> mx.array:
        """The tokens that follow a window (see `Sampler.draw`), as the rows' grammars allow."""
        if not self.guide:
            return self.sampler.draw(logits, positions, window)
        mx.async_eval(logits)  # The host makes the masks meanwhile.
        return self.sampler.draw(logits, positions, window, mask=self.guide.window_mask(window))

    def set_drafts(self, drafts: mx.array) -> None:
        """Take what was proposed, int32 [B, k]; of it a row may want less than all."""
        self.num_drafts = [s.drafting.num_drafts(drafts.shape[1]) for s in self.sequences]
        self.drafts = drafts[:, : max(self.num_drafts)]

    def draft_limits(self) -> mx.array | None:
        """`num_drafts` as int32 [B]; None where all drafts of all rows count."""
        if min(self.num_drafts) == self.drafts.shape[1]:
            return None
        return mx.array(self.num_drafts, dtype=mx.int32)

    def settle(self, verdict: Verdict, targets: mx.array) -> None:
        """Take over what came of a window: counts, limits and the last token."""
        self.sampler.count(targets, verdict.num_kept)
        self.last, self.remaining, self.ended = verdict.last, verdict.remaining, verdict.finished
        if self.guide:
            self.guide.advance(targets, verdict.num_kept)

    def keep_hidden(self, hidden: mx.array, num_kept: mx.array) -> None:
        """Take over the last kept of a window's hidden states [B, T, H] (num_kept: int32 [B])."""
        at_last = mx.maximum(num_kept - 1, 0)[:, None, None]
        newest = mx.take_along_axis(hidden, at_last, axis=1)
        if self.last_hidden.shape[-1]:
            newest = mx.where(num_kept[:, None, None] > 0, newest, self.last_hidden)
        self.last_hidden = newest

    def draft_kv(self) -> RaggedKVCache | None:
        """What the proposer keeps for each position, complete; None if that is nothing."""
        return None if self.draft_state is None else self.draft_state.prefix_kv()

    def make_drafter(self) -> TokenSampler:
        """Draws the drafts that follow what was settled."""
        return DraftSampler(self.sampler, self.guide) if self.guide else self.sampler

    def take(self, wanted: Callable[[Sequence], bool]) -> Batch:
        """A batch of the wanted rows; itself when that is all of them."""
        chosen = [i for i, s in enumerate(self.sequences) if wanted(s)]
        if len(chosen) == len(self):
            return self
        rows = mx.array(chosen, dtype=mx.int32)
        taken = copy.copy(self)
        taken.sequences = [self.sequences[i] for i in chosen]
        taken.cache = self.cache.take(rows)
        taken.sampler = self.sampler.select(chosen)
        if self.draft_state is not None:
            taken.draft_state = self.draft_state.take(chosen)
        for name, array in self._row_arrays().items():
            setattr(taken, name, array[rows])
        taken.num_drafts = [self.num_drafts[i] for i in chosen]
        taken.drafts = taken.drafts[:, : max(taken.num_drafts, default=0)]
        return taken

    def join(self, other: Batch) -> None:
        """Append the other batch's rows."""
        self.sequences += other.sequences
        self.cache.extend(other.cache)
        self.sampler.extend(other.sampler)
        if self.draft_state is not None and other.draft_state is not None:
            self.draft_state.extend(other.draft_state)
        # Windows are one rectangle, as deep as that of the rows that run already: what comes with
        # more drafts lets the last of them go, and what comes with fewer has some that don't count.
        depth = self.drafts.shape[1]
        missing = max(depth - other.drafts.shape[1], 0)
        drafts = mx.pad(other.drafts[:, :depth], [(0, 0), (0, missing)])
        self.num_drafts = self.num_drafts + [min(n, depth) for n in other.num_drafts]
        width = max(self.stop_ids.shape[1], other.stop_ids.shape[1])
        self.stop_ids = _widen(self.stop_ids, width)
        theirs = other._row_arrays()
        theirs |= {"drafts": drafts, "stop_ids": _widen(other.stop_ids, width)}
        for name, array in self._row_arrays().items():
            setattr(self, name, mx.concatenate([array, theirs[name]]))

    def _row_arrays(self) -> dict[str, mx.array]:
        return {name: v for name, v in vars(self).items() if isinstance(v, mx.array)}

    def arrays(self) -> Iterator[mx.array]:
        """What must be evaluated with a step."""
        yield from self._row_arrays().values()
        yield from self.cache.arrays()
        yield from self.sampler.arrays()
        if self.draft_state is not None:
            yield from self.draft_state.arrays()


def _padded(ids: Many[tuple[int, ...]]) -> np.ndarray:
    out = np.full((len(ids), max(map(len, ids), default=0)), -1, dtype=np.int32)
    for row, values in enumerate(ids):
        out[row, : len(values)] = values
    return out


def _widen(stop_ids: mx.array, width: int) -> mx.array:
    missing = width - stop_ids.shape[1]
    return mx.pad(stop_ids, [(0, 0), (0, missing)], constant_values=-1)
