"""One engine step, on one thread: schedule, run, update."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlx_mtp.engine.heartbeat import Heartbeat, Kind
from mlx_mtp.engine.plan import Plan
from mlx_mtp.engine.request import RequestOutput
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.stats import EngineStats
from mlx_mtp.engine.timing import StepTimer
from mlx_mtp.engine.window import Launched
from mlx_mtp.speculative.counters import SpeculationCounters


class EngineCore:
    """Scheduler and runner, advanced step by step.

    Args:
        scheduler: says what the next step is.
        runner: does it.
        overlap: read a step's tokens only after the next step is launched, so that the host's work
            hides behind the device's. Without it the loop is plain, and the reference.
        clock: seconds; steps are timed by it.
        heartbeat: is told what each step is; None: nobody wants to know.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        overlap: bool,
        clock: Callable[[], float] = time.perf_counter,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._overlap = overlap
        self._in_flight: list[Launched] = []
        self._clock = clock
        self._timer = StepTimer(clock)
        self._heartbeat = heartbeat or Heartbeat()
        self._last_plan: Plan | None = None
        self._counters = SpeculationCounters()
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @property
    def idle(self) -> bool:
        """No request is here and nothing is in flight."""
        return self._scheduler.idle and not self._in_flight

    @property
    def seconds_to_wait(self) -> float | None:
        """For how long there is nothing to do unless something new comes; None: until then.

        While requests are here and none is admitted, all of them wait for the disk.
        """
        if self.idle:
            return None
        if self._in_flight or self._last_plan is None or self._last_plan.live:
            return 0.0
        return self._scheduler.seconds_left

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self._scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        """Drop a request; unknown ids are ignored."""
        self._scheduler.cancel(request_id)

    def step(self) -> list[RequestOutput]:
        """Launch the next step, and read the one before it.

        Without overlap, or while a row's next token depends on its last one by way of the host
        (a grammar), or when a launch failed, the step itself is read too.
        """
        if self._scheduler.num_waiting:
            self._runner.settle()
        plan = self._scheduler.schedule()
        last, self._last_plan = self._last_plan, plan
        self._heartbeat.begin(*_description(plan, last or plan))
        launched = self._runner.run(plan)
        # The rows of a launch that failed are gone: the next plan must not count on them.
        failed = any(window.error is not None for window in launched)
        look_ahead = self._overlap and not plan.needs_host and not failed
        return self._update(launched, look_ahead=look_ahead)

    def rest(self) -> None:
        """There is nothing to do: let go of what the last rows left on the device."""
        assert self.idle
        self._last_plan = None
        self._timer = StepTimer(self._clock)
        self._runner.release()

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        spec = self._counters
        return EngineStats(
            num_requests_running=self._scheduler.num_running,
            num_requests_waiting=self._scheduler.num_waiting,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_drafts=spec.num_drafts,
            num_draft_tokens=spec.num_draft_tokens,
            num_accepted_tokens=spec.num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(spec.num_accepted_tokens_per_pos),
            depths=tuple(sorted(self._scheduler.depths.items())),
            parked=self._scheduler.parked,
            prefix_cache=self._scheduler.prefix_stats(),
        )

    def _update(self, launched: list[Launched], *, look_ahead: bool) -> list[RequestOutput]:
        ready, self._in_flight = self._in_flight, launched
        if not look_ahead:
            ready, self._in_flight = [*ready, *launched], []
        results = self._runner.read(ready)
        outputs = self._scheduler.update(results, self._timer.lap(ready, launched))
        self._runner.save_ends(self._scheduler.ends(results))
        if not self._in_flight:
            self._runner.settle()
        for result in results:
            self._counters.observe(result.num_draft_tokens, result.num_accepted_tokens)
            self._prompt_tokens += result.num_prompt_tokens
        self._generation_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs


def _description(plan: Plan, last: Plan) -> tuple[Kind, str]:
    """What a turn works on, by rough sizes, and in words.

    With look-ahead it launches a plan and waits for the one before it.
    """
    chunks = [p.chunk.rows for p in (plan, last) if p.chunk is not None]
    tokens = max((len(rows) * max(n for _, _, n in rows) for rows in chunks), default=0)
    rows = max(len(plan.decode), len(last.decode))
    drafts = max(plan.num_draft_tokens, last.num_draft_tokens)
    parts = [f"a prefill chunk of {tokens} tokens"] if tokens else []
    parts += [f"a decoding step of {rows} {'row' if rows == 1 else 'rows'}"] if rows else []
    kind = ("prefill" if tokens else "decode", tokens.bit_length(), rows.bit_length(), drafts)
    return kind, " and ".join(parts) or "the end of a step"
