"""Which rows take part in the next step. No arrays, no model: policy alone.

A prompt is cut into chunks at multiples of `prefill_step_size`. Every plan holds at most one chunk
and one decode step, so a long prompt never stops the running streams for more than one chunk.
Groups of prompts take turns, so a short prompt need not wait for the end of a long one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.admission import Admission
from mlx_mtp.engine.request import FinishReason, RequestOutput, TokenLogprobs
from mlx_mtp.engine.sequence import Sequence, Status
from mlx_mtp.errors import MlxMtpError
from mlx_mtp.speculative.depth import DecodeStep, DepthPolicy, Outcome


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A piece of the prompts of one group.

    Args:
        group: which group of prompts, unique.
        rows: (sequence, first position, number of tokens) each.
    """

    group: int
    rows: tuple[tuple[Sequence, int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: what to launch, and which rows are still wanted.

    Args:
        chunk: a prefill chunk, or None.
        decode: the rows to decode, or empty.
        num_draft_tokens: drafts to propose for the next window.
        live: every unfinished sequence; state of any other row may be dropped.
    """

    chunk: PrefillChunk | None
    decode: tuple[Sequence, ...]
    num_draft_tokens: int
    live: frozenset[Sequence]

    @property
    def empty(self) -> bool:
        """There is nothing to launch."""
        return self.chunk is None and not self.decode

    @property
    def needs_host(self) -> bool:
        """Its tokens must be read before the next step is launched."""
        return any(s.needs_host for s in self.decode)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row's window brought, read from the device.

    Args:
        sequence: the row.
        num_positions: length of the window.
        num_kept: how much of it stays in the caches.
        token_ids: tokens emitted.
        logprobs: one per token if asked for.
        finished: the device ended the row.
        num_prompt_tokens: prompt tokens this window computed.
        num_draft_tokens, num_accepted_tokens: of this window, as far as the row wanted drafts.
        error: the step failed; nothing else is valid.
    """

    sequence: Sequence
    num_positions: int
    num_kept: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: bool = False
    num_prompt_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: MlxMtpError | None = None


class Scheduler:
    """Admits requests, forms prefill groups, and says what the next step is.

    Args:
        config: limits of rows and of a chunk.
        depth: how many drafts a step proposes.
        memory: which rows there is memory for; None: for any.
    """

    def __init__(
        self, config: EngineConfig, depth: DepthPolicy, memory: Admission | None = None
    ) -> None:
        self._config = config
        self._depth = depth
        self._memory = memory
        self._waiting: deque[Sequence] = deque()
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
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Rows admitted and not finished."""
        return sum(1 for s in self._admitted() if not s.finished)

    @property
    def idle(self) -> bool:
        """No request is here."""
        return not self._waiting and self.num_running == 0

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Drop a request wherever it stands; unknown ids are ignored."""
        for sequence in (*self._waiting, *self._admitted()):
            if sequence.request_id == request_id:
                sequence.status = Status.FINISHED
        self._waiting = deque(s for s in self._waiting if not s.finished)

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

    def fail_all(self, error: MlxMtpError) -> list[RequestOutput]:
        """End every request with an error."""
        unfinished = [s for s in (*self._waiting, *self._admitted()) if not s.finished]
        self._waiting.clear()
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
        rows = [r for r in results if not r.num_prompt_tokens and r.error is None]
        if not rows:
            return
        outcomes = [
            Outcome(r.sequence.drafting, r.num_draft_tokens, r.num_accepted_tokens, r.finished)
            for r in rows
            if r.num_kept
        ]
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
        sequence.num_output += len(result.token_ids)
        if sequence.status is Status.PREFILLING:
            self._promote(sequence)
        reason: FinishReason | None = None
        if result.finished:
            sequence.status = Status.FINISHED
            reason = "stop" if result.token_ids[-1] in sequence.stop_ids else "length"
        return RequestOutput(
            sequence.request_id,
            result.token_ids,
            result.logprobs,
            reason,
            num_draft_tokens=result.num_draft_tokens,
            num_accepted_tokens=result.num_accepted_tokens,
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
        self._running = [s for s in self._running if not s.finished]
        groups = ((n, [s for s in g if not s.finished]) for n, g in self._groups)
        self._groups = deque((number, group) for number, group in groups if group)

    def _admit(self) -> None:
        """Form a group of the first waiting prompts whose padded chunk fits the step size.

        Only one group forms per step, and short prompts of about one length share a chunk, so that
        little of it is padding.
        """
        room = self._config.max_num_seqs - sum(1 for _ in self._admitted())
        group: list[Sequence] = []
        step = self._config.prefill_step_size
        longest = 0
        while self._waiting and len(group) < room:
            longest = max(longest, min(self._waiting[0].num_prompt, step))
            if group and longest * (len(group) + 1) > step:
                break
            if not self._has_memory((*self._admitted(), *group, self._waiting[0])):
                # None overtakes it (engine/admission.py).
                break
            group.append(self._waiting.popleft())
        if group:
            for sequence in group:
                sequence.status = Status.PREFILLING
            self._groups.append((self._next_group, group))
            self._next_group += 1

    def _has_memory(self, rows: Iterable[Sequence]) -> bool:
        return self._memory is None or self._memory.fits(rows)

    def _next_chunk(self) -> PrefillChunk | None:
        step = self._config.prefill_step_size
        for _ in range(len(self._groups)):
            number, group = self._groups[0]
            self._groups.rotate(-1)
            rows = tuple(
                (s, s.num_computed, min(s.num_uncomputed, step - s.num_computed % step))
                for s in group
                if s.num_uncomputed
            )
            if rows:
                return PrefillChunk(number, rows)
        return None


def _failed(sequence: Sequence, error: MlxMtpError) -> RequestOutput:
    sequence.status = Status.FINISHED
    return RequestOutput(sequence.request_id, finish_reason="error", error=error)
