"""One engine step, on one thread: schedule, run, update."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many

from mlx_mtp.engine.health import Heartbeat, StepKind
from mlx_mtp.engine.request import RequestOutput
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import InFlightStep, StepPlan

_WAITED = 0.02  # share of a step's time: if a read took less, the step had already ended
# A launch that takes more than this many times as long as the launch before it compiled kernels or
# was held up, so its duration is not used.
_FAR = 2.0


class EngineCore:
    """Scheduler and runner. With `overlap`, a step is read after the next one is launched."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        overlap: bool,
        clock: Callable[[], float] = time.perf_counter,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.scheduler, self.runner = scheduler, runner
        self._overlap = overlap
        self._in_flight: list[InFlightStep] = []
        self._clock = StepClock(clock)
        self._heartbeat = heartbeat or Heartbeat()
        self._last_plan: StepPlan | None = None

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._in_flight

    @property
    def seconds_to_wait(self) -> float | None:
        """Seconds to wait for a request before the next step; None: no limit."""
        if self.idle:
            return None
        if self._in_flight or self._last_plan is None or self._last_plan.live:
            return 0.0
        # All requests wait for prefixes from the disk.
        return self.scheduler.reuse.disk_seconds_left

    def step(self) -> list[RequestOutput]:
        """Plan and launch a step; returns the outputs of the steps that were read meanwhile."""
        if self.scheduler.num_waiting:
            self.runner.prefixes.insert_saved_answers()
        plan = self.scheduler.schedule()
        self._heartbeat.begin(*_name_and_kind(plan, self._last_plan or plan))
        self._last_plan = plan
        began = self._clock.now()
        launched = self.runner.run(plan)
        self._clock.note_launched(launched, began)
        ready, self._in_flight = self._in_flight, launched
        # No look-ahead if the host needs a token before the next step (for a grammar's mask, or to
        # copy more), or if a launch failed: the next plan must not include its rows.
        failed = any(step.error is not None for step in launched)
        if not self._overlap or plan.needs_host or failed:
            ready, self._in_flight = [*ready, *launched], []
        steps = []
        for step in ready:
            waits_from = self._clock.now()
            steps += self.runner.read(step)
            self._clock.note_read(step, waits_from)
        self._clock.end_round(ready, launched)
        outputs = self.scheduler.update(steps)
        self.runner.save_answers(steps)
        if not self._in_flight:
            self.runner.prefixes.insert_saved_answers()
        return outputs

    def release(self) -> None:
        """Free the batches of an idle core."""
        assert self.idle
        self._last_plan = None
        self._clock = StepClock(self._clock.now)
        self.runner.release()

    def close(self) -> None:
        """Drop all requests and cached prefixes: one of them may have killed the thread."""
        try:
            self.scheduler.cancel()
        finally:
            self.runner.give_up_caches()


class StepClock:
    """Measures `InFlightStep.seconds` from the times of the host's launches and reads.

    A round (one `EngineCore.step`) can have a chunk and a decode step, which are timed differently.
    The time of a chunk is the device's, without the decode step that is read after the chunk
    (`note_read`). The time of a decode step is that of a whole round, because the host's work is a
    part of the step's cost (`end_round`). (On a CPU, mlx's launch blocks until most of the step is
    computed.)
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._launching = 0.0  # seconds that the last launch took
        self._read_at = 0.0  # when the last read ended
        self._reading = 0.0  # seconds that the last read took
        self._round_at = 0.0  # when the last round ended
        self._last: tuple[Sequence, ...] = ()  # rows of the decode step that the last round read
        self._drained = False  # the last round left nothing in flight

    def note_launched(self, steps: Many[InFlightStep], began: float) -> None:
        """Call when the steps of a plan have been launched."""
        self._launching = self.now() - began
        for step in steps:
            step.launched_at, step.launch_seconds = began, self._launching

    def note_read(self, step: InFlightStep, waits_from: float) -> None:
        """Call after reading a step, whose wait began at `waits_from`; sets the time of a chunk.

        The device begins a step when it has been launched and the step before it has ended. If the
        step had ended before the host waited, its time is that of its own launch or of the next
        launch, whichever took longer; if the next launch took far longer, the step gets no time.
        """
        now, launching = self.now(), self._launching
        if step.is_prefill:
            seen = now - max(self._read_at, step.launched_at)
            if now - waits_from > _WAITED * seen:
                step.seconds = max(step.launch_seconds, seen)
            elif launching <= _FAR * step.launch_seconds:
                step.seconds = max(step.launch_seconds, launching)
        self._read_at, self._reading = now, now - waits_from

    def end_round(self, read: Many[InFlightStep], launched: Many[InFlightStep]) -> None:
        """Call when the steps of a round have been read; sets the time of a decode step.

        With look-ahead a round waits for one step on the device and launches the next one. Its time
        is that of the former if it waited, and else that of the latter. As the host can't see where
        one step ends and the next begins, it counts only if these two and the step before them are
        decode steps of the same rows.
        """
        now, rows = self.now(), _decoding_rows(read)
        seconds, alone = now - self._round_at, self._drained
        self._drained = not launched or any(step is launched[-1] for step in read)
        last, self._last, self._round_at = self._last, rows, now
        if rows and last and (alone if self._drained else rows == last == _decoding_rows(launched)):
            waited = self._drained or self._reading > _WAITED * seconds
            step = read[0] if waited else launched[0]
            step.seconds, step.sync = max(seconds, step.seconds or 0.0), self._drained


def _decoding_rows(steps: Many[InFlightStep]) -> tuple[Sequence, ...]:
    """The sequences of `steps` if that is one successful decode step, else ()."""
    if len(steps) != 1 or steps[0].is_prefill or steps[0].error is not None:
        return ()
    return steps[0].sequences


def _name_and_kind(plan: StepPlan, last: StepPlan) -> tuple[str, StepKind]:
    """Name and kind of one step's work: it launches `plan`, and may wait for `last`."""
    both = [row for each in (plan, last) for row in (*each.chunk, *each.decode)]
    drafts = max((row.num_host_drafts for row in both), default=0)
    drafts = drafts or max((row.num_proposed for row in both), default=0)
    chunks = [each.chunk for each in (plan, last) if each.chunk]
    tokens = max((len(rows) * max(row.length for row in rows) for rows in chunks), default=0)
    rows = max(len(plan.decode), len(last.decode))
    parts = [f"a prefill chunk of {tokens} tokens"] if tokens else []
    parts += [f"a decoding step of {rows} {'row' if rows == 1 else 'rows'}"] if rows else []
    of = "prefill" if tokens else "decode"
    if any(row.sequence.images for rows in chunks for row in rows):
        of = "prefill with images"
    kind = (of, tokens.bit_length(), rows.bit_length(), drafts)
    return " and ".join(parts) or "the end of a step", kind
