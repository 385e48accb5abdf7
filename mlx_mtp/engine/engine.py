"""The engine: one thread that schedules, runs and updates. Token ids in, tokens out."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import mlx.core as mx

from mlx_mtp.config import DraftTokens, EngineConfig
from mlx_mtp.engine.admission import Admission
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.costs import CostKeeper
from mlx_mtp.engine.request import Request, RequestOutput, check_num_draft_tokens
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.stats import EngineStats
from mlx_mtp.errors import (
    ContextLengthError,
    EngineStoppedError,
    InvalidRequestError,
)
from mlx_mtp.speculative.depth import DepthPolicy

logger = logging.getLogger(__name__)

Deliver = Callable[[Many[RequestOutput]], None]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a client of the engine needs to know of the model.

    Args:
        vocab_size: token ids are below this.
        eos_token_ids: ids that end a sequence unless it ignores them.
        max_model_len: most tokens of prompt and answer together.
        num_draft_tokens: drafts per step where a request doesn't say; 0 when MTP is off.
        model_type: as in config.json.
        mtp_enabled: there is a source of drafts.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_draft_tokens: DraftTokens
    model_type: str
    mtp_enabled: bool


class Engine:
    """Continuous batching over one model.

    Everything that touches the device happens on the engine's thread; `submit` and `cancel` leave
    a note there and wake it.

    Args:
        info: of the model.
        config: limits.
        make_runner: builds the runner, called on the engine's thread.
        depth: drafts per step.
        keeper: of the costs that `depth` follows, if it follows any.
        memory: which rows there is memory for; None: for any.
    """

    def __init__(
        self,
        info: EngineInfo,
        config: EngineConfig,
        make_runner: Callable[[], ModelRunner],
        depth: DepthPolicy,
        keeper: CostKeeper | None = None,
        memory: Admission | None = None,
    ) -> None:
        self.info = info
        self._config = config
        self._make_runner = make_runner
        self._depth = depth
        self._keeper = keeper
        self._memory = memory
        self._inbox: list[Sequence | str] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._failure: str | None = None
        self._deliver: Deliver | None = None
        self._thread = threading.Thread(target=self._main, name="mlx-mtp-engine", daemon=True)
        self._stats = EngineStats()

    @property
    def healthy(self) -> bool:
        """The engine's thread runs and takes requests."""
        return self.unhealthy_reason is None

    @property
    def unhealthy_reason(self) -> str | None:
        """Why it does not, or None."""
        if self._failure is not None:
            return self._failure
        if self._stopping:
            return "the engine is stopping"
        return None if self._thread.is_alive() else "the engine is not started"

    def start(self, deliver: Deliver) -> None:
        """Begin.

        Args:
            deliver: called on the engine's thread, once a step, with all outputs of that step.
        """
        self._deliver = deliver
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread after the step it is in; requests that are left end with an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.stop)

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
                raise EngineStoppedError(f"No request is taken: {self.unhealthy_reason}.")
            self._inbox.append(sequence)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """Drop a request; unknown ids are ignored, and so is a call after the end."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify()

    def stats(self) -> EngineStats:
        """Counters and gauges, as of the last step."""
        return self._stats

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
        wrong = next((t for t in prompt if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"The prompt holds token {wrong}, but token ids are 0 to {vocab_size - 1}.",
                param="prompt",
            )
        check_num_draft_tokens(request.num_draft_tokens, mtp_enabled=self.info.mtp_enabled)

    def _main(self) -> None:
        scheduler = Scheduler(self._config, self._depth, self._memory)
        try:
            runner = self._make_runner()
            if self._keeper is not None:
                self._keeper.begin(self._config, runner, stopping=lambda: self._stopping)
            self._loop(EngineCore(scheduler, runner, overlap=self._config.overlap))
        except Exception as error:
            logger.exception("The engine's thread died")
            self._failure = f"the engine's thread died: {type(error).__name__}: {error}"
        cut_short = EngineStoppedError(f"Cut short: {self.unhealthy_reason}.")
        with self._wake:
            waiting, self._inbox = [n for n in self._inbox if isinstance(n, Sequence)], []
        for sequence in waiting:
            scheduler.add(sequence)
        self._send(scheduler.fail_all(cut_short))
        if self._keeper is not None:
            self._keeper.save()
        self._stats = EngineStats()
        # A thread that leaves its streams behind makes mlx abort the process at exit.
        mx.clear_streams()

    def _loop(self, core: EngineCore) -> None:
        while True:
            # Published from here alone: other threads must not walk the scheduler's queues.
            self._stats = core.stats()
            self._take_inbox(core, wait=core.idle)
            if self._stopping:
                return
            self._send(core.step())
            if self._keeper is not None:
                self._keeper.save_now_and_then()

    def _take_inbox(self, core: EngineCore, *, wait: bool) -> None:
        with self._wake:
            if wait:
                self._wake.wait_for(lambda: self._inbox or self._stopping)
            notes, self._inbox = self._inbox, []
        for note in notes:
            if isinstance(note, Sequence):
                core.add(note)
            else:
                core.cancel(note)

    def _send(self, outputs: Many[RequestOutput]) -> None:
        if outputs and self._deliver is not None:
            self._deliver(outputs)
