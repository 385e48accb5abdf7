"""Runs the model as the scheduler planned: launches a step, and reads its results later.

A chunk and a decode step are separate batches, even if they share a forward pass. In one batch a
GatedDeltaNet layer would keep a pending window of [rows, longest window] positions, so a prompt's
row of 256 tokens would cost every other row 256 positions.
"""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from functools import partial
from typing import TypeVar

import mlx.core as mx
import numpy as np

from mlx_mtp.engine.batch import Batch, Batches
from mlx_mtp.engine.health import step_error
from mlx_mtp.engine.logprobs import prompt_scores
from mlx_mtp.engine.prompts import Prompts
from mlx_mtp.engine.step import (
    ChunkArrays,
    ForwardPass,
    InFlightStep,
    SampledWindow,
    StepLaunch,
    StepPlan,
    StepRow,
)
from mlx_mtp.errors import MlxMtpError, StepError, StepMemoryError, is_fault
from mlx_mtp.kernels.gpu import fused, launch_early
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.prefix.cache import PrefixCache
from mlx_mtp.sampling.grammar_masks import DraftSampler, GrammarMasks
from mlx_mtp.speculative.drafter import Computed, DeferredWrites, MTPDrafter
from mlx_mtp.speculative.verify import verify_window

logger = logging.getLogger(__name__)

# mlx's cache is cleared after this many steps, or prompt tokens: not after each short chunk.
_CLEAR_STEPS = 256
_CLEAR_TOKENS = 512

T = TypeVar("T")


