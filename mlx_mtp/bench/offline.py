"""`mlx-mtp bench offline`: the engine alone, no HTTP and no text, MTP on beside off."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from mlx_mtp.bench.answer import Answer, Split
from mlx_mtp.bench.prompts import Prompt
from mlx_mtp.bench.runs import Asking
from mlx_mtp.config import DraftTokens, EngineConfig
from mlx_mtp.engine.arrivals import next_arrival
from mlx_mtp.engine.build import build_engine
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.params import SamplingParams

Arrived = tuple[float, Sequence[RequestOutput]]
OFF = "MTP off"


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """Token ids of a chat, up to where the answer begins."""


def make_engine(
    model: LoadedModel,
    tokenizer: ChatTokenizer,
    depth: DraftTokens,
    *,
    max_num_seqs: int,
    calibration_seconds: float,
    draft_ids: Sequence[int] | None = None,
) -> Engine:
    """An engine over weights that others may share.

    Args:
        model: with its head.
        tokenizer: its own.
        depth: drafts per step; 0 is MTP off, without the head's work on the prompt.
        max_num_seqs: rows at once.
        calibration_seconds: of the depth "auto", which knows nothing from other runs.
        draft_ids: the only tokens that may be drafted; None: all.
    """
    if depth == 0:
        model, draft_ids = model.without_head(), None
    config = EngineConfig(
        num_draft_tokens=depth,
        max_num_seqs=max_num_seqs,
        calibration_seconds=calibration_seconds,
    )
    return build_engine(
        model, config, tokenizer.vocab_size, tokenizer.eos_token_ids, draft_ids=draft_ids
    )


def engine_name(depth: DraftTokens) -> str:
    """In tables."""
    if depth == "auto":
        return "MTP, auto"
    return f"MTP, k = {depth}" if depth else OFF


class EngineSubject:
    """An engine to measure; a context manager, which starts and stops it.

    Args:
        name: in tables.
        engine: not yet started.
        tokenizer: of its model.
        asking: how to ask.
        clock: seconds.
        observe: shown what each step brought, once it is read.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: ChatTokenizer,
        asking: Asking,
        clock: Callable[[], float] = time.perf_counter,
        observe: Callable[[Sequence[RequestOutput]], None] = lambda _: None,
    ) -> None:
        self.name = name
        self._engine = engine
        self._tokenizer = tokenizer
        self._asking = asking
        self._clock = clock
        self._observe = observe
        self._numbers = itertools.count()
        self._arrived: queue.SimpleQueue[Arrived] = queue.SimpleQueue()

    def __enter__(self) -> EngineSubject:
        self._engine.start(lambda outputs: self._arrived.put((self._clock(), outputs)))
        try:
            # It may calibrate itself first, which must not happen while another is measured.
            self.ask([Prompt("Say hello.", seed=0)])
        except BaseException:
            self._engine.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._engine.stop()

    def ask(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Submit all of them at once; returns when the last answer has ended.

        Raises:
            MlxMtpError: the engine refused one, or failed.
        """
        # Encoded beforehand: text is not measured here.
        return self.answers([self._request(prompt) for prompt in prompts])

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Submit requests of different ids at once; returns when the last answer has ended.

        Raises:
            MlxMtpError: the engine refused one, or failed.
        """
        recorders = {}
        for request in requests:
            recorders[request.request_id] = _Recorder(request, self._clock())
            self._engine.submit(request)
        unfinished = set(recorders)
        while unfinished:
            at, outputs = next_arrival(self._arrived, self._engine)
            self._observe(outputs)
            for output in outputs:
                if recorders[output.request_id].take(at, output):
                    unfinished.discard(output.request_id)
        return [recorder.answer() for recorder in recorders.values()]

    def _request(self, prompt: Prompt) -> Request:
        asking = self._asking
        sampling = SamplingParams(
            max_tokens=asking.max_tokens,
            temperature=asking.temperature,
            seed=prompt.seed,
            ignore_eos=asking.ignore_eos,
        )
        ids = self._tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        return Request(f"bench-{next(self._numbers)}", ids, sampling)


class _Recorder:
    """One answer as it comes."""

    def __init__(self, request: Request, sent: float) -> None:
        self._request = request
        self._sent = self._ended = sent
        self._times: list[float] = []
        self._tokens: list[float] = []
        self._drafts = self._accepted = 0

    def take(self, at: float, output: RequestOutput) -> bool:
        """Note a step's output; whether it was the last.

        Raises:
            MlxMtpError: the step failed.
        """
        if output.error is not None:
            raise output.error
        self._ended = at
        self._drafts += output.num_draft_tokens
        self._accepted += output.num_accepted_tokens
        if output.token_ids:
            self._times.append(at)
            self._tokens.append(float(len(output.token_ids)))
        return output.finish_reason is not None

    def answer(self) -> Answer:
        """What came of it."""
        return Answer(
            sent=self._sent,
            ended=self._ended,
            times=tuple(self._times),
            tokens=tuple(self._tokens),
            num_tokens=int(sum(self._tokens)),
            split=Split.TOLD,
            num_events=len(self._times),
            prompt_tokens=len(self._request.prompt_token_ids),
            num_drafts=self._drafts,
            num_accepted=self._accepted,
        )
