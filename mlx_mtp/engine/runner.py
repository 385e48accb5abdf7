"""Runs the model over what the scheduler planned: launches now, reads later.

One decoding step, on the device from end to end:

    verify    trunk over [last token, drafts]
    sample    the model's own token after each position
    accept    the drafts up to the first that differs from it, and one token more
    commit    every cache keeps that many of its new rows
    draft     head over the kept rows, then its own recursion
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_mtp.engine.batch import Batch
from mlx_mtp.engine.faults import step_error
from mlx_mtp.engine.prefix import PrefixCache, Save
from mlx_mtp.engine.request import TokenLogprobs
from mlx_mtp.engine.scheduler import Plan, PrefillChunk, RowResult
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.errors import MlxMtpError, StepError, StepMemoryError
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.guide import Guide
from mlx_mtp.speculative.acceptance import Verdict, accept
from mlx_mtp.speculative.proposer import Proposer

logger = logging.getLogger(__name__)

_TIDY_STEPS = 256


@dataclass(frozen=True)
class Launched:
    """A window on its way.

    Args:
        sequences: its rows.
        num_positions: length of each row's window; in a prefill chunk all of it is kept.
        num_drafts: how many drafts of its window count for each row; empty in a prefill.
        num_proposed: drafts a row that the step proposes for the next window.
        is_prefill: the rows' prompts, not their drafts.
        tokens: int32 [B, T], drawn after each position (the last alone in a prefill).
        verdict: how many of them each row emits.
        logprobs: as `Sampler.logprobs` gives them.
        error: the launch failed and nothing else is valid.
        row_errors: rows that can't go on, by number; the others are valid.
        saves: prefixes that were copied after it.
    """

    sequences: tuple[Sequence, ...]
    num_positions: tuple[int, ...]
    is_prefill: bool = False
    tokens: mx.array | None = None
    verdict: Verdict | None = None
    logprobs: tuple[mx.array, mx.array, mx.array] | None = None
    num_drafts: tuple[int, ...] = ()
    num_proposed: int = 0
    error: StepError | None = None
    row_errors: Mapping[int, MlxMtpError] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)


@dataclass(frozen=True)
class ChunkArrays:
    """A prefill chunk on the host.

    Args:
        tokens: int32 [B, T], padded on the right.
        following: the token after each, int32 [B, T]; 0 where the prompt ends.
        lengths: int32 [B].
        is_last: bool [B], the row's prompt ends in this chunk.
        before: 1 where all rows begin with the last token of a prefix that is in the caches, whose
            hidden state is known; else 0.
    """

    tokens: np.ndarray
    following: np.ndarray
    lengths: np.ndarray
    is_last: np.ndarray
    before: int

    @staticmethod
    def of(chunk: PrefillChunk, before: int) -> ChunkArrays:
        """Lay a chunk's rows out."""
        lengths = np.array([length for _, _, length in chunk.rows], dtype=np.int32) + before
        tokens = np.zeros((len(lengths), int(lengths.max())), dtype=np.int32)
        following = np.zeros_like(tokens)
        is_last = np.zeros(len(lengths), dtype=bool)
        for row, (sequence, start, length) in enumerate(chunk.rows):
            piece = sequence.prompt[start - before : start + length + 1]
            tokens[row, : length + before] = piece[: length + before]
            following[row, : len(piece) - 1] = piece[1:]
            is_last[row] = start + length == sequence.num_prompt
        return ChunkArrays(tokens, following, lengths, is_last, before)

    @property
    def num_computed(self) -> np.ndarray:
        """int32 [B], how many of a row's tokens are to be computed."""
        return self.lengths - self.before


