"""The engine: one thread that schedules, runs and updates. Token ids in, token ids out."""

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Protocol

import mlx.core as mx

from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.health import START_SECONDS, Heartbeat, acquire_restart
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.stats import EngineInfo, EngineStats
from mlx_mtp.errors import EngineStoppedError, InvalidRequestError, ModelError

logger = logging.getLogger(__name__)

NOTICE_SECONDS = 30.0  # between warnings that the start is still in progress
QUIET_SECONDS = 1.0  # time without requests before step costs are measured

Deliver = Callable[[Many[RequestOutput]], None]


class IdleWork(Protocol):
    """Work for the engine's thread while there are no requests (see `calibration.calibrator`)."""

    @property
    def busy(self) -> bool: ...
    def reset(self) -> None: ...
    def step(self, runner: ModelRunner) -> None: ...
    def pause(self) -> None: ...
    def save_periodically(self) -> None: ...
    def save(self) -> None: ...


class Engine:
    """Continuous batching over one model.

    Only the engine's thread touches the device; `submit` and `cancel` put a note into its inbox.
    After an uncaught error all requests end with an error, and the thread continues with a new core
    and a new runner on the same model, unless this happens too often (see `acquire_restart`).

    `disk_stats` returns fields of `PrefixCacheStats`. `on_failure` is called with the reason if the
    engine fails without a restart; the functions in `on_stop` are called when it has stopped.
    """

    def __init__(
        self,
        info: EngineInfo,
        make_core: Callable[[EngineStats], EngineCore],
        heartbeat: Heartbeat,
        calibrator: IdleWork | None = None,
        warm_up: Callable[[ModelRunner], None] | None = None,
        *,
        disk_stats: Callable[[], Mapping[str, Any]] = dict,
        can_restart: bool = True,
        on_failure: Callable[[str], None] = lambda _: None,
        on_stop: Many[Callable[[], None]] = (),
    ) -> None:
        self.info = info
        self._make_core = make_core
        self._heartbeat = heartbeat
        self._calibrator = calibrator
        self._disk_stats = disk_stats
        self._can_restart, self._on_failure, self._on_stop = can_restart, on_failure, on_stop
        self._warm_up = warm_up or (lambda _: None)
        self._answered = Future[None]()  # set when `warm_up` has succeeded or failed
        if warm_up is None:
            self._answered.set_result(None)
        self._core: EngineCore | None = None
        self._restarts: deque[float] = deque()
        # Sequences to add and ids of requests to cancel; None only wakes the thread.
        self._inbox: list[Sequence | str | None] = []
        self._wake = threading.Condition()
        self._open: dict[str, None] = {}  # ids of requests whose last output is not delivered yet
        self._stopping = False
        self._quiet_until = 0.0  # `monotonic` time before which no step costs are measured
        self._failure: str | None = None
        self._deliver: Deliver | None = None  # None before `start`
        self._thread = threading.Thread(target=self._main, name="mlx-mtp-engine", daemon=True)
        self._totals = EngineStats()  # counters since the start, over all restarts
        self._stats = EngineStats()  # published after each step, for other threads

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the engine accepts no requests (failed, stopping, not started); None if it does."""
        if self._failure is not None:
            return self._failure
        if self._stopping:
            return "the engine is stopping"
        return "the engine is not started" if self._deliver is None else None

    @property
    def measuring(self) -> bool:
        """True while step costs are measured, or will be when there are no requests."""
        return self._calibrator is not None and self._calibrator.busy and not self.unhealthy_reason

    def expect_request(self) -> None:
        """Postpone measuring step costs: a request is being read, or may follow soon."""
        self._quiet_until = monotonic() + QUIET_SECONDS

    @property
    def hang_reason(self) -> str | None:
        """Why the engine seems to hang; None while it works. It may recover."""
        return self._heartbeat.hang()

    def resume(self) -> None:
        """Call after SIGCONT: the time that the process was stopped does not count as a hang."""
        self._heartbeat.resume()

    def start(self, deliver: Deliver) -> None:
        """Accept requests; the thread calls `deliver` once per step, with all its outputs."""
        self._deliver = deliver
        if self._thread.ident is None:
            self.launch()

    def launch(self) -> None:
        """Start the thread before `start`; raises ModelError if the model can't answer."""
        self._thread.start()
        atexit.register(self.stop)
        while not wait([self._answered], NOTICE_SECONDS).done:
            logger.warning("The first answer is still being computed.")
        try:
            self._answered.result()
        except Exception as error:
            raise ModelError(f"The model can't answer: {error}") from error

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread after the current step; returns whether it ended within `timeout` s."""
        with self._wake:
            self._stopping = True
            self._post(None)
        atexit.unregister(self.stop)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        for close in self._on_stop:
            close()
        return True

    def fail(self, reason: str) -> None:
        """End all requests with an error. Thread-safe: the engine's thread may hang forever."""
        with self._wake:
            self._failure, self._stopping = reason, True
            waiting = [note.request_id for note in self._inbox if isinstance(note, Sequence)]
        # The thread may have taken some of the waiting requests in the meantime.
        self._send(self._cut_short(reason, dict.fromkeys([*self._open, *waiting])))

    def submit(self, request: Request) -> None:
        """Queue a request; raises InvalidRequestError, ContextLengthError or EngineStoppedError."""
        info = self.info
        request.validate(info.vocab_size, info.max_model_len, mtp_enabled=info.mtp_enabled)
        sampling = request.sampling
        allowed = sampling.allowed_token_ids
        if allowed is not None and info.never_sampled and {*allowed} <= {*info.never_sampled}:
            message = "allowed_token_ids has only ids that stand for images: none is ever sampled."
            raise InvalidRequestError(message, param="allowed_token_ids")
        eos_token_ids = () if sampling.ignore_eos else info.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos_token_ids, *sampling.stop_token_ids)))
        room = info.max_model_len - len(request.prompt_token_ids)
        sequence = Sequence(request, stop_ids, min(sampling.max_tokens, room))
        with self._wake:
            if self.unhealthy_reason is not None:
                raise EngineStoppedError(f"No requests are accepted: {self.unhealthy_reason}.")
            self._post(sequence)

    def cancel(self, request_id: str) -> None:
        self._post(request_id)

    def wake(self) -> None:
        """Make the thread check again what it waits for. Thread-safe."""
        self._post(None)

    def stats(self) -> EngineStats:
        """Returns counters and gauges as of the last step; those of memory and disk are current."""
        prefixes = replace(self._stats.prefix_cache, **self._disk_stats())
        memory = mx.get_active_memory()
        return replace(self._stats, active_memory=memory, prefix_cache=prefixes)

    def _main(self) -> None:
        # A new thread per restart would leak: the C library keeps memory for each thread.
        while self._run_until_stopped():
            logger.warning("The engine is restarted.")
        # mlx aborts the process at exit if a thread has left its streams behind.
        mx.clear_streams()

    def _run_until_stopped(self) -> bool:
        """Run, and shut down what is left; returns whether to run again."""
        reason = "the engine is stopping"
        try:
            if not self._stopping:
                self._run()
        except BaseException as error:
            reason = f"the engine died: {type(error).__name__}: {error}"
            if not self._answered.done():
                self._stopping = True
                self._answered.set_exception(error)
            else:
                # The traceback would keep the old runner alive.
                logger.critical("The engine died", exc_info=error)
            error.__traceback__ = None
        self._heartbeat.end()
        return self._shut_down(reason)

    def _run(self) -> None:
        self._heartbeat.begin("its start", allowed=START_SECONDS)
        core = self._core = self._make_core(self._totals)
        if not self._answered.done():
            self._warm_up(core.runner)
            self._answered.set_result(None)
        calibrator = self._calibrator
        if calibrator is not None:
            calibrator.reset()
        self.expect_request()
        while True:
            self._heartbeat.end()
            measuring = calibrator is not None and calibrator.busy and core.idle
            pause = max(self._quiet_until - monotonic(), 0.0)
            for note in self._read_inbox(pause if measuring else core.seconds_to_wait):
                if isinstance(note, Sequence):
                    core.scheduler.add(note)
                elif note is not None:
                    core.scheduler.cancel(note)
            if self._stopping:
                return
            if measuring and calibrator is not None:
                self._heartbeat.begin("the measuring of step costs", allowed=START_SECONDS)
                if core.idle and monotonic() >= self._quiet_until:
                    calibrator.step(core.runner)
                    continue
                calibrator.pause()
                if core.idle:
                    continue
            self._heartbeat.begin("the planning of a step")
            outputs = core.step()
            # Published here because other threads must not walk the scheduler's queues, and before
            # the outputs so that a request is already counted when its client sees its end.
            self._stats = core.scheduler.stats()
            self._send(outputs)
            if core.idle:
                core.release()
                self.expect_request()
            if calibrator is not None:
                calibrator.save_periodically()

    def _shut_down(self, reason: str) -> bool:
        """End all requests; returns whether to restart the engine."""
        with self._wake:
            restart = not self._stopping and self._can_restart
            restart = restart and acquire_restart(self._restarts, monotonic())
            if not restart and not self._stopping:
                self._failure = reason
            self._read_inbox(0.0)
        core, self._core = self._core, None
        # The thread may have died before it delivered the end of a request.
        ends = self._cut_short(reason, self._open)
        tasks = [lambda: self._send(ends)]
        if self._failure is not None:
            tasks.append(partial(self._on_failure, reason))
        tasks += [] if core is None else [core.close]
        tasks += [] if self._calibrator is None else [self._calibrator.save]
        for task in tasks:
            try:
                task()
            except Exception:
                logger.exception("Shutting the engine down failed in part")
        self._totals.num_restarts += restart
        self._stats = replace(self._totals)
        return restart

    def _cut_short(self, reason: str, request_ids: Iterable[str]) -> list[RequestOutput]:
        error = EngineStoppedError(f"Cut short: {reason.rstrip('.')}.")
        return [RequestOutput(n, finish_reason="error", error=error) for n in request_ids]

    def _post(self, note: Sequence | str | None) -> None:
        with self._wake:
            self._inbox.append(note)
            self._wake.notify()

    def _read_inbox(self, seconds: float | None) -> list[Sequence | str | None]:
        """Take the posted notes; waits at most `seconds` for one (None: without a limit)."""
        with self._wake:
            if seconds != 0.0:
                self._wake.wait_for(lambda: self._inbox, seconds)
            notes, self._inbox = self._inbox, []
        for note in notes:
            if isinstance(note, Sequence):
                self._open[note.request_id] = None
            elif note is not None:
                self._open.pop(note, None)
        return notes

    def _send(self, outputs: Many[RequestOutput]) -> None:
        if outputs and self._deliver is not None:
            self._deliver(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._open.pop(output.request_id, None)
