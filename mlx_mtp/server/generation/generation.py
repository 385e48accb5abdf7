"""Turns the engine's outputs into the deltas and counts of one HTTP request's choices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mlx_mtp.engine.request import PrefillProgress, Request, RequestOutput
from mlx_mtp.errors import EngineStoppedError, MlxMtpError, RequestTimeoutError
from mlx_mtp.server.metrics import Metrics, SequenceTimes
from mlx_mtp.text.stream import Delta, OutputStream

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine

logger = logging.getLogger(__name__)

_AT_ONCE = 4  # outputs that are passed on before other callbacks run, as each takes up to 0.5 ms


def timeout_error(seconds: float, num_tokens: int = 0) -> RequestTimeoutError:
    """Returns the error for a request that exceeded `seconds` and generated `num_tokens`."""
    return RequestTimeoutError(
        f"The request has waited and run for more than the {seconds:g} seconds that this server "
        f"allows (--request-timeout); {num_tokens} tokens had been generated."
    )


class Dispatcher:
    """Starts and stops the engine, and passes each step's outputs to generations.

    Its methods are called on the event loop, except `_deliver`, which the engine's thread calls.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.open: dict[str, Generation] = {}  # an entry per choice, by request id
        self._undelivered: deque[tuple[float, RequestOutput]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine.start(self._deliver)

    async def stop(self, timeout: float | None = None) -> None:
        # In a thread: joining the engine's thread can take a whole step, and meanwhile this loop
        # must deliver the step's outputs.
        await asyncio.to_thread(self.engine.stop, timeout)
        self.end_all()

    def end_all(self) -> None:
        self._pass_on(len(self._undelivered))
        for generation in set(self.open.values()):
            generation.fail(EngineStoppedError("The server is shutting down."))

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self.open.pop(request_id, None) is not None:
                self.engine.cancel(request_id)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        assert self._loop is not None
        # Runs on the engine's thread. A forced exit may already have closed the loop.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._dispatch, time.perf_counter(), outputs)

    def _dispatch(self, at: float, outputs: Sequence[RequestOutput]) -> None:
        waiting = bool(self._undelivered)
        self._undelivered += [(at, output) for output in outputs]
        if not waiting:
            self._pass_on()

    def _pass_on(self, most: int = _AT_ONCE) -> None:
        """Pass on `most` outputs, and the others after the event loop has run what else is due."""
        for _ in range(min(most, len(self._undelivered))):
            at, output = self._undelivered.popleft()
            take = self.open.get if output.finish_reason is None else self.open.pop
            if (generation := take(output.request_id, None)) is None:
                continue
            try:
                generation.put(at, output)
            except Exception as error:  # Other requests must still get their outputs.
                logger.exception("an output could not be passed on")
                generation.fail(error)
        if self._undelivered:
            asyncio.get_running_loop().call_soon(self._pass_on)


class Generation:
    """The choices of one HTTP request; a context manager.

    Entering it submits the choices to the engine, and leaving it cancels the unfinished ones.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: Metrics,
        requests: Sequence[Request],
        streams: Sequence[OutputStream],
        num_choices: int = 1,  # per prompt
        timeout: float = 0.0,  # seconds; 0: no timeout
        arrived: float | None = None,  # when the request arrived, by `perf_counter`; None: now
    ) -> None:
        self.streams = streams
        self.prompts = [request.prompt_token_ids for request in requests[::num_choices]]
        self.prompt_tokens = sum(map(len, self.prompts))
        self.requests = requests
        self._by_id = {r.request_id: stream for r, stream in zip(requests, streams)}
        self._num_choices = num_choices
        self._dispatcher, self._metrics, self._timeout = dispatcher, metrics, timeout
        self._arrived: list[tuple[float, RequestOutput]] = []
        self.error: Exception | None = None  # the error that ended the generation
        self._wakeup = asyncio.Event()
        self._arrived_at = time.perf_counter() if arrived is None else arrived
        # `perf_counter` times of the submission and of the latest and the first tokens.
        self.began = self.last = 0.0
        self.first: float | None = None
        self.first_tokens = 0  # number of tokens that arrived at the time `first`
        self._times: dict[str, SequenceTimes] = {}  # by request id, once a choice has tokens

    def __enter__(self) -> Generation:
        self.began = self.last = time.perf_counter()
        try:
            for request in self.requests:
                self._dispatcher.open[request.request_id] = self
                self._dispatcher.engine.submit(request)
        except BaseException:
            self._dispatcher.cancel(self._by_id)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._dispatcher.cancel(self._by_id)
        for request, stream in zip(self.requests, self.streams):
            unfinished = "abort" if self.error is None else "error"
            self._metrics.count("request_success", stream.finish_reason or unfinished)
            times = self._times.get(request.request_id)
            if stream.finish_reason is not None and times is not None:
                num_prompt = len(request.prompt_token_ids)
                self._metrics.observe_sequence(times, num_prompt, stream.num_tokens)

    def live_fields(self, request_id: str, now: float) -> dict[str, Any]:
        """Returns a choice's row in /live, without text; `now` is a `perf_counter` time."""
        stream, times = self._by_id[request_id], self._times.get(request_id)
        seconds = 0.0 if times is None else times.last - times.first
        return {
            "id": request_id,
            "age": now - self.began,
            "prompt_tokens": len(self.requests[stream.index].prompt_token_ids),
            "cached_tokens": stream.num_reused_tokens,
            "tokens": stream.num_tokens,
            "tokens_per_second": stream.num_tokens / seconds if seconds else 0.0,
            "depth": stream.last_drafts,
            "source": stream.last_source,
            "drafts": stream.drafts.total(),
            "accepted": stream.accepted.total(),
            "state": "waiting" if times is None else "decoding",
        }

    def put(self, at: float, output: RequestOutput) -> None:
        self._arrived.append((at, output))
        self._wakeup.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._wakeup.set()

    async def deltas(self, patience: float) -> AsyncIterator[list[Delta]]:
        """Yields new deltas until all choices are finished, and [] after `patience` idle seconds.

        Raises RequestTimeoutError, EngineStoppedError, or the error that ended the generation.
        """
        while not self.is_finished:
            left = math.inf
            if self._timeout:
                left = self._arrived_at + self._timeout - time.perf_counter()
            if left <= 0:
                self._metrics.count("request_timeouts")
                self.error = timeout_error(self._timeout, self.completion_tokens)
                raise self.error
            if self.error is None:
                # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that arrives
                # together with the wakeup, so the request of a client that left would continue.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(patience, left)):
                        await self._wakeup.wait()
            self._wakeup.clear()
            arrived, self._arrived = self._arrived, []
            if not arrived:
                reason = self._dispatcher.engine.unhealthy_reason
                if self.error is None and reason is not None:
                    self.error = EngineStoppedError(f"The engine has stopped: {reason}")
                if self.error is not None:
                    raise self.error
                if patience < left:  # Otherwise the request has timed out.
                    yield []
            deltas: list[Delta] = []
            for at, output in arrived:
                if output.progress is not None:
                    deltas.append(self._progress(at, output, output.progress))
                    if not output.token_ids:
                        continue
                try:
                    delta = await self._push(at, output)
                except MlxMtpError as error:
                    self.error = error  # Raised once the deltas before it have been sent.
                    break
                if delta.events or delta.finish_reason is not None:
                    deltas.append(delta)
            if deltas:
                yield deltas

    async def _push(self, at: float, output: RequestOutput) -> Delta:
        stream = self._by_id[output.request_id]
        if stream.finish_reason is not None:
            return Delta(stream.index)  # from a step in flight when the choice ended
        self.last = at
        before = stream.num_tokens
        if output.prompt_logprobs:  # There can be many, so they leave the event loop.
            delta = await asyncio.to_thread(stream.push, output)
        else:
            delta = stream.push(output)
        if stream.num_tokens > before:
            self._note_times(at, output, stream.num_tokens - before)
        if delta.finish_reason is not None:
            self._dispatcher.cancel([output.request_id])
        return delta

    def _progress(self, at: float, output: RequestOutput, made: PrefillProgress) -> Delta:
        # llama.cpp counts a prompt's last token as processed once the answer has a token.
        before = made.total - 1
        progress = {
            "total": made.total,
            "cache": min(made.reused, before),
            "processed": made.total if output.token_ids else min(made.done, before),
            "time_ms": max(round(1e3 * (at - made.admitted_at)), 0),
        }
        return Delta(self._by_id[output.request_id].index, progress=progress)

    def _note_times(self, at: float, output: RequestOutput, count: int) -> None:
        times = self._times.get(output.request_id)
        if times is None:
            self._metrics.observe("time_to_first_token_seconds", at - self.began)
            admitted = max(output.admitted_at, self.began)
            times = SequenceTimes(self.began, admitted, at, at)
            self._times[output.request_id] = times
        else:
            between = (at - times.last) / count
            for _ in range(count):
                self._metrics.observe("inter_token_latency_seconds", between)
        times.last = at
        self.first = at if self.first is None else self.first
        if at == self.first:
            self.first_tokens += count

    @property
    def is_finished(self) -> bool:
        return all(stream.finish_reason is not None for stream in self.streams)

    @property
    def completion_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def reasoning_tokens(self) -> int:
        return sum(stream.num_reasoning_tokens for stream in self.streams)

    @property
    def cached_tokens(self) -> int:
        total, n = 0, self._num_choices
        for first in range(0, len(self.streams), n):
            reused = [stream.num_reused_tokens for stream in self.streams[first : first + n]]
            # Never the whole prompt: clients take a prompt without computed tokens for an error.
            total += min(*reused, len(self.requests[first].prompt_token_ids) - 1)
        return total

    def timings(self) -> dict[str, Any]:
        """Returns times and drafts in llama.cpp's form; prompt time ends at the first tokens."""
        first = self.last if self.first is None else self.first
        prompt, predicted = first - self.began, self.last - first
        cached, num_tokens = self.cached_tokens, self.completion_tokens
        computed = self.prompt_tokens - cached
        drafts = sum((stream.drafts for stream in self.streams), Counter[tuple[str, int]]())
        accepted = sum((stream.accepted for stream in self.streams), Counter[tuple[str, int]]())
        sources: dict[str, dict[str, list[int]]] = {}
        for source, position in sorted(drafts):
            counts = sources.setdefault(source, {"draft_n": [], "draft_n_accepted": []})
            counts["draft_n"].append(drafts[source, position])
            counts["draft_n_accepted"].append(accepted[source, position])
        optimistic = {"draft_n_optimistic": sum(stream.num_optimistic for stream in self.streams)}
        return {
            "cache_n": cached,
            "prompt_n": computed,
            "prompt_ms": prompt * 1e3,
            "prompt_per_second": _rate(computed, prompt),
            "predicted_n": num_tokens,
            "predicted_ms": predicted * 1e3,
            "predicted_per_second": _rate(num_tokens - self.first_tokens, predicted),
            "draft_n": drafts.total(),
            "draft_n_accepted": accepted.total(),
            **(optimistic if self.requests[0].sampling.optimistic else {}),
            "draft_sources": sources,
        }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