class ModelRunner:
    """Owns the batches on the device.

    Args:
        model: the loaded model.
        proposer: where drafts come from; None for plain decoding.
        vocab_size: of the tokenizer; ids at or above it are never sampled.
        prefixes: the prefix cache; None: nothing is saved, and no prompt begins with what was.
    """

    def __init__(
        self,
        model: LoadedModel,
        proposer: Proposer | None,
        vocab_size: int,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self._model = model
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._prefixes = prefixes
        self._prefilling: dict[int, Batch] = {}
        self._ready: list[Batch] = []
        self._decoding: Batch | None = None
        self._num_steps = 0
        self._failed_last = False

    def run(self, plan: Plan) -> list[Launched]:
        """Launch a plan. A failure comes back as the result of the rows it hit."""
        self._forget(plan)
        self._tidy(plan)
        launched = []
        if plan.chunk is not None:
            chunk, rows = plan.chunk, tuple(s for s, _, _ in plan.chunk.rows)
            depth = plan.num_draft_tokens
            launched.append(self._guard(rows, lambda: self._prefill(chunk, depth)))
        if plan.decode:
            rows = plan.decode
            launched.append(self._guard(rows, lambda: self._decode(rows, plan.num_draft_tokens)))
        return launched

    def read(self, launched: Iterable[Launched]) -> list[RowResult]:
        """Wait for windows and read what they brought."""
        results: list[RowResult] = []
        for window in launched:
            try:
                results += _results(window)
            except Exception as error:
                logger.exception("A step failed on the device")
                results += self._failed(window, error)
            else:
                if self._prefixes is not None:
                    self._prefixes.commit(window.saves)
        return results

    def release(self) -> None:
        """Let go of all rows, and give freed buffers back: nothing runs, and nobody waits."""
        self._decoding, self._ready, self._prefilling = None, [], {}
        mx.clear_cache()

    def save_ends(self, ended: Iterable[Sequence]) -> None:
        """Copy the caches of rows whose end was just read; `settle` takes the copies in."""
        rows = frozenset(ended)
        if self._prefixes is not None and self._decoding is not None and rows:
            self._prefixes.save_ends(self._decoding, rows)

    def settle(self) -> None:
        """Take in the ends of answers, so that the next lookup finds them."""
        if self._prefixes is not None:
            self._prefixes.settle()

    def _prefill(self, chunk: PrefillChunk, num_draft_tokens: int) -> Launched:
        """One chunk of prompts; rows whose prompt ends in it get their first token and drafts."""
        sequences = tuple(s for s, _, _ in chunk.rows)
        batch = self._prefilling.pop(chunk.group, None)
        # The rows of a group all begin with a prefix, or none does.
        warm = batch is None and all(s.prefix is not None for s in sequences)
        arrays = ChunkArrays.of(chunk, int(warm))
        limit = max(s.max_cached for s in sequences) + arrays.tokens.shape[1]
        batch = batch or self._new_batch(sequences)
        assert tuple(batch.sequences) == sequences, "the plan and the batches disagree"
        if warm and not self._restore(batch, limit):
            return Launched((), (), is_prefill=True)

        start = batch.cache.offset - arrays.before
        hidden = self._chunk_hidden(batch, arrays, limit)
        num_kept = mx.array(arrays.lengths)
        batch.keep_hidden(hidden, num_kept)
        targets, launched = self._first_tokens(batch, arrays, start + num_kept)
        depth = num_draft_tokens if arrays.is_last.any() else 0
        self._propose(batch, hidden, targets, start, num_kept, depth, limit)

        self._start(batch, launched)
        if self._prefixes is not None:
            launched.saves.extend(self._prefixes.save_prompts(batch))
        self._file(chunk.group, batch, arrays.is_last.tolist())
        return launched

    def _restore(self, batch: Batch, limit: int) -> bool:
        """Fill a new batch with its rows' prefixes; if that fails, their prompts start anew."""
        assert self._prefixes is not None
        restored = self._prefixes.restore(batch, limit)
        if not restored:
            for sequence in batch.sequences:
                sequence.restart()
        return restored

    def _chunk_hidden(self, batch: Batch, arrays: ChunkArrays, limit: int) -> mx.array:
        """Post-norm hidden states of a chunk, [B, T, H]; nothing runs if they are all known."""
        known = batch.last_hidden
        tokens = mx.array(arrays.tokens)[:, arrays.before :]
        if not tokens.shape[1]:
            return known
        num_computed = mx.array(arrays.num_computed)
        batch.cache.begin(limit, num_computed)
        hidden = self._model.hidden(tokens, batch.cache)
        batch.cache.commit(num_computed)
        return mx.concatenate([known, hidden], axis=1) if arrays.before else hidden

    def _first_tokens(
        self, batch: Batch, arrays: ChunkArrays, end: mx.array
    ) -> tuple[mx.array, Launched]:
        """Draw the token after each prompt that ends in this chunk.

        Args:
            batch: the chunk's rows, with the hidden state of its last position.
            arrays: the chunk.
            end: absolute position after the chunk, int32 [B].

        Returns:
            The token after each position, int32 [B, T], and what to read later.
        """
        rows, lengths = tuple(batch.sequences), tuple(arrays.num_computed.tolist())
        targets = mx.array(arrays.following)
        batch.guide = Guide(s.constraint if d else None for s, d in zip(rows, arrays.is_last))
        if not arrays.is_last.any():
            return targets, Launched(rows, lengths, is_prefill=True)
        done = mx.array(arrays.is_last)
        at_end = mx.array(arrays.lengths - 1)[:, None]
        window = mx.take_along_axis(mx.array(arrays.tokens), at_end, axis=1)
        logits = self._model.logits(batch.last_hidden)
        drawn = batch.draw(logits, end[:, None], window)
        verdict = accept(
            drawn,
            window,
            stop_ids=batch.stop_ids,
            remaining=batch.remaining,
            finished=~done,
        )
        batch.settle(verdict, drawn)
        batch.ended = verdict.finished & done
        known = mx.take_along_axis(targets, at_end, axis=1)
        following = mx.where(done[:, None], drawn, known)
        targets = mx.put_along_axis(targets, at_end, following, axis=1)
        logprobs = batch.sampler.logprobs(logits, drawn)
        errors = batch.guide.errors()
        return targets, Launched(rows, lengths, True, drawn, verdict, logprobs, row_errors=errors)

    def _decode(self, wanted: tuple[Sequence, ...], num_draft_tokens: int) -> Launched:
        """One step of every running row."""
        batch = self._gather(wanted)
        window = mx.concatenate([batch.last[:, None], batch.drafts], axis=1)
        length = window.shape[1]
        start = batch.cache.offset
        limit = max(s.max_cached for s in batch.sequences) + length
        # Without drafts it is known beforehand what each row keeps, and no window is left pending.
        lengths = mx.where(batch.ended, 0, 1) if length == 1 else None

        batch.cache.begin(limit, lengths)
        hidden = self._model.hidden(window, batch.cache)
        logits = self._model.logits(hidden)
        batch.guide = Guide(s.constraint for s in batch.sequences)
        targets = batch.draw(logits, start[:, None] + 1 + mx.arange(length), window)
        verdict = accept(
            targets,
            window,
            stop_ids=batch.stop_ids,
            remaining=batch.remaining,
            finished=batch.ended,
            num_drafts=batch.draft_limits(),
        )
        num_drafts = tuple(batch.num_drafts)
        batch.cache.commit(verdict.num_kept)
        batch.settle(verdict, targets)
        batch.keep_hidden(hidden, verdict.num_kept)
        self._propose(batch, hidden, targets, start, verdict.num_kept, num_draft_tokens, limit)

        rows = tuple(batch.sequences)
        logprobs = batch.sampler.logprobs(logits, targets)
        launched = Launched(
            rows,
            (length,) * len(rows),
            tokens=targets,
            verdict=verdict,
            logprobs=logprobs,
            num_drafts=num_drafts,
            num_proposed=batch.drafts.shape[1],
            row_errors=batch.guide.errors(),
        )
        self._start(batch, launched)
        return launched

    def _propose(
        self,
        batch: Batch,
        hidden: mx.array,
        targets: mx.array,
        start: mx.array,
        num_kept: mx.array,
        num_draft_tokens: int,
        limit: int,
    ) -> None:
        if self._proposer is None or batch.draft_state is None:
            return
        drafts = self._proposer.propose(
            batch.draft_state,
            hidden=hidden,
            targets=targets,
            start=start,
            num_kept=num_kept,
            num_draft_tokens=num_draft_tokens,
            limit=limit,
            sampler=batch.drafter,
        )
        batch.set_drafts(drafts)

    def _new_batch(self, sequences: tuple[Sequence, ...]) -> Batch:
        state = None
        if self._proposer is not None:
            state = self._proposer.make_state([s.request_id for s in sequences])
        cache = self._model.make_cache(len(sequences))
        return Batch(sequences, cache, state, self._vocab_size)

    def _start(self, batch: Batch, launched: Launched) -> None:
        """Set the device to work on a window and on the state it leaves."""
        read_later = (launched.tokens, *(launched.verdict or ()), *(launched.logprobs or ()))
        mx.async_eval(*batch.arrays(), *(a for a in read_later if a is not None))
        for sequence, num_positions in zip(launched.sequences, launched.num_positions, strict=True):
            sequence.launched(num_positions)

    def _file(self, group: int, batch: Batch, is_last: list[bool]) -> None:
        """Rows that are done wait until their first token is read; the rest prefill on.

        Until then nothing of them touches the running rows, so a prefill that fails hits nobody
        else.
        """
        done = {s for s, last in zip(batch.sequences, is_last, strict=True) if last}
        if done:
            self._ready.append(batch.take(lambda s: s in done))
        if len(done) < len(batch):
            self._prefilling[group] = batch.take(lambda s: s not in done)

    def _gather(self, wanted: tuple[Sequence, ...]) -> Batch:
        """The running batch with exactly the wanted rows."""
        rows = frozenset(wanted)
        parts = [self._decoding] if self._decoding is not None else []
        waiting: list[Batch] = []
        for batch in self._ready:
            (parts if rows.issuperset(batch.sequences) else waiting).append(batch)
        kept = [p for p in (part.take(lambda s: s in rows) for part in parts) if len(p)]
        self._decoding, self._ready = kept[0], waiting
        for batch in kept[1:]:
            self._decoding.join(batch)
        assert set(self._decoding.sequences) == rows, "the plan and the batches disagree"
        return self._decoding

    def _forget(self, plan: Plan) -> None:
        """Let go of rows that no one waits for."""
        for group, batch in list(self._prefilling.items()):
            self._prefilling[group] = batch.take(lambda s: s in plan.live)
            if not len(self._prefilling[group]):
                del self._prefilling[group]
        ready = (batch.take(lambda s: s in plan.live) for batch in self._ready)
        self._ready = [batch for batch in ready if len(batch)]
        if self._decoding is not None and not any(s in plan.live for s in self._decoding.sequences):
            self._decoding = None

    def _tidy(self, plan: Plan) -> None:
        """Give freed buffers back now and then; mlx keeps them for reuse without a bound."""
        self._num_steps += 1
        due = plan.empty or plan.chunk is not None or self._num_steps % _TIDY_STEPS == 0
        if due or self._failed_last:
            mx.clear_cache()
        self._failed_last = False

    def _guard(self, rows: tuple[Sequence, ...], launch: Callable[[], Launched]) -> Launched:
        try:
            return launch()
        except Exception as error:
            logger.exception("A step failed while it was launched")
            for sequence in rows:
                sequence.launched(0)
            self._drop(rows)
            return Launched(rows, (0,) * len(rows), error=self._told(error))

    def _failed(self, window: Launched, error: Exception) -> list[RowResult]:
        """Results of a window that failed, and of all rows whose state now depends on it."""
        others = [s for s in self._drop(window.sequences) if s not in window.sequences]
        for sequence in others:
            sequence.launched(0)
        rows = [*zip(window.sequences, window.num_positions), *((s, 0) for s in others)]
        told = self._told(error)
        return [RowResult(s, n, error=told) for s, n in rows]

    def _told(self, error: Exception) -> StepError:
        """What the requests of a failed step end with."""
        told = step_error(error)
        if isinstance(told, StepMemoryError) and self._prefixes is not None:
            # The one thing here that can be done without.
            self._prefixes.clear()
        return told

    def _drop(self, rows: tuple[Sequence, ...]) -> list[Sequence]:
        """Drop every batch that any of these rows is in; returns the rows that were in them."""
        dropped: list[Sequence] = []
        # Its buffers are free once the error, which holds on to them, has been dealt with.
        self._failed_last = True

        def hit(batch: Batch) -> bool:
            if not any(s in rows for s in batch.sequences):
                return False
            dropped.extend(batch.sequences)
            return True

        if self._decoding is not None and hit(self._decoding):
            self._decoding = None
        self._ready = [b for b in self._ready if not hit(b)]
        self._prefilling = {n: b for n, b in self._prefilling.items() if not hit(b)}
        return dropped


def _results(window: Launched) -> list[RowResult]:
    if window.error is not None:
        rows = zip(window.sequences, window.num_positions, strict=True)
        return [RowResult(s, n, error=window.error) for s, n in rows]
    if window.tokens is None or window.verdict is None:
        rows = zip(window.sequences, window.num_positions, strict=True)
        return [RowResult(s, n, n, num_prompt_tokens=n, is_prefill=True) for s, n in rows]
    tokens = np.array(window.tokens)
    num_kept = np.array(window.verdict.num_kept).tolist()
    num_accepted = np.array(window.verdict.num_accepted).tolist()
    finished = np.array(window.verdict.finished).tolist()
    tables = [np.array(a) for a in window.logprobs] if window.logprobs is not None else None
    results = []
    for row, (sequence, length) in enumerate(zip(window.sequences, window.num_positions)):
        kept = num_kept[row]
        top = sequence.request.sampling.top_logprobs
        if row in window.row_errors:
            held = length if window.is_prefill else kept
            results.append(RowResult(sequence, length, held, error=window.row_errors[row]))
            continue
        results.append(
            RowResult(
                sequence,
                length,
                num_kept=length if window.is_prefill else kept,
                token_ids=tuple(tokens[row, :kept].tolist()),
                logprobs=() if tables is None or top is None else _report(tables, row, kept, top),
                finished=finished[row],
                num_prompt_tokens=length if window.is_prefill else 0,
                is_prefill=window.is_prefill,
                num_draft_tokens=0 if window.is_prefill or kept == 0 else window.num_drafts[row],
                num_accepted_tokens=0 if window.is_prefill else num_accepted[row],
            )
        )
    return results


def _report(tables: list[np.ndarray], row: int, kept: int, top: int) -> tuple[TokenLogprobs, ...]:
    chosen, ids, values = tables
    return tuple(
        TokenLogprobs(
            float(chosen[row, j]),
            tuple(zip(ids[row, j, :top].tolist(), values[row, j, :top].tolist())),
        )
        for j in range(kept)
    )
