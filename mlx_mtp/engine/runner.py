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
from collections.abc import Callable, Iterable

import mlx.core as mx

from mlx_mtp.engine.batch import Batch
from mlx_mtp.engine.batches import Batches
from mlx_mtp.engine.chunk import ChunkArrays
from mlx_mtp.engine.faults import step_error
from mlx_mtp.engine.plan import Plan, PrefillChunk, RowResult
from mlx_mtp.engine.prefix import PrefixCache
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.window import Launched, row_results
from mlx_mtp.errors import StepError, StepMemoryError
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.grammar_masks import GrammarMasks
from mlx_mtp.speculative.acceptance import accept
from mlx_mtp.speculative.proposer import Proposer

logger = logging.getLogger(__name__)

_TIDY_STEPS = 256


class ModelRunner:
    """Runs what the scheduler planned, on one model.

    Args:
        model: the loaded model.
        proposer: where drafts come from; None for plain decoding.
        vocab_size: of the tokenizer; ids at or above it are never sampled.
        prefixes: the prefix cache; None: nothing is saved, and no prompt begins with what was.

    Attributes:
        batches: all rows on the device.
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
        self.batches = Batches()
        self._num_steps = 0
        self._failed_last = False

    def run(self, plan: Plan) -> list[Launched]:
        """Launch a plan. A failure comes back as the result of the rows it hit."""
        self.batches.forget(plan.live)
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
                results += row_results(window)
            except Exception as error:
                logger.exception("A step failed on the device")
                results += self._failed(window, error)
            else:
                if self._prefixes is not None:
                    self._prefixes.commit(window.saves)
        return results

    def release(self) -> None:
        """Let go of all rows, and give freed buffers back: nothing runs, and nobody waits."""
        self.batches.clear()
        mx.clear_cache()

    def save_ends(self, ended: Iterable[Sequence]) -> None:
        """Copy the caches of rows whose end was just read; `settle` takes the copies in."""
        rows, running = frozenset(ended), self.batches.decoding
        if self._prefixes is not None and running is not None and rows:
            self._prefixes.save_ends(running, rows)

    def settle(self) -> None:
        """Take in the ends of answers, so that the next lookup finds them."""
        if self._prefixes is not None:
            self._prefixes.settle()

    def _prefill(self, chunk: PrefillChunk, num_draft_tokens: int) -> Launched:
        """One chunk of prompts; rows whose prompt ends in it get their first token and drafts."""
        sequences = tuple(s for s, _, _ in chunk.rows)
        batch = self.batches.prefilling.pop(chunk.group, None)
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
        self.batches.file(chunk.group, batch, arrays.is_last.tolist())
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
        batch.guide = GrammarMasks(
            s.constraint if d else None for s, d in zip(rows, arrays.is_last)
        )
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
        batch = self.batches.gather(wanted)
        window = mx.concatenate([batch.last[:, None], batch.drafts], axis=1)
        length = window.shape[1]
        start = batch.cache.offset
        limit = max(s.max_cached for s in batch.sequences) + length
        # Without drafts it is known beforehand what each row keeps, and no window is left pending.
        lengths = mx.where(batch.ended, 0, 1) if length == 1 else None

        batch.cache.begin(limit, lengths)
        hidden = self._model.hidden(window, batch.cache)
        logits = self._model.logits(hidden)
        batch.guide = GrammarMasks(s.constraint for s in batch.sequences)
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
            sampler=batch.make_drafter(),
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
            self.batches.drop(rows)
            return Launched(rows, (0,) * len(rows), error=self._as_step_error(error))

    def _failed(self, window: Launched, error: Exception) -> list[RowResult]:
        """Results of a window that failed, and of all rows whose state now depends on it."""
        others = [s for s in self.batches.drop(window.sequences) if s not in window.sequences]
        for sequence in others:
            sequence.launched(0)
        rows = [*zip(window.sequences, window.num_positions), *((s, 0) for s in others)]
        told = self._as_step_error(error)
        return [RowResult(s, n, error=told) for s, n in rows]

    def _as_step_error(self, error: Exception) -> StepError:
        """What the requests of a failed step end with."""
        # Its buffers are free once the error, which holds on to them, has been dealt with.
        self._failed_last = True
        told = step_error(error)
        if isinstance(told, StepMemoryError) and self._prefixes is not None:
            # The one thing here that can be done without.
            self._prefixes.clear()
        return told
