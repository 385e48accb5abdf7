"""Which rows take part in the next step. No arrays, no model: policy alone.

A prompt is cut into chunks at multiples of `prefill_step_size`. Every plan holds at most one chunk
and one decode step, so a long prompt never stops the running streams for more than one chunk.
Groups of prompts take turns, so a short prompt need not wait for the end of a long one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.fair_queue import FairQueue
from mlx_mtp.engine.memory import Admission
from mlx_mtp.engine.plan import Plan, PrefillChunk, RowResult
from mlx_mtp.engine.request import FinishReason, RequestOutput
from mlx_mtp.engine.reuse import PrefixReuse
from mlx_mtp.engine.sequence import Sequence, Status
from mlx_mtp.engine.stats import PrefixCacheStats
from mlx_mtp.errors import MlxMtpError
from mlx_mtp.speculative.depth import DecodeStep, DepthPolicy, Outcome


class Scheduler:
    """Admits requests, forms prefill groups, and says what the next step is.

    Args:
        config: limits of rows and of a chunk.
        depth: how many drafts a step proposes.
        reuse: of prefixes; None: every prompt is computed.
        memory: which rows there is memory for; None: for any.
    """

    def __init__(
        self,
        config: EngineConfig,
        depth: DepthPolicy,
        reuse: PrefixReuse | None = None,
        memory: Admission | None = None,
    ) -> None:
        self._config = config
        self._depth = depth
        self._reuse = reuse
        self._memory = memory
        self._waiting = FairQueue[Sequence]()
        # Set aside when their turn came: their prefix is being computed with another's, or read.
        self._held: list[Sequence] = []
        self._groups: deque[tuple[int, list[Sequence]]] = deque()
        self._running: list[Sequence] = []
        self._next_group = 0
        self._last_size = 0

    @property
    def depths(self) -> dict[int, int]:
        """The depth chosen last for each batch size that has run."""
        return self._depth.choices()

    @property
    def parked(self) -> bool:
        """The last step was planned without drafts."""
        return self._depth.choices().get(self._last_size) == 0

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting) + len(self._held)

    @property
    def num_running(self) -> int:
        """Rows admitted and not finished."""
        return sum(1 for s in self._admitted() if not s.finished)

    @property
    def idle(self) -> bool:
        """No request is here."""
        return self.num_waiting == 0 and self.num_running == 0

    @property
    def seconds_left(self) -> float:
        """For how long a read from the disk is waited for at most, from now on."""
        return 0.0 if self._reuse is None else self._reuse.seconds_left

    def add(self, sequence: Sequence) -> None:
        """Queue a request; clients take turns (see `FairQueue`)."""
        self._waiting.add(sequence)

    def cancel(self, request_id: str) -> None:
        """Drop a request wherever it stands; unknown ids are ignored."""
        for sequence in (*self._waiting, *self._held, *self._admitted()):
            if sequence.request_id == request_id:
                sequence.status = Status.FINISHED
        for sequence in (*self._waiting, *self._held):
            if sequence.finished and self._reuse is not None:
                self._reuse.release(sequence)
        self._waiting.keep(frozenset(s for s in self._waiting if not s.finished))
        self._held = [s for s in self._held if not s.finished]

    def schedule(self) -> Plan:
        """The next step."""
        self._forget_finished()
        self._admit()
        chunk = self._next_chunk()
        decode = tuple(s for s in self._running if s.status is Status.DECODING)
        if all(s.surely_finished for s in decode):
            decode = ()
        if chunk:
            for sequence, start, length in chunk.rows:
                sequence.num_computed = start + length
                sequence.begun = True
        live = frozenset(s for s in self._admitted() if not s.finished)
        return Plan(chunk, decode, self._num_draft_tokens(chunk, decode), live)

    def update(
        self, results: Iterable[RowResult], seconds: float | None = None
    ) -> list[RequestOutput]:
        """Take in what a step brought, and say what each request gets of it.

        Args:
            results: of the step's rows.
            seconds: what the step cost; None where that can't be told.
        """
        results = list(results)
        self._learn(results, seconds)
        return [output for result in results if (output := self._take(result)) is not None]

    def ends(self, results: Iterable[RowResult]) -> list[Sequence]:
        """The rows that ended by themselves in a step that `update` took in, to be saved."""
        if self._reuse is None:
            return []
        return [r.sequence for r in results if r.finished and r.token_ids and r.sequence.ended]

    def prefix_stats(self) -> PrefixCacheStats:
        """Of the prefix cache."""
        return PrefixCacheStats() if self._reuse is None else self._reuse.stats()

    def fail_all(self, error: MlxMtpError) -> list[RequestOutput]:
        """End every request with an error."""
        everyone = (*self._waiting, *self._held, *self._admitted())
        unfinished = [s for s in everyone if not s.finished]
        self._waiting.clear()
        self._held.clear()
        if self._reuse is not None:
            for sequence in everyone:
                self._reuse.release(sequence)
        return [_failed(s, error) for s in unfinished]

    def _num_draft_tokens(self, chunk: PrefillChunk | None, decode: tuple[Sequence, ...]) -> int:
        """Drafts for the next window of the rows that decode, or will when this step has run."""
        spans = chunk.rows if chunk is not None else ()
        ending = (s for s, start, length in spans if start + length == s.num_prompt)
        rows = [s.drafting for s in (*decode, *ending)]
        if not rows:
            return 0
        self._last_size = len(rows)
        return self._depth.depth(rows, steady=chunk is None)

    def _learn(self, results: list[RowResult], seconds: float | None) -> None:
        """Tell the policy of the depth what a decoding step brought."""
        rows = [r for r in results if not r.is_prefill and r.error is None]
        if not rows:
            return
        outcomes = [_outcome(r) for r in rows if r.num_kept]
        depth = rows[0].num_positions - 1
        self._depth.observe(DecodeStep(len(rows), depth, outcomes, seconds))

    def _take(self, result: RowResult) -> RequestOutput | None:
        sequence = result.sequence
        sequence.read(result.num_positions, result.num_kept)
        if sequence.finished:
            return None
        if result.error is not None:
            return _failed(sequence, result.error)
        if not result.token_ids:
            return None
        is_first = not sequence.output
        sequence.output += result.token_ids
        if sequence.status is Status.PREFILLING:
            self._promote(sequence)
        reason: FinishReason | None = None
        if result.finished:
            sequence.status = Status.FINISHED
            sequence.ended = True
            reason = "stop" if result.token_ids[-1] in sequence.stop_ids else "length"
        return RequestOutput(
            sequence.request_id,
            result.token_ids,
            result.logprobs,
            reason,
            num_draft_tokens=result.num_draft_tokens,
            num_accepted_tokens=result.num_accepted_tokens,
            num_reused_tokens=sequence.num_reused if is_first else 0,
        )

    def _promote(self, sequence: Sequence) -> None:
        for _, group in self._groups:
            if sequence in group:
                group.remove(sequence)
        sequence.status = Status.DECODING
        self._running.append(sequence)

    def _admitted(self) -> Iterable[Sequence]:
        prefilling = (s for _, group in self._groups for s in group)
        return (*prefilling, *self._running)

    def _forget_finished(self) -> None:
        if self._reuse is not None:
            for sequence in self._admitted():
                # What was planned has been launched since, so its prefix has been used.
                if sequence.finished or sequence.begun:
                    self._reuse.release(sequence)
        self._running = [s for s in self._running if not s.finished]
        groups = ((n, [s for s in g if not s.finished]) for n, g in self._groups)
        self._groups = deque((number, group) for number, group in groups if group)

    def _admit(self) -> None:
        """Form a group of the first waiting prompts whose padded chunk fits the step size.

        Only one group forms per step, and short prompts of about one length share a chunk, so that
        little of it is padding. Those that start after a cached prefix have groups of their own.
        """
        room = self._config.max_num_seqs - sum(1 for _ in self._admitted())
        group: list[Sequence] = []
        step = self._config.prefill_step_size
        longest = 0
        while len(group) < room and (sequence := self._next_waiting(group)) is not None:
            prefix = None if self._reuse is None else self._reuse.find(sequence)
            start = 0 if prefix is None else prefix.end
            longest = max(longest, min(sequence.num_prompt - start, step))
            alike = not group or (group[0].prefix is None) == (prefix is None)
            if group and (not alike or longest * (len(group) + 1) > step):
                break
            self._waiting.pop()
            if self._reuse is not None:
                self._reuse.begin(sequence, prefix)
            group.append(sequence)
        if group:
            for sequence in group:
                sequence.status = Status.PREFILLING
            self._groups.append((self._next_group, group))
            self._next_group += 1

    def _next_waiting(self, group: list[Sequence]) -> Sequence | None:
        """The first that there is memory for; those that wait for their prefix are set aside.

        None overtakes one that waits for memory alone (engine/memory.py).
        """
        reuse = self._reuse
        self._put_back()
        prefilling = [s for _, members in self._groups for s in members] + group
        while len(self._waiting):
            sequence = self._waiting.peek()
            if reuse is None or not reuse.held_back(sequence, prefilling):
                if not self._has_memory((*self._admitted(), *group, sequence)):
                    return None
                # What could not be read after all, another may be computing.
                if reuse is None or not (
                    reuse.must_read(sequence) or reuse.held_back(sequence, prefilling)
                ):
                    return sequence
            self._held.append(self._waiting.set_aside())
        return None

    def _put_back(self) -> None:
        """Let those that need not wait any more take their client's turns again.

        Not all at once when their wait is over: a burst that shares a prefix would then go before
        every other client.
        """
        held, self._held = self._held, []
        free: list[Sequence] = []
        for sequence in held:
            waits = self._reuse is not None and self._reuse.waits(sequence)
            (self._held if waits else free).append(sequence)
        for sequence in sorted(free, key=lambda s: s.number or 0, reverse=True):
            self._waiting.put_back(sequence)

    def _has_memory(self, rows: Iterable[Sequence]) -> bool:
        return self._memory is None or self._memory.fits(rows)

    def _next_chunk(self) -> PrefillChunk | None:
        step = self._config.prefill_step_size
        for _ in range(len(self._groups)):
            number, group = self._groups[0]
            self._groups.rotate(-1)
            rows = tuple(
                (s, s.num_computed, s.next_cut(step) - s.num_computed)
                for s in group
                if s.num_uncomputed or not s.begun
            )
            if rows:
                return PrefillChunk(number, rows)
        return None


def _outcome(result: RowResult) -> Outcome:
    # A row that ends with a recovered token has tried the draft in its place.
    cut = result.finished and result.num_kept == result.num_accepted_tokens
    drafts = result.num_draft_tokens, result.num_accepted_tokens
    return Outcome(result.sequence.drafting, *drafts, cut=cut)


def _failed(sequence: Sequence, error: MlxMtpError) -> RequestOutput:
    sequence.status = Status.FINISHED
    return RequestOutput(sequence.request_id, finish_reason="error", error=error)
