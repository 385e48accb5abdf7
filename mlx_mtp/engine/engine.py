"""The engine: one thread that schedules, runs and updates. Token ids in, tokens out."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

import mlx.core as mx

from mlx_mtp.cache.prefix_store import PrefixStore
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.cost_keeper import CostKeeper
from mlx_mtp.engine.faults import RestartBudget
from mlx_mtp.engine.heartbeat import Heartbeat
from mlx_mtp.engine.info import EngineInfo
from mlx_mtp.engine.memory import Admission
from mlx_mtp.engine.prefix import PrefixCache
from mlx_mtp.engine.request import Request, RequestOutput, check_num_draft_tokens
from mlx_mtp.engine.reuse import PrefixReuse
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.stats import EngineStats
from mlx_mtp.errors import (
    ContextLengthError,
    EngineStoppedError,
    InvalidRequestError,
)
from mlx_mtp.sampling.params import check_token_ids
from mlx_mtp.speculative.depth import DepthPolicy

logger = logging.getLogger(__name__)

Deliver = Callable[[Many[RequestOutput]], None]


class Engine:
    """Continuous batching over one model.

    Everything that touches the device happens on the engine's thread; `submit` and `cancel` leave
    a note there and wake it. Should the thread die, its requests end with an error and another one
    takes its place, with a runner of its own on the same model (see `RestartBudget`).

    Args:
        info: of the model.
        config: limits.
        make_runner: builds a runner, called on the engine's thread.
        depth: drafts per step.
        keeper: of the costs that `depth` follows, if it follows any.
        heartbeat: tells whether a step hangs.
        prefixes: the runner's prefix cache, where prompts are looked up; None without one.
        memory: which rows there is memory for; None: for any.
        store: of the prefixes on the disk; it is closed when the thread has been stopped.
    """

    def __init__(
        self,
        info: EngineInfo,
        config: EngineConfig,
        make_runner: Callable[[], ModelRunner],
        depth: DepthPolicy,
        keeper: CostKeeper | None = None,
        heartbeat: Heartbeat | None = None,
        prefixes: PrefixCache | None = None,
        memory: Admission | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        self.info = info
        self._config = config
        self._make_runner = make_runner
        self._depth = depth
        self._keeper = keeper
        self._heartbeat = heartbeat or Heartbeat()
        self._restarts = RestartBudget()
        self._prefixes = prefixes
        self._memory = memory
        self._store = store
        self._inbox: list[Sequence | str] = []
        # Requests that were taken and whose end has not been delivered, in their order.
        self._open: dict[str, None] = {}
        self._has_read = False
        self._wake = threading.Condition()
        if store is not None:
            store.reader.on_done = self._wake_up
        self._started = False
        self._stopping = False
        self._failure: str | None = None
        self._deliver: Deliver | None = None
        self._thread = self._new_thread()
        # What earlier threads counted, and what all have up to now.
        self._earlier = EngineStats()
        self._stats = EngineStats()

    @property
    def healthy(self) -> bool:
        """The engine takes requests."""
        return self.unhealthy_reason is None

    @property
    def unhealthy_reason(self) -> str | None:
        """Why it takes none, and never will again; None while it does."""
        if self._failure is not None:
            return self._failure
        if self._stopping:
            return "the engine is stopping"
        return None if self._started else "the engine is not started"

    @property
    def hang_reason(self) -> str | None:
        """Why the engine is taken to hang; None while it works. It may recover."""
        return self._heartbeat.hang()

    def start(self, deliver: Deliver) -> None:
        """Begin.

        Args:
            deliver: called on the engine's thread, once a step, with all outputs of that step.
        """
        self._deliver = deliver
        self._started = True
        self._thread.start()
        atexit.register(self.stop)

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread after the step it is in; requests that are left end with an error.

        Then the prefixes that wait to be written are, for some seconds at most.

        Args:
            timeout: seconds to wait for that; None: as long as it takes.

        Returns:
            The thread has ended; False: it hangs.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        atexit.unregister(self.stop)
        while True:
            with self._wake:
                thread = self._thread
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout)
            # A thread that died may have started another meanwhile.
            if thread is self._thread:
                break
        if not thread.is_alive() and self._store is not None:
            self._store.close()
        return not thread.is_alive()

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: a parameter or a token id is out of range.
            ContextLengthError: the prompt leaves no room for an answer.
            EngineStoppedError: the engine takes no requests.
        """
        self._check(request)
        sampling = request.sampling
        own = () if sampling.ignore_eos else self.info.eos_token_ids
        room = self.info.max_model_len - len(request.prompt_token_ids)
        stop_ids = tuple(dict.fromkeys((*own, *sampling.stop_token_ids)))
        sequence = Sequence(request, stop_ids, min(sampling.max_tokens, room))
        with self._wake:
            if self.unhealthy_reason is not None:
                raise EngineStoppedError(f"No requests are accepted: {self.unhealthy_reason}.")
            self._inbox.append(sequence)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """Drop a request; unknown ids are ignored, and so is a call after the end."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify()

    def stats(self) -> EngineStats:
        """Counters and gauges, as of the last step; those of the disk, as of now."""
        stats = self._stats
        if self._store is None:
            return stats
        disk = self._store.stats()
        prefixes = replace(
            stats.prefix_cache,
            num_files=disk.num_nodes,
            file_nbytes=disk.nbytes,
            num_files_written=disk.num_written,
            num_files_dropped=disk.num_dropped,
        )
        return replace(stats, prefix_cache=prefixes)

    def _check(self, request: Request) -> None:
        vocab_size, limit = self.info.vocab_size, self.info.max_model_len
        request.sampling.validate(vocab_size)
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequestError(
                "The prompt is empty; it needs at least one token.", param="prompt"
            )
        if len(prompt) >= limit:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens, but this server's context is {limit} tokens "
                "for prompt and answer together.",
                param="prompt",
            )
        if request.sampling.grammar is not None and request.grammar is None:
            raise InvalidRequestError("The request's grammar has not been compiled.")
        check_token_ids("prompt", prompt, vocab_size)
        check_num_draft_tokens(request.num_draft_tokens, mtp_enabled=self.info.mtp_enabled)

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._main, name="mlx-mtp-engine", daemon=True)

    def _main(self) -> None:
        """One thread's life."""
        scheduler = Scheduler(self._config, self._depth, self._reuse(), self._memory)
        reason = "the engine is stopping"
        try:
            self._live(scheduler)
        except BaseException as error:
            reason = f"the engine's thread died: {type(error).__name__}: {error}"
            # Without its traceback, which would hold on to the old runner.
            logger.critical("The engine's thread died", exc_info=error)
            error.__traceback__ = None
        self._heartbeat.end()
        again = self._bury(scheduler, reason)
        # A thread that leaves its streams behind makes mlx abort the process at exit.
        mx.clear_streams()
        if again:
            # Under the lock: `stop` would take a thread that is not started for one that has ended.
            with self._wake:
                self._thread = self._new_thread()
                self._thread.start()

    def _live(self, scheduler: Scheduler) -> None:
        if self._stopping:
            return
        self._heartbeat.begin_start()
        runner = self._make_runner()
        if self._keeper is not None and not self._stats.num_restarts:
            self._keeper.begin(self._config, runner, stopping=lambda: self._stopping)
        overlap, heartbeat = self._config.overlap, self._heartbeat
        self._loop(EngineCore(scheduler, runner, overlap=overlap, heartbeat=heartbeat))

    def _bury(self, scheduler: Scheduler, reason: str) -> bool:
        """End all requests; returns whether there is to be another thread."""
        with self._wake:
            again = not self._stopping and self._restarts.take()
            if again:
                logger.warning("The engine is restarted.")
            elif not self._stopping:
                self._failure = reason
            notes, self._inbox = self._inbox, []
        self._note_open(notes)
        error = EngineStoppedError(f"Cut short: {reason}.")
        try:
            # Those too that had just ended: it may have died before that was told.
            ends = [RequestOutput(n, finish_reason="error", error=error) for n in self._open]
            self._send(ends)
            scheduler.fail_all(error)
            if self._keeper is not None:
                self._keeper.save()
        except Exception:
            logger.exception("The end of the engine's thread could not be reported")
        if self._prefixes is not None:
            # Whatever killed the thread may have been in there.
            self._prefixes.clear()
        idle = EngineStats(num_restarts=int(again))
        self._earlier = self._stats = idle.after(self._stats)
        return again

    def _reuse(self) -> PrefixReuse | None:
        if self._prefixes is None:
            return None
        step = self._config.prefill_step_size
        return PrefixReuse(self._prefixes.tree, frozenset(self.info.eos_token_ids), step)

    def _loop(self, core: EngineCore) -> None:
        while True:
            self._heartbeat.end()
            self._take_inbox(core, core.seconds_to_wait)
            if self._stopping:
                return
            self._heartbeat.turn()
            outputs = core.step()
            # Published from here alone: other threads must not walk the scheduler's queues. And
            # before the outputs: who has an answer finds it counted.
            self._stats = core.stats().after(self._earlier)
            self._send(outputs)
            if core.idle:
                core.rest()
            if self._keeper is not None:
                self._keeper.save_now_and_then()

    def _take_inbox(self, core: EngineCore, seconds: float | None) -> None:
        """Take in what was left here; if nothing was, wait for so long at most."""
        with self._wake:
            if seconds != 0.0:
                self._wake.wait_for(
                    lambda: self._inbox or self._stopping or self._has_read, seconds
                )
            self._has_read = False
            notes, self._inbox = self._inbox, []
        self._note_open(notes)
        for note in notes:
            if isinstance(note, Sequence):
                core.add(note)
            else:
                core.cancel(note)

    def _note_open(self, notes: Many[Sequence | str]) -> None:
        for note in notes:
            if isinstance(note, Sequence):
                self._open[note.request_id] = None
            else:
                self._open.pop(note, None)

    def _wake_up(self) -> None:
        """The disk has answered."""
        with self._wake:
            self._has_read = True
            self._wake.notify()

    def _send(self, outputs: Many[RequestOutput]) -> None:
        if outputs and self._deliver is not None:
            self._deliver(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._open.pop(output.request_id, None)
