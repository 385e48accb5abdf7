"""Which rows take part in the next step. No arrays, no model: policy alone."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import replace
from time import perf_counter

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.fair_queue import FairQueue
from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.engine.request import FinishReason, RequestOutput
from mlx_mtp.engine.sequence import Copy, Sequence, Status
from mlx_mtp.engine.stats import EngineStats
from mlx_mtp.engine.step import InFlightStep, PrefillChunk, StepPlan, StepRow
from mlx_mtp.prefix.policy import PrefixReuse
from mlx_mtp.prefix.radix_tree import PrefixTree
from mlx_mtp.speculative.costs import COPY, Shape
from mlx_mtp.speculative.draft_policy import DecodeStep, DraftPolicy, Outcome
from mlx_mtp.speculative.ngram import NgramPool

# Tokens of a chunk that shares a forward pass with the running rows, so that the weights are read
# once. A longer one gains nothing, and if it fails they go on.
MOST_TOGETHER = 256


class Scheduler:
    """Admits requests, plans steps, and updates requests from their results.

    A plan holds at most one chunk of a group of prompts (see `PrefillScheduler`), cut at multiples
    of `prefill_step_size`, and one decode step. `usage` returns the share of the memory that rows
    of these numbers of tokens take; without it they all fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        drafts: DraftPolicy,
        reuse: PrefixReuse | None = None,
        usage: Callable[[list[int]], float] | None = None,
        totals: EngineStats | None = None,
        copies: NgramPool | None = None,  # None: nothing is copied
        prefills: PrefillScheduler | None = None,
    ) -> None:
        self._config = config
        self._drafts, self._copies = drafts, copies
        self.reuse = reuse or PrefixReuse(PrefixTree(0), (), config.prefill_step_size)
        self._usage = usage or (lambda _: 0.0)
        self._totals = totals or EngineStats()
        self._waiting = FairQueue()
        self._held: list[Sequence] = []  # until another has computed their prefix, or it is read
        self._prefills = prefills or PrefillScheduler(config)
        self._running: list[Sequence] = []
        self._last_size = 0
        self._begun: list[RequestOutput] = []  # progress of the prompts that were just admitted

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._held)

    @property
    def idle(self) -> bool:
        return self.num_waiting == 0 and all(s.finished for s in self._admitted())

    def stats(self) -> EngineStats:
        depths = self._drafts.choices
        rows = [s for s in self._admitted() if not s.finished]
        return replace(
            self._totals,
            num_requests_running=len(rows),
            num_requests_waiting=self.num_waiting,
            kv_usage=self._usage([s.num_cached for s in rows]),
            prefills={s.request_id: s.progress for s in rows if s.status is Status.PREFILLING},
            depths=tuple(sorted(depths.items())),
            choice=self._drafts.reason,
            parked=depths.get(self._last_size) == 0,
            prefix_cache=self.reuse.stats(),
        )

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)

    def cancel(self, request_id: str | None = None) -> None:
        for sequence in (*self._waiting, *self._held, *self._admitted()):
            if request_id in (None, sequence.request_id):
                sequence.status = Status.FINISHED
                self.reuse.release(sequence)
        self._waiting.drop_finished()
        self._held = [s for s in self._held if not s.finished]

    def schedule(self) -> StepPlan:
        self._drop_finished()
        decode = tuple(self._running)
        if all(s.surely_finished for s in decode):
            decode = ()
        if self.num_waiting:
            self._admit(self._prefills.most_tokens(beside=bool(decode)))
        chunk = self._prefills.next_chunk(beside=bool(decode))
        live = frozenset(s for s in self._admitted() if not s.finished)
        tokens = sum(length for _, _, length in chunk)
        together = bool(chunk and decode) and tokens <= MOST_TOGETHER and not self._config.exact
        drafts = self._choose_drafts(chunk, decode)
        return StepPlan(chunk, decode, live, *drafts, together=together)

    def update(self, steps: Iterable[InFlightStep]) -> list[RequestOutput]:
        """Update the requests from steps that were read."""
        outputs, self._begun = self._begun, []
        for step in steps:
            self._observe(step)
            outputs += filter(None, map(self._update_row, step.rows))
        return outputs

    def _observe(self, step: InFlightStep) -> None:
        rows = [row for row in step.rows if row.error is None]
        if step.is_prefill:
            self._totals.prompt_tokens += sum(row.num_positions for row in rows)
            if rows:
                self._prefills.observe(step)
            return
        outcomes = []
        for row in rows:
            source, verified = self._source(row), row.num_positions - 1
            self._totals.count_window(source, row.num_drafts, row.num_accepted)
            self._totals.num_optimistic_tokens += len(row.optimistic)
            outcomes.append(Outcome(row.sequence.drafting, source, verified, row.num_cached))
        if rows:
            verified = sum(outcome.num_drafts for outcome in outcomes)
            proposed = max(row.num_proposed for row in step.rows)
            shape = Shape(len(rows), verified, proposed)
            self._drafts.observe(DecodeStep(shape, outcomes, step.cost))

    def _source(self, row: StepRow) -> str:
        return COPY if row.copy is not None else self._config.draft_source

    def _update_row(self, row: StepRow) -> RequestOutput | None:
        sequence, tokens, error = row.sequence, row.token_ids, row.error
        sequence.read(row.num_positions, row.num_cached)
        if sequence.finished:
            return None
        if error is not None:
            sequence.status = Status.FINISHED
            return RequestOutput(sequence.request_id, finish_reason="error", error=error)
        # The device has ended a row whose prompt isn't complete, too: it draws nothing.
        ended = row.finished and sequence.num_cached >= sequence.num_prompt
        sequence.prompt_logprobs += row.prompt_logprobs
        if not (tokens or ended):
            return None if sequence.output else _report(sequence)
        is_first = not sequence.output
        sequence.output += tokens
        self._look_for_copies(sequence, tokens)
        self._totals.generation_tokens += len(tokens)
        if sequence.status is Status.PREFILLING and tokens:
            self._prefills.drop(sequence)
            sequence.status = Status.DECODING
            self._running.append(sequence)
        reason: FinishReason | None = None
        if ended:
            sequence.status = Status.FINISHED
            sequence.ended = True
            if self._copies is not None and not sequence.request.sampling.optimistic:
                self._copies.keep(sequence.salt, sequence.output)
            reason = "stop" if tokens and tokens[-1] in sequence.stop_ids else "length"
        return RequestOutput(
            sequence.request_id,
            tokens,
            row.logprobs,
            reason,
            num_draft_tokens=row.num_drafts,
            num_accepted_tokens=row.num_accepted,
            optimistic=row.optimistic,
            draft_source=self._source(row),
            num_reused_tokens=sequence.num_reused if is_first else 0,
            admitted_at=sequence.admitted_at if is_first else 0.0,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
            drafts=row.drafts if sequence.request.options.trace else None,
            progress=sequence.progress if is_first and sequence.request.options.progress else None,
        )

    def _choose_drafts(
        self, chunk: PrefillChunk, decode: tuple[Sequence, ...]
    ) -> tuple[dict[Sequence, int], dict[Sequence, Copy]]:
        """Drafts of the head for the next window, and tokens to copy into this one.

        By row that decodes, or will when this step has run.
        """
        ending = (s for s, start, length in chunk if start + length == s.num_prompt)
        rows = [*decode, *ending]
        if not rows:
            return {}, {}
        self._last_size = len(rows)
        for sequence in decode:
            sequence.drafting.ahead = sequence.max_cached - sequence.num_cached
        choice = self._drafts.choose([s.drafting for s in rows], steady=not chunk)
        wanted = zip(decode, choice.copied)
        copies = {s: copy for s, count in wanted if count and (copy := s.to_copy(count))}
        return dict(zip(rows, choice.head)), copies

    def _look_for_copies(self, sequence: Sequence, tokens: Many[int]) -> None:
        row = sequence.drafting
        if self._copies is None or row.fixed is not None:
            return
        if row.copier is None:
            # A draft that is accepted in place of the token drawn would tell another's answer.
            alone = sequence.request.sampling.optimistic > 0
            row.copier = self._copies.of(sequence.prompt, sequence.salt, alone=alone)
        row.copier.extend(tokens)

    def _admitted(self) -> list[Sequence]:
        return [*self._prefills, *self._running]

    def _drop_finished(self) -> None:
        for sequence in self._admitted():
            # What was planned has been launched since, and so has copied its prefix.
            if sequence.finished or sequence.begun:
                self.reuse.release(sequence)
        self._running = [s for s in self._running if not s.finished]
        for sequence in [s for s in self._prefills if s.finished]:
            self._prefills.drop(sequence)

    def _admit(self, step: int) -> None:
        """Admit the first waiting prompts, a group whose padded chunk has at most `step` tokens."""
        room = self._config.max_num_seqs - len(self._admitted())
        if self._config.exact:
            room = min(room, 1)  # A prompt is computed alone.
        group: list[Sequence] = []
        longest = 0
        while len(group) < room and (sequence := self._next_waiting(group)) is not None:
            prefix = self.reuse.find(sequence)
            start = 0 if prefix is None else prefix.end
            longest = max(longest, min(sequence.num_prompt - start, step))
            alike = not group or (group[0].prefix is None) == (prefix is None)
            if group and (not alike or longest * (len(group) + 1) > step):
                break
            self._waiting.pop()
            self.reuse.begin(sequence, prefix)
            sequence.status = Status.PREFILLING
            sequence.admitted_at = perf_counter()
            self._begun += filter(None, [_report(sequence)])
            group.append(sequence)
        if group:
            self._prefills.add(group)

    def _next_waiting(self, group: list[Sequence]) -> Sequence | None:
        """The next request, if there is memory for it; those that wait for a prefix are set aside.

        None overtakes one that waits for memory: running rows end some time and none joins them
        meanwhile, so a stream of small requests can't hold a large one up.
        """
        reuse = self.reuse
        self._put_back()
        prefilling = [*self._prefills, *group]
        while len(self._waiting):
            sequence = self._waiting.peek()
            if not reuse.held_back(sequence, prefilling):
                rows = [*self._admitted(), *group, sequence]
                most = [row.num_prompt + row.max_new_tokens for row in rows]
                # One alone always fits: `Engine.submit` rejects what could never run.
                if len(rows) > 1 and self._usage(most) > 1:
                    return None
                # Another prompt may be computing what could not be read after all.
                if not (reuse.must_read(sequence) or reuse.held_back(sequence, prefilling)):
                    return sequence
            self._held.append(self._waiting.pop(free=True))
        return None

    def _put_back(self) -> None:
        """Queue the requests again, in their order, whose wait for a prefix is over."""
        held = sorted(self._held, key=lambda s: s.number or 0, reverse=True)
        self._held = [s for s in held if self.reuse.waits(s)]
        for sequence in held:
            if sequence not in self._held:
                self._waiting.add(sequence, first=True)


def _report(sequence: Sequence) -> RequestOutput | None:
    """How much of a prompt is computed, if that was asked for."""
    if not sequence.request.options.progress:
        return None
    return RequestOutput(sequence.request_id, progress=sequence.progress)