class ModelRunner:
    """Runs steps on one model; ids at or above the tokenizer's `vocab_size` are never sampled."""

    def __init__(
        self,
        model: LoadedModel,
        drafter: MTPDrafter | None,
        vocab_size: int,
        prefixes: PrefixCache | None = None,
        clear_answers: Callable[[], None] = lambda: None,  # drops answers that drafts copy from
        prompts: Prompts | None = None,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self.vocab_size = vocab_size
        self.prefixes = prefixes or PrefixCache()
        self._clear_answers = clear_answers
        self._prompts = prompts or Prompts(model)
        self.batches = Batches()
        self._num_steps = self._num_tokens = 0  # the tokens since mlx's cache was cleared
        self._failed_last = False

    def run(self, plan: StepPlan) -> list[InFlightStep]:
        """Launch a plan. A failure is returned as a step that ends its rows with an error."""
        self.batches.prune(plan.live)
        self._clear_cache(plan)
        if self._drafter is None:
            for row in (*plan.chunk, *plan.decode):
                row.num_proposed = 0
        launches = []
        if plan.chunk:
            launches.append((plan.chunk, self._prefill(plan.chunk)))
        if plan.decode:
            launches.append((plan.decode, self._decode(plan.decode)))
        groups = [launches] if plan.together else [[each] for each in launches]
        return [step for group in groups for step in self._launch(group)]

    def read(self, step: InFlightStep) -> list[InFlightStep]:
        """Wait for a step and read it; a failure on the device ends its rows with an error.

        Returns the step; if it failed, also a failed step for the other rows of its batch.
        """
        try:
            step.read()
        except Exception as error:
            logger.exception("A step failed on the device")
            failure = self._as_step_error(error)
            step.fail(failure)
            dropped = self.batches.drop(step.sequences)
            others = [StepRow(s) for s in dropped if s not in step.sequences]
            return [step, _failed(others, failure)]
        if step.saves:
            self.prefixes.insert_saves(step.saves)
        return [step]

    def save_answers(self, steps: Iterable[InFlightStep]) -> None:
        """Copy the caches of rows that have just ended into the prefix cache."""
        rows = [row for step in steps for row in step.rows if row.finished and row.token_ids]
        # With --exact (`chunk_ends` is set) nothing is saved: decode steps computed the answer's
        # KV, and a later prompt can reuse only KV with the same bits as its own chunks would give.
        prefixes = {row.sequence: row.sequence.prefix for row in rows if row.sequence.finished}
        ended = {s for s, p in prefixes.items() if not (p.dropped or p.chunk_ends)}
        if not ended or (batch := self.batches.decoding) is None:
            return
        for number, sequence in enumerate(batch.sequences):
            if sequence in ended:
                # The KV of the last token has not been computed.
                tokens = (*sequence.prefix.prompt, *sequence.output[:-1])
                self.prefixes.save_end(batch, number, sequence.prefix, tokens)

    def give_up_caches(self) -> None:
        """Drop all cached prefixes, answers and images: the only memory that can be freed."""
        self.prefixes.clear()
        self._clear_answers()
        self._prompts.clear()

    def check_ranks_agree(self) -> None:
        """Raise ModelError if another rank computes different numbers; a single rank has none."""

    def release(self) -> None:
        self.batches = Batches()
        mx.clear_cache()

    def _launch(self, launches: Many[tuple[Many[StepRow], StepLaunch]]) -> list[InFlightStep]:
        """Complete these launches with one forward pass over the tokens of all launches."""
        steps: list[InFlightStep] = []
        waiting, passes = [], []
        for rows, launch in launches:
            begun = self._guard(rows, partial(_resume, launch))
            if isinstance(begun, InFlightStep):
                steps.append(begun)
            else:
                waiting.append((rows, launch))
                passes.append(begun)
        if not waiting:
            return steps
        everyone = [row for rows, _ in waiting for row in rows]
        hidden = self._guard(everyone, lambda: self._hidden(passes))
        if isinstance(hidden, InFlightStep):
            return [*steps, hidden]
        for (rows, launch), states in zip(waiting, hidden, strict=True):
            step = self._guard(rows, partial(_resume, launch, states))
            assert isinstance(step, InFlightStep)
            steps.append(step)
        return steps

    def _hidden(self, passes: Many[ForwardPass]) -> Many[mx.array]:
        """Run the target model; returns the post-norm hidden states [N, H] of each pass."""
        if len(passes) == 1:
            return [self._model.hidden(*passes[0])]
        tokens, caches = zip(*passes)
        hidden = self._model.hidden(mx.concatenate([*tokens]), *caches)
        ends: list[int] = np.cumsum([len(ids) for ids in tokens])[:-1].tolist()
        return list(mx.split(hidden, ends))

    def _prefill(self, chunk: tuple[StepRow, ...]) -> StepLaunch:
        sequences = [row.sequence for row in chunk]
        if not self._prompts.see(chunk[0]):
            return InFlightStep([], is_prefill=True, timing_valid=False)
        batch = self.batches.take(sequences)
        # Either all rows of a group begin with a cached prefix, or none does.
        nodes = [s.prefix.node for s in sequences if s.prefix.node is not None]
        after_prefix = batch is None and len(nodes) == len(sequences)
        arrays = ChunkArrays(chunk, int(after_prefix), [self._prompts.ids(s) for s in sequences])
        if batch is None:
            assert all(s.max_cached == s.prefix.num_reused for s in sequences), "they have run"
            cache = self._model.make_cache(len(sequences))
            state = DeferredWrites() if self._drafter is None else self._drafter.make_state(cache)
            never = self._model.image_token_ids
            batch = Batch(sequences, cache, state, self.vocab_size, never)
            if (images := sequences[0].images) is not None:
                cache.shift = mx.array([images.shift], dtype=mx.int32)
        limits = _limits(chunk, arrays.lengths.tolist())
        rooms = [max(n, s.num_prompt) for n, s in zip(limits, sequences)]
        # The first argument of `reserve` sets how far attention reads, which can change a prompt's
        # bits. The bits must depend neither on drafts nor on where a cached prefix ended. `limits`
        # includes the drafts and the token repeated after a prefix, so it is reserved only after
        # the prompt's forward pass, below.
        batch.cache.reserve([row.sequence.max_cached + row.length for row in chunk], rooms)
        if after_prefix and not self.prefixes.restore(batch, nodes):
            # The prefix was dropped; the next plan computes the prompts from their beginning.
            for sequence in sequences:
                sequence.begin_prompt(0)
            return InFlightStep([], is_prefill=True)

        start = batch.cache.offset - arrays.num_repeated
        packing = batch.cache.packing(start, arrays.lengths.tolist())
        self._prompts.place(packing, chunk[0], arrays.num_repeated)
        hidden, counts = batch.last_hidden[:, 0], arrays.num_to_compute
        if counts.any():
            computed = mx.array(counts)
            ends = [row.start + row.length for row in chunk]
            window = batch.cache.begin_window(counts.tolist(), computed, ends)
            self._prompts.place(window, chunk[0])
            states = yield arrays.to_compute, batch.cache
            batch.cache.commit(computed)
            hidden = packing.prepend_first(hidden, states) if arrays.num_repeated else states
        num_kept = mx.array(arrays.lengths)
        last = mx.array(arrays.ends.astype(np.int32))
        batch.keep_hidden(hidden[last], num_kept)
        for row in chunk:
            row.num_cached = row.length
        step = InFlightStep(chunk, is_prefill=True)
        # A prompt's last token has no following token. (No token is repeated here: requests for
        # prompt logprobs reuse no prefix.)
        inside = [row.length - row.is_last for row in chunk]
        tops = [s.request.sampling.prompt_logprobs for s in sequences]
        following = self._prompts.token_ids(arrays.following)
        given = following, inside, arrays.lengths.tolist(), tops
        step.prompt_scores = prompt_scores(self._model, hidden, *given, self.vocab_size)
        # Evaluated now, so that all ranks exchange these logits before those of first tokens.
        mx.async_eval(step.prompt_scores or ())
        targets = arrays.following
        if arrays.is_last.any():
            targets = self._first_tokens(batch, step, arrays, last, start + num_kept)
        done = Computed(hidden, targets, last, packing, batch.cache)
        batch.cache.reserve(limits, rooms)
        self._propose_and_launch(batch, step, done)
        for number, row in enumerate(chunk):
            end = row.start + row.length
            step.saves += self.prefixes.save_prompt(batch, number, row.sequence.prefix, end)
        special = after_prefix or step.saves or step.prompt_scores or sequences[0].images
        step.timing_valid = not special
        step.done = batch.last_hidden
        self.batches.store(batch, arrays.is_last.tolist())
        return step

    def _first_tokens(
        self, batch: Batch, step: InFlightStep, arrays: ChunkArrays, last: mx.array, end: mx.array
    ) -> mx.array:
        """Sample the tokens after prompts that end; returns the token after each position, [N].

        `last` and `end` are int32 [B]: the index of each row's last token, and the position after
        that token.
        """
        done = mx.array(arrays.is_last)
        rows = zip(batch.sequences, arrays.is_last)
        batch.masks = GrammarMasks(s.constraint if ends else None for s, ends in rows)
        window = arrays.tokens[last][:, None]
        logits = self._model.logits(batch.last_hidden)
        step.sampled = _sample(batch, logits, end[:, None], window, finished=~done)
        step.set_errors(batch.masks.errors())
        newest = mx.where(done, step.sampled.tokens[:, 0], arrays.following[last])
        return mx.put_along_axis(arrays.following, last, newest, axis=0)

    def _decode(self, planned: tuple[StepRow, ...]) -> StepLaunch:
        row_of = {row.sequence: row for row in planned}
        batch = self.batches.gather(row_of)
        rows = [row_of[sequence] for sequence in batch.sequences]
        batch.upload_host_drafts(rows)
        window = batch.last[:, None]
        if batch.drafts.size:
            window = mx.concatenate([window, batch.drafts], axis=1)
        for row, count in zip(rows, batch.num_drafts, strict=True):
            row.length, row.num_drafts = 1 + count, count
        lengths = [row.length for row in rows]
        batch.cache.reserve(_limits(rows, lengths))
        start = batch.cache.offset
        # Without drafts each row keeps its single token, so no window is left pending.
        kept = _num_kept(batch.ended) if window.shape[1] == 1 else None
        packing = batch.cache.begin_window(lengths, kept)

        hidden = yield packing.rectangle.flat(window), batch.cache
        logits = packing.rectangle.fill(self._model.logits(hidden))
        batch.masks = GrammarMasks(s.constraint for s in batch.sequences)
        positions = start[:, None] + mx.arange(1, 1 + window.shape[1])
        is_padded = min(batch.num_drafts) < window.shape[1] - 1
        num_drafts = mx.array(batch.num_drafts, dtype=mx.int32) if is_padded else None
        sampled = _sample(batch, logits, positions, window, batch.ended, num_drafts)
        num_kept = sampled.accepted.num_kept
        batch.cache.commit(num_kept)
        last = packing.at(sampled.accepted.at_last)
        batch.keep_hidden(hidden[last], num_kept)
        step = InFlightStep(rows, sampled=sampled)
        targets = packing.rectangle.flat(sampled.tokens)
        computed = Computed(hidden, targets, last, packing, batch.cache)
        self._propose_and_launch(batch, step, computed)
        step.set_errors(batch.masks.errors())
        return step

    def _propose_and_launch(self, batch: Batch, step: InFlightStep, computed: Computed) -> None:
        """Propose drafts for the next windows, and launch everything that is not launched yet."""
        batch.num_drafts = [row.num_proposed for row in step.rows]
        if self._drafter is not None:
            # The host, which waits for these tokens, then does not wait for the head.
            launch_early(step.sampled or (), on_gpu=any(batch.num_drafts))
            sampler = DraftSampler(batch.sampler, batch.masks) if batch.masks else batch.sampler
            given = computed, batch.num_drafts, sampler
            batch.drafts = self._drafter.propose(batch.draft_state, *given)
        else:
            batch.drafts = batch.drafts[:, :0]
        mx.async_eval(*batch.arrays(), step.sampled or (), step.prompt_scores or ())
        for row in step.rows:
            row.sequence.note_launched(row.length)

    def _clear_cache(self, plan: StepPlan) -> None:
        """Free mlx's cached buffers regularly: mlx keeps them for reuse without a limit.

        On CUDA they count towards the limit that `wire_memory` sets, and freeing them waits for all
        launched chunks. With the new allocations that costs a third of a chunk's time, so on CUDA
        prompt tokens don't count.
        """
        self._num_steps += 1
        self._num_tokens += sum(row.length for row in plan.chunk)
        due = not (plan.chunk or plan.decode) or self._num_steps % _CLEAR_STEPS == 0
        many = self._num_tokens >= _CLEAR_TOKENS and not mx.cuda.is_available()
        if due or self._failed_last or many:
            self._num_tokens = 0
            mx.clear_cache()
        self._failed_last = False

    def _guard(self, rows: Many[StepRow], part: Callable[[], T]) -> T | InFlightStep:
        try:
            return part()
        except BaseException as error:
            if not is_fault(error):  # A panic in the Rust code of grammar masks is a fault, too.
                raise
            logger.exception("A step failed while it was launched")
            self.batches.drop([row.sequence for row in rows])
            return _failed(rows, self._as_step_error(error))

    def _as_step_error(self, error: BaseException) -> StepError:
        # Clear the cache in the next `run`: until then the error's traceback holds buffers.
        self._failed_last = True
        reported = step_error(error)
        if isinstance(reported, StepMemoryError):
            self.give_up_caches()
        return reported


def _sample(
    batch: Batch,
    logits: mx.array,
    positions: mx.array,
    window: mx.array,
    finished: mx.array,
    num_drafts: mx.array | None = None,
) -> SampledWindow:
    """Sample tokens at positions int32 [B, T] from logits [B, T, V], and accept drafts."""
    mask = None
    if batch.masks:
        mx.async_eval(logits)  # The host computes the masks meanwhile.
        mask = batch.masks.window_mask(window)
    tokens, replaced = batch.sampler.verify(logits, positions, window, mask, num_drafts)
    accepted = verify_window(
        tokens,
        window,
        stop_ids=batch.stop_ids,
        remaining=batch.remaining,
        finished=finished,
        num_drafts=num_drafts,
    )
    batch.sampler.count_sampled(tokens, accepted.num_kept, positions)
    batch.last, batch.remaining = accepted.last, accepted.remaining
    batch.ended, batch.num_kept = accepted.finished, accepted.num_kept
    if batch.masks:
        batch.masks.advance(tokens, accepted.num_kept)
    return SampledWindow(tokens, accepted, batch.sampler.logprobs(logits, tokens), window, replaced)


@fused
def _num_kept(ended: mx.array) -> mx.array:
    return mx.where(ended, 0, 1)


def _resume(launch: StepLaunch, hidden: mx.array | None = None) -> ForwardPass | InFlightStep:
    """Advance a launch to its forward pass, or to its end."""
    try:
        return launch.send(hidden)  # type: ignore[arg-type]
    except StopIteration as end:
        step: InFlightStep = end.value
        return step


def _limits(rows: Many[StepRow], lengths: Many[int]) -> list[int]:
    """Upper bounds of the rows' lengths after this step and all head's drafts but the last."""
    return [
        row.sequence.max_cached + length + max(row.num_proposed - 1, 0)
        for row, length in zip(rows, lengths, strict=True)
    ]


def _failed(rows: Many[StepRow], error: MlxMtpError) -> InFlightStep:
    """A failed step of rows whose launch did not complete."""
    for row in rows:
        row.length = 0
        row.sequence.note_launched(0)
    step = InFlightStep(rows)
    step.fail(error)
    return step
