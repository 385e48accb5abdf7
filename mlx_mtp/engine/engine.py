"""The engine: one thread that schedules, runs and updates. Token ids in, tokens out."""

import atexit
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter

import mlx.core as mx

from mlx_mtp.calibration.calibrator import Calibrator
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.health import Heartbeat, acquire_restart
from mlx_mtp.engine.request import Request, RequestOutput, check_num_draft_tokens
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.stats import EngineInfo, EngineStats
from mlx_mtp.errors import ContextLengthError, EngineStoppedError, InvalidRequestError, ModelError
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.ranks.links import Links
from mlx_mtp.sampling.params import check_token_ids

logger = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds without outputs after which `run_requests` checks the engine's health
NOTICE_SECONDS = 30.0  # between lines that say that the start goes on
QUIET_SECONDS = 1.0  # without requests before step costs are measured

Deliver = Callable[[Many[RequestOutput]], None]


class Engine:
    """Continuous batching over one model.

    Everything that touches the device happens on the engine's thread; `submit` and `cancel` put a
    note into its inbox. After an error that nothing catches all requests end with an error, and the
    thread goes on with a new core and a new runner on the same model (see `acquire_restart`).
    """

    def __init__(
        self,
        info: EngineInfo,
        make_core: Callable[[EngineStats], EngineCore],
        heartbeat: Heartbeat,
        keeper: Calibrator | None = None,
        store: PrefixStore | None = None,
        warm_up: Callable[[ModelRunner], None] | None = None,
        links: Links | None = None,  # to the other ranks, if there are any
    ) -> None:
        self.info = info
        self._make_core = make_core
        self._heartbeat = heartbeat
        self._keeper = keeper
        self._store, self._links = store, links or Links()
        self._warm_up = warm_up or (lambda _: None)
        self._answered = Future[None]()  # whether the model could answer at the start
        if warm_up is None:
            self._answered.set_result(None)
        self._core: EngineCore | None = None
        self._restarts: deque[float] = deque()
        self._inbox: list[Sequence | str | None] = []  # to add, to cancel; None only wakes
        self._wake = threading.Condition()
        self._open: dict[str, None] = {}  # ids that have not been delivered an end, in order
        if store is not None:
            store.on_read = lambda: self._post(None)
        self._stopping = False
        self._quiet_until = 0.0  # by `monotonic`: no costs are measured before
        self._failure: str | None = None
        self._deliver: Deliver | None = None  # None until it is started
        self._thread = threading.Thread(target=self._main, name="mlx-mtp-engine", daemon=True)
        self._totals = EngineStats()  # since the start, over all restarts
        self._stats = EngineStats()  # as published

    @property
    def healthy(self) -> bool:
        return self.unhealthy_reason is None

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the engine accepts no requests, and never will again; None while it does."""
        if self._failure is not None:
            return self._failure
        if self._stopping:
            return "the engine is stopping"
        return "the engine is not started" if self._deliver is None else None

    @property
    def measuring(self) -> bool:
        """It measures step costs now, or will when nobody asks."""
        return self._keeper is not None and self._keeper.busy and self.healthy

    def expect(self) -> None:
        """A request is being read, or the next one of a client may be: measure nothing for now."""
        self._quiet_until = monotonic() + QUIET_SECONDS

    @property
    def hang_reason(self) -> str | None:
        """Why the engine is taken to hang; None while it works. It may recover."""
        return self._heartbeat.hang()

    def resume(self) -> None:
        """Told after the process had been stopped: that was no hang."""
        self._heartbeat.resume()

    def start(self, deliver: Deliver) -> None:
        """Take requests; the thread calls `deliver` once a step, with all outputs of that step."""
        self._deliver = deliver
        if self._thread.ident is None:
            self.launch()

    def launch(self) -> None:
        """Start the thread, as `start` does otherwise; ModelError if the model can't answer."""
        self._thread.start()
        atexit.register(self.stop)
        while not wait([self._answered], NOTICE_SECONDS).done:
            logger.warning("The first answer is still being computed.")
        try:
            self._answered.result()
        except Exception as error:
            raise ModelError(f"The model can't answer: {error}") from error

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread after the current step; returns whether it did so within `timeout` s."""
        with self._wake:
            self._stopping = True
            self._post(None)
        atexit.unregister(self.stop)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._store is not None:
            self._store.close()
        self._links.close()
        return True

    def fail(self, reason: str) -> None:
        """End all requests, on any thread, though the engine's may hang for good."""
        with self._wake:
            self._failure, self._stopping = reason, True
            waiting = [note.request_id for note in self._inbox if isinstance(note, Sequence)]
        self._send(self._cut_short(reason, [*self._open, *waiting]))

    def submit(self, request: Request) -> None:
        """Queue a request; raises InvalidRequestError, ContextLengthError or EngineStoppedError."""
        self._check(request)
        sampling = request.sampling
        own = () if sampling.ignore_eos else self.info.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*own, *sampling.stop_token_ids)))
        room = self.info.max_model_len - len(request.prompt_token_ids)
        sequence = Sequence(request, stop_ids, min(sampling.max_tokens, room))
        with self._wake:
            if self.unhealthy_reason is not None:
                raise EngineStoppedError(f"No requests are accepted: {self.unhealthy_reason}.")
            self._post(sequence)

    def cancel(self, request_id: str) -> None:
        self._post(request_id)

    def stats(self) -> EngineStats:
        """Counters and gauges, as of the last step; those of the disk, as of now."""
        stats = replace(self._stats, active_memory=mx.get_active_memory())
        if self._store is None:
            return stats
        disk = self._store.stats()._asdict()
        return replace(stats, prefix_cache=replace(stats.prefix_cache, **disk))

    def _check(self, request: Request) -> None:
        vocab_size, limit = self.info.vocab_size, self.info.max_model_len
        request.sampling.validate(vocab_size)
        prompt = request.prompt_token_ids
        if not prompt:
            message = "The prompt is empty; it needs at least one token."
            raise InvalidRequestError(message, param="prompt")
        if len(prompt) >= limit:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens, but this server's context is {limit} tokens "
                "for prompt and answer together.",
                param="prompt",
            )
        if request.sampling.grammar is not None and request.grammar is None:
            raise InvalidRequestError("The request's grammar has not been compiled.")
        check_token_ids("prompt", prompt, vocab_size)
        check_num_draft_tokens(request.options.num_draft_tokens, mtp_enabled=self.info.mtp_enabled)

    def _main(self) -> None:
        # Not a new thread for each restart: the C library would keep memory for all of them.
        while self._run_until_stopped():
            logger.warning("The engine is restarted.")
        # A thread that leaves its streams behind makes mlx abort the process at exit.
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
                # Without its traceback, which would refer to the old runner.
                logger.critical("The engine died", exc_info=error)
            error.__traceback__ = None
        self._heartbeat.end()
        return self._shut_down(reason)

    def _run(self) -> None:
        self._heartbeat.begin_start()
        core = self._core = self._make_core(self._totals)
        if not self._answered.done():
            self._warm_up(core.runner)
            self._answered.set_result(None)
        keeper = self._keeper
        if keeper is not None:
            keeper.begin()
        self.expect()
        while True:
            self._heartbeat.end()
            measuring = keeper is not None and keeper.busy and core.idle
            pause = max(self._quiet_until - monotonic(), 0.0)
            for note in self._read_inbox(pause if measuring else core.seconds_to_wait):
                if isinstance(note, Sequence):
                    core.add(note)
                elif note is not None:
                    core.cancel(note)
            if self._stopping:
                return
            if measuring and keeper is not None:
                self._heartbeat.begin_start()
                if core.idle and monotonic() >= self._quiet_until:
                    keeper.step(core.runner)
                    continue
                keeper.leave()
                if core.idle:
                    continue
            self._heartbeat.begin_planning()
            outputs = core.step()
            # Published from here alone: other threads must not walk the scheduler's queues. And
            # before the outputs: a request that has ended is counted when its client looks.
            self._stats = core.stats()
            self._send(outputs)
            if core.idle:
                core.release()
                self.expect()
            if keeper is not None:
                keeper.save_periodically()

    def _shut_down(self, reason: str) -> bool:
        """End all requests; returns whether the engine is to be restarted."""
        with self._wake:
            alone = not self._links.all  # Other ranks can't begin anew.
            restart = not self._stopping and alone and acquire_restart(self._restarts, monotonic())
            if not restart and not self._stopping:
                self._failure = reason
            self._read_inbox(0.0)
        core, self._core = self._core, None
        # Also those that had just ended: the thread may have died before delivering that.
        ends = self._cut_short(reason, self._open)
        tasks = [lambda: self._send(ends)]
        if self._failure is not None:
            tasks.append(partial(self._links.fail, reason))
        tasks += [] if core is None else [core.close]
        tasks += [] if self._keeper is None else [self._keeper.save]
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
        """What was posted; waits for something for so long at most (None: without end)."""
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


def run_requests(
    engine: Engine, requests: Iterable[Request]
) -> Iterator[tuple[float, RequestOutput]]:
    """Run requests for a caller without an event loop: their outputs, until all have ended.

    Each comes with the time (`perf_counter`) at which it was delivered. Starts the engine; raises
    what a request ends with, or EngineStoppedError.
    """
    arrived = queue.SimpleQueue[tuple[float, Many[RequestOutput]]]()
    engine.start(lambda outputs: arrived.put((perf_counter(), outputs)))
    left = 0
    for request in requests:
        engine.submit(request)
        left += 1
    while left:
        reason = engine.unhealthy_reason
        try:
            at, outputs = arrived.get(timeout=PATIENCE)
        except queue.Empty:
            # Checked before the wait: what a dying engine still sent has had the time to come.
            if reason is not None:
                raise EngineStoppedError(f"The engine has stopped: {reason}") from None
            continue
        for output in outputs:
            if output.error is not None:
                raise output.error
            left -= output.finish_reason is not None
            yield at, output
