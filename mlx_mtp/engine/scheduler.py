"""Which rows take part in the next step. No arrays, no model: policy alone."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import perf_counter

from mlx_mtp.cache.prefix_tree import PrefixTree
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.fair_queue import FairQueue
from mlx_mtp.engine.request import Draft, FinishReason, RequestOutput
from mlx_mtp.engine.reuse import PrefixReuse
from mlx_mtp.engine.sequence import Sequence, Status
from mlx_mtp.engine.stats import EngineStats, Prefill
from mlx_mtp.engine.step import InFlightStep, PrefillChunk, StepPlan
from mlx_mtp.speculative.depth import DecodeStep, DepthPolicy, Outcome


class Scheduler:
    """Admits requests, plans steps, and updates requests from their results.

    A plan holds at most one chunk of a group of prompts, cut at multiples of `prefill_step_size`,
    and one decode step. `usage` says which share of the memory rows of so many tokens each take;
    without it they all fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        depth: DepthPolicy,
        reuse: PrefixReuse | None = None,
        usage: Callable[[list[int]], float] | None = None,
        totals: EngineStats | None = None,
    ) -> None:
        self._config = config
        self._depth = depth
        self._reuse = reuse or PrefixReuse(PrefixTree(0), (), config.prefill_step_size)
        self._usage = usage or (lambda _: 0.0)
        self._totals = totals or EngineStats()
        self._waiting = FairQueue()
        self._held: list[Sequence] = []  # another request computes their prefix, or it is read
        self._groups: deque[list[Sequence]] = deque()  # prompts that are computed together
        self._running: list[Sequence] = []
        self._last_size = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._held)

    @property
    def idle(self) -> bool:
        return self.num_waiting == 0 and all(s.finished for s in self._admitted())

    @property
    def seconds_left(self) -> float:
        return self._reuse.seconds_left

    def stats(self) -> EngineStats:
        depths = self._depth.choices
        rows = [s for s in self._admitted() if not s.finished]
        return replace(
            self._totals,
            num_requests_running=len(rows),
            num_requests_waiting=self.num_waiting,
            kv_usage=self._usage([s.num_cached for s in rows]),
            prefills=tuple(
                Prefill(s.request_id, s.admitted_at, s.num_computed, s.num_prompt)
                for s in rows
                if s.status is Status.PREFILLING
            ),
            depths=tuple(sorted(depths.items())),
            choice=self._depth.reason,
            parked=depths.get(self._last_size) == 0,
            prefix_cache=self._reuse.stats(),
        )

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)

    def cancel(self, request_id: str | None = None) -> None:
        for sequence in (*self._waiting, *self._held, *self._admitted()):
            if request_id in (None, sequence.request_id):
                sequence.status = Status.FINISHED
                self._reuse.release(sequence)
        self._waiting.keep(frozenset(s for s in self._waiting if not s.finished))
        self._held = [s for s in self._held if not s.finished]

    def schedule(self) -> StepPlan:
        self._drop_finished()
        self._admit()
        chunk = self._next_chunk()
        decode = tuple(self._running)
        if all(s.surely_finished for s in decode):
            decode = ()
        live = frozenset(s for s in self._admitted() if not s.finished)
        return StepPlan(chunk, decode, self._num_draft_tokens(chunk, decode), live)

    def update(
        self, steps: Iterable[InFlightStep], seconds: float | None = None
    ) -> list[RequestOutput]:
        """Update the requests from steps that were read; `seconds` is the cost of the one step."""
        outputs = []
        for step in steps:
            self._observe(step, seconds)
            rows = (self._update_row(step, row) for row in range(len(step.sequences)))
            outputs += [output for output in rows if output is not None]
        return outputs

    def _observe(self, step: InFlightStep, seconds: float | None) -> None:
        rows = [row for row in range(len(step.sequences)) if step.error_of(row) is None]
        if step.is_prefill:
            self._totals.prompt_tokens += sum(step.num_positions[row] for row in rows)
            return
        outcomes = []
        for row in rows:
            num_drafts, num_accepted = step.num_drafts[row], step.num_accepted[row]
            self._totals.count_window(num_drafts, num_accepted)
            if step.num_cached[row]:
                # A row that ends with a recovered token has tried the draft in its place.
                cut = step.finished[row] and step.num_cached[row] == num_accepted
                drafting = step.sequences[row].drafting
                outcomes.append(Outcome(drafting, num_drafts, num_accepted, cut=cut))
        if rows:
            lengths = {step.sequences[r].drafting.fixed: step.num_positions[r] for r in rows}
            depth = lengths.get(None, max(lengths.values())) - 1
            alike = len({*lengths.values()}) == 1  # else the cost is not that of this depth
            self._depth.observe(DecodeStep(len(rows), depth, outcomes, seconds if alike else None))

    def _update_row(self, step: InFlightStep, row: int) -> RequestOutput | None:
        sequence, tokens = step.sequences[row], step.token_ids[row]
        sequence.read(step.num_positions[row], step.num_cached[row])
        if sequence.finished:
            return None
        if (error := step.error_of(row)) is not None:
            sequence.status = Status.FINISHED
            return RequestOutput(sequence.request_id, finish_reason="error", error=error)
        # The device has ended a row whose prompt isn't complete, too: it draws nothing.
        ended = step.finished[row] and sequence.num_cached >= sequence.num_prompt
        sequence.prompt_logprobs += step.prompt_logprobs[row]
        if not (tokens or ended):
            return None
        is_first = not sequence.output
        sequence.output += tokens
        self._totals.generation_tokens += len(tokens)
        if sequence.status is Status.PREFILLING and tokens:
            for group in self._groups:
                if sequence in group:
                    group.remove(sequence)
            sequence.status = Status.DECODING
            self._running.append(sequence)
        reason: FinishReason | None = None
        if ended:
            sequence.status = Status.FINISHED
            sequence.ended = True
            reason = "stop" if tokens and tokens[-1] in sequence.stop_ids else "length"
        return RequestOutput(
            sequence.request_id,
            tokens,
            step.logprobs[row],
            reason,
            num_draft_tokens=step.num_drafts[row],
            num_accepted_tokens=step.num_accepted[row],
            num_reused_tokens=sequence.num_reused if is_first else 0,
            admitted_at=sequence.admitted_at if is_first else 0.0,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
            drafts=tuple(Draft(token, self._config.draft_source) for token in step.drafts[row])
            if sequence.request.trace
            else None,
        )

    def _num_draft_tokens(self, chunk: PrefillChunk, decode: tuple[Sequence, ...]) -> int:
        """Drafts for the next window of the rows that decode, or will when this step has run."""
        ending = (s for s, start, length in chunk if start + length == s.num_prompt)
        rows = [s.drafting for s in (*decode, *ending)]
        if not rows:
            return 0
        self._last_size = len(rows)
        return self._depth.depth(rows, steady=not chunk)

    def _admitted(self) -> list[Sequence]:
        return [*self._prefilling(), *self._running]

    def _prefilling(self) -> list[Sequence]:
        return [s for group in self._groups for s in group]

    def _drop_finished(self) -> None:
        for sequence in self._admitted():
            # What was planned has been launched since, and so has copied its prefix.
            if sequence.finished or sequence.begun:
                self._reuse.release(sequence)
        self._running = [s for s in self._running if not s.finished]
        groups = ([s for s in group if not s.finished] for group in self._groups)
        self._groups = deque(filter(None, groups))

    def _admit(self) -> None:
        """Form a group of the first waiting prompts whose padded chunk fits the step."""
        room = self._config.max_num_seqs - len(self._admitted())
        group: list[Sequence] = []
        step, longest = self._config.prefill_step_size, 0
        while len(group) < room and (sequence := self._next_waiting(group)) is not None:
            prefix = self._reuse.find(sequence)
            start = 0 if prefix is None else prefix.end
            longest = max(longest, min(sequence.num_prompt - start, step))
            alike = not group or (group[0].prefix is None) == (prefix is None)
            if group and (not alike or longest * (len(group) + 1) > step):
                break
            self._waiting.pop()
            self._reuse.begin(sequence, prefix)
            sequence.status = Status.PREFILLING
            sequence.admitted_at = perf_counter()
            group.append(sequence)
        if group:
            self._groups.append(group)

    def _next_waiting(self, group: list[Sequence]) -> Sequence | None:
        """The first that there is memory for; those that wait for their prefix are set aside.

        None overtakes a request that waits for memory: running rows end some time and none joins
        them meanwhile, so a stream of small requests can't hold a large one up.
        """
        reuse = self._reuse
        self._put_back()
        prefilling = self._prefilling() + group
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
        held = sorted(self._held, key=lambda s: s.number or 0, reverse=True)
        self._held = [s for s in held if self._reuse.waits(s)]
        for sequence in held:
            if sequence not in self._held:
                self._waiting.add(sequence, first=True)

    def _next_chunk(self) -> PrefillChunk:
        step = self._config.prefill_step_size
        for _ in range(len(self._groups)):
            group = self._groups[0]
            self._groups.rotate(-1)
            rows = tuple(
                (s, s.num_computed, s.next_cut(step) - s.num_computed)
                for s in group
                if s.num_computed < s.num_prompt or not s.begun
            )
            if rows:
                for sequence, start, length in rows:
                    sequence.num_computed = start + length
                    sequence.begun = True
                return rows
        return ()
