"""Which rows take part in the next step. No arrays, no model: policy alone."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import chain
from time import perf_counter

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.fair_queue import FairQueue
from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.engine.request import FinishReason, RequestOutput
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.stats import EngineStats
from mlx_mtp.engine.step import InFlightStep, StepPlan, StepRow
from mlx_mtp.prefix.policy import PrefixReuse
from mlx_mtp.prefix.radix_tree import PrefixTree
from mlx_mtp.speculative.costs import MTP, StepShape
from mlx_mtp.speculative.draft_policy import DraftPolicy
from mlx_mtp.speculative.host_sources import HostSources

# A chunk of at most this many tokens shares a forward pass with the running rows, so that the
# weights are read once. A longer chunk gains nothing from sharing, and if it fails in its own pass,
# the running rows don't fail with it.
MOST_TOGETHER = 256


class Scheduler:
    """Admits requests, plans steps, and updates requests from their results.

    A plan has at most one decode step, and one chunk of a group of prompts (see
    `PrefillScheduler`), which crosses no multiple of `prefill_step_size`. `usage` maps the rows'
    lengths in tokens to the share of the memory for rows that they take; without it all rows fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        drafts: DraftPolicy,
        reuse: PrefixReuse | None = None,
        usage: Callable[[list[int]], float] | None = None,
        totals: EngineStats | None = None,
        host_sources: HostSources | None = None,
        prefills: PrefillScheduler | None = None,
    ) -> None:
        self._config = config
        self._drafts, self._host_sources = drafts, host_sources or HostSources()
        self.reuse = reuse or PrefixReuse(PrefixTree(0), (), config.prefill_step_size)
        self._usage = usage or (lambda _: 0.0)
        self._totals = totals or EngineStats()
        self._waiting = FairQueue()
        # Requests set aside until their prefix is computed by another one, or read from disk.
        self._held: list[Sequence] = []
        self._prefills = prefills or PrefillScheduler(config)
        self._running: list[Sequence] = []
        self._last_num_rows = 0
        self._lacks_memory = False  # the next request waits for memory
        self._begun: list[RequestOutput] = []  # progress outputs of prompts that were just admitted

    @property
    def num_waiting(self) -> int:
        return self._waiting.size + len(self._held)

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
            prefills={s.request_id: s.progress for s in rows if not s.output},
            depths=tuple(sorted(depths.items())),
            choice=self._drafts.reason,
            parked=depths.get(self._last_num_rows) == 0,
            prefix_cache=self.reuse.stats(),
        )

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)

    def cancel(self, request_id: str | None = None) -> None:
        for sequence in (*self._waiting, *self._held, *self._admitted()):
            if request_id in (None, sequence.request_id):
                self._drop(sequence)
        self._waiting.drop_finished()
        self._held = [s for s in self._held if not s.finished]

    def schedule(self) -> StepPlan:
        """Admit requests, and plan the next step. The caller must launch it."""
        admitted = self._admitted()
        for sequence in admitted:
            # A prompt is `begun` once its first chunk is planned. By now that plan has been
            # launched, which copied the prefix into the prompt's batch.
            if sequence.finished or sequence.begun:
                self.reuse.release(sequence.prefix)
        if finished := {s for s in admitted if s.finished}:
            self._running = [s for s in self._running if not s.finished]
            self._prefills.drop(finished)
        decode = tuple(map(StepRow, self._running))
        # A row that is surely finished still runs while others need the step, and keeps nothing.
        if all(s.surely_finished for s in self._running):
            decode = ()
        self._lacks_memory = False
        if self.num_waiting:
            self._admit(self._prefills.most_tokens(beside=bool(decode)))
        chunk = self._prefills.next_chunk(beside=bool(decode))
        live = frozenset(s for s in self._admitted() if not s.finished)
        tokens = sum(row.length for row in chunk)
        together = bool(chunk and decode) and tokens <= MOST_TOGETHER and not self._config.exact
        together = together and not any(row.sequence.images for row in chunk)
        sync = self._choose_drafts(chunk, decode)
        return StepPlan(chunk, decode, live, together, sync)

    def update(self, steps: Iterable[InFlightStep]) -> list[RequestOutput]:
        """Update the requests from steps that have been read; returns their outputs."""
        outputs, self._begun = self._begun, []
        for step in steps:
            self._observe(step)
            outputs += filter(None, map(self._update_row, step.rows))
        return outputs

    def _observe(self, step: InFlightStep) -> None:
        rows = [row for row in step.rows if row.error is None]
        if step.is_prefill:
            self._totals.prompt_tokens += sum(row.length for row in rows)
            if rows:
                self._prefills.observe(step)
            return
        for row in rows:
            self._totals.count_window(row.source, row.num_drafts, row.num_accepted)
            self._totals.num_optimistic_tokens += len(row.optimistic)
        if rows:
            proposed = max(row.num_proposed for row in step.rows)
            verified = [row.num_verified for row in rows]
            shape = StepShape(len(rows), sum(verified), proposed, max(verified), step.sync)
            # A window of a row that had ended, or without drafts, says nothing of the head.
            head = [r for r in rows if r.source == MTP and r.num_cached and r.num_verified]
            windows = [(row.num_verified, row.num_cached - 1) for row in head]
            self._drafts.observe(windows, shape, step.seconds)

    def _update_row(self, row: StepRow) -> RequestOutput | None:
        sequence, tokens, error = row.sequence, row.token_ids, row.error
        sequence.note_read(row.length, row.num_cached)
        if sequence.finished:
            return None
        if error is not None:
            self._drop(sequence)
            return RequestOutput(sequence.request_id, finish_reason="error", error=error)
        # On the device a row with an incomplete prompt counts as ended, so that it emits nothing.
        ended = row.finished and sequence.num_cached >= sequence.num_prompt
        sequence.prompt_logprobs += row.prompt_logprobs
        is_first, options = not sequence.output, sequence.request.options
        if not (tokens or ended):
            if not (is_first and options.progress):
                return None
            return RequestOutput(sequence.request_id, progress=sequence.progress)
        sequence.output += tokens
        self._feed_host_drafters(sequence, tokens, is_first)
        self._totals.generation_tokens += len(tokens)
        if is_first and tokens:
            self._prefills.drop([sequence])
            self._running.append(sequence)
        reason: FinishReason | None = None
        if ended:
            sequence.finished = True
            sequence.drafting.read()  # Drafters learn from the last tokens, too.
            if not sequence.request.sampling.optimistic:
                self._host_sources.keep(sequence.prefix.salt, sequence.output)
            reason = "stop" if tokens and tokens[-1] in sequence.stop_ids else "length"
        return RequestOutput(
            sequence.request_id,
            tokens,
            row.logprobs,
            reason,
            num_draft_tokens=row.num_drafts,
            num_accepted_tokens=row.num_accepted,
            optimistic=row.optimistic,
            draft_source=row.source,
            num_reused_tokens=sequence.prefix.num_reused if is_first else 0,
            admitted_at=sequence.admitted_at if is_first else 0.0,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
            drafts=row.drafts if options.trace else None,
            progress=sequence.progress if is_first and options.progress else None,
        )

    def _choose_drafts(self, chunk: Many[StepRow], decode: Many[StepRow]) -> bool:
        """Plan the head's drafts for the next windows, and the host's for this step's windows.

        Returns `Choice.sync`.
        """
        rows = [*decode, *(row for row in chunk if row.is_last)]
        if not rows:
            return False
        self._last_num_rows = len(rows)
        for row in decode:
            row.sequence.drafting.ahead = row.sequence.max_cached - row.sequence.num_cached
        waiting = sum(map(len, self._prefills.groups)) - sum(row.is_last for row in chunk)
        waiting += 0 if self._lacks_memory else self.num_waiting
        waiting = min(waiting, self._config.max_num_seqs - len(rows))
        given = [row.sequence.drafting for row in rows]
        choice = self._drafts.choose(given, steady=not chunk, waiting=waiting)
        for row, count in zip(rows, choice.head):
            row.num_proposed = count
        for row, count in zip(decode, choice.host):
            if count:
                row.verify_host_run(count)
        return choice.sync

    def _feed_host_drafters(self, sequence: Sequence, tokens: Many[int], first: bool) -> None:
        row = sequence.drafting
        if first and not row.host and row.fixed is None:
            # An optimistic draft, which is not sampled, could reveal another client's answer.
            alone = sequence.request.sampling.optimistic > 0
            salt = sequence.prefix.salt
            row.host = self._host_sources.drafters(sequence.copied, salt, alone=alone)
        if row.host:
            row.unread += tokens

    def _drop(self, sequence: Sequence) -> None:
        """End a sequence that was cancelled or failed."""
        sequence.finished = sequence.prefix.dropped = True
        self.reuse.release(sequence.prefix)

    def _admitted(self) -> list[Sequence]:
        return [*chain.from_iterable(self._prefills.groups), *self._running]

    def _admit(self, step: int) -> None:
        """Admit the next group of prompts; its chunk has at most `step` tokens, with padding.

        A chunk is packed without padding, but the recurrence computes it as a padded rectangle.
        """
        room = self._config.max_num_seqs - len(self._admitted())
        if self._config.exact:
            room = min(room, 1)  # A prompt is computed alone.
        group: list[Sequence] = []
        longest = 0
        while len(group) < room and (sequence := self._next_waiting(group)) is not None:
            prefix = self.reuse.find(sequence.prefix)
            start = 0 if prefix is None else prefix.end
            longest = max(longest, min(sequence.num_prompt - start, step))
            alike = not group or (group[0].prefix.node is None) == (prefix is None)
            # A prompt with images is computed alone.
            alike = alike and not (group and (group[0].images or sequence.images))
            if group and (not alike or longest * (len(group) + 1) > step):
                break
            self._waiting.pop()
            self.reuse.acquire(sequence.prefix, prefix)
            sequence.begin_prompt(start)
            sequence.admitted_at = perf_counter()
            if sequence.request.options.progress:
                self._begun.append(RequestOutput(sequence.request_id, progress=sequence.progress))
            group.append(sequence)
        if group:
            self._prefills.groups.append(group)

    def _next_waiting(self, group: list[Sequence]) -> Sequence | None:
        """Returns the next request to admit, or None; holds requests that wait for a prefix.

        No request overtakes one that waits for memory: no row joins until enough running rows have
        ended, so a stream of small requests can't hold up a large one.
        """
        reuse = self.reuse
        if self._held:
            self._put_back()
        prefilling = [s.prefix for s in chain(*self._prefills.groups, group)]
        while self._waiting.size:
            sequence = self._waiting.peek()
            if not reuse.must_wait(sequence.prefix, prefilling):
                rows = [*self._admitted(), *group, sequence]
                most = [row.num_prompt + row.max_new_tokens for row in rows]
                # One row alone always fits: `Engine.submit` rejects longer requests.
                self._lacks_memory = len(rows) > 1 and self._usage(most) > 1
                if self._lacks_memory:
                    return None
                # If the disk read failed, another prompt may be computing the prefix: check again.
                if not (
                    reuse.must_wait_for_disk(sequence.prefix)
                    or reuse.must_wait(sequence.prefix, prefilling)
                ):
                    return sequence
            self._held.append(self._waiting.pop(free=True))
        return None

    def _put_back(self) -> None:
        """Queue again, in order of arrival, the held requests whose wait for a prefix is over."""
        held = sorted(self._held, key=lambda s: s.prefix.arrival or 0, reverse=True)
        self._held = [s for s in held if self.reuse.is_waiting(s.prefix)]
        for sequence in held:
            if sequence not in self._held:
                self._waiting.add(sequence, first=True)
