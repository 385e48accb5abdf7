"""One HTTP request's answers: engine outputs to text, counts and times."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.errors import MlxMtpError, RequestTimeoutError
from mlx_mtp.server.choice import Choice, Delta
from mlx_mtp.server.dispatch import Dispatcher
from mlx_mtp.server.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer cost, in tokens.

    Args:
        prompt_tokens: of all prompts.
        completion_tokens: generated, for all choices.
        reasoning_tokens: of those, the ones of think blocks.
        cached_tokens: of the prompts, the ones that did not have to be computed.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int = 0


MakeChoice = Callable[[int], Choice]


class Generation:
    """The choices of one HTTP request, from submission to the last token.

    Use it as a context: on leaving, whatever is unfinished in the engine is cancelled.

    Args:
        dispatcher: takes the requests.
        metrics: is told the times.
        requests: one for each choice, those of the same prompt together.
        make_choice: from its index.
        num_choices: for each prompt.
        timeout: seconds that all of it may take; 0: any.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: Metrics,
        requests: Sequence[Request],
        make_choice: MakeChoice,
        num_choices: int = 1,
        timeout: float = 0.0,
    ) -> None:
        prompts = [request.prompt_token_ids for request in requests[::num_choices]]
        self._lengths = [len(prompt) for prompt in prompts]
        self.prompt_tokens = sum(self._lengths)
        self.choices = {request.request_id: make_choice(i) for i, request in enumerate(requests)}
        self._metrics = metrics
        self._timeout = timeout
        self._num_choices = num_choices
        self._reused = dict.fromkeys(self.choices, 0)
        self._began = time.perf_counter()
        self._times: dict[str, float] = {}
        self._first: float | None = None
        self._first_tokens = 0
        self._last = self._began
        self._inbox = dispatcher.open(requests)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.close()

    async def deltas(self, patience: float) -> AsyncIterator[list[Delta]]:
        """What is new, as it comes, until every choice is finished.

        Args:
            patience: an empty list tells that nothing has come for so many seconds.

        Raises:
            RequestTimeoutError: it has taken too long.
            MlxMtpError: a choice failed, or the engine did.
        """
        while not self.is_finished:
            arrived = await self._inbox.take(min(patience, self._seconds_left()))
            if not arrived:
                self._seconds_left()  # Too late is no silence to be broken.
                yield []
                continue
            told, failure = self._take_all(arrived)
            if told:
                yield told
            if failure is not None:
                raise failure

    def _seconds_left(self) -> float:
        if not self._timeout:
            return math.inf
        left = self._began + self._timeout - time.perf_counter()
        if left <= 0:
            self._metrics.timed_out()
            raise RequestTimeoutError(
                f"The request has waited and run for more than the {self._timeout:g} seconds that "
                f"this server allows (--request-timeout); {self.completion_tokens} tokens had been "
                "generated."
            )
        return left

    def _take_all(
        self, arrived: Sequence[tuple[float, RequestOutput]]
    ) -> tuple[list[Delta], MlxMtpError | None]:
        """What is to be told, up to the first error; what came before it is still told."""
        told: list[Delta] = []
        for at, output in arrived:
            try:
                delta = self._take(at, output)
            except MlxMtpError as error:
                return told, error
            if not delta.is_empty:
                told.append(delta)
        return told, None

    def _take(self, at: float, output: RequestOutput) -> Delta:
        choice = self.choices[output.request_id]
        if choice.finish_reason is not None:
            return Delta(choice.index, ())  # Arrived with the step that completed a stop.
        self._reused[output.request_id] += output.num_reused_tokens
        before = choice.num_tokens
        delta = choice.take(output)
        self._note_times(at, output.request_id, choice.num_tokens - before)
        if delta.finish_reason is not None:
            self._inbox.drop(output.request_id)
        return delta

    def _note_times(self, at: float, request_id: str, count: int) -> None:
        if not count:
            return
        previous = self._times.get(request_id)
        if previous is None:
            self._metrics.first_token(at - self._began)
        else:
            self._metrics.more_tokens(at - previous, count)
        self._times[request_id] = self._last = at
        if self._first is None:
            self._first = at
        if at == self._first:
            self._first_tokens += count

    @property
    def is_finished(self) -> bool:
        """Every choice has its finish reason."""
        return all(choice.finish_reason is not None for choice in self.choices.values())

    @property
    def completion_tokens(self) -> int:
        """Tokens generated for all choices."""
        return sum(choice.num_tokens for choice in self.choices.values())

    def usage(self) -> Usage:
        """The counts so far."""
        reasoning = sum(choice.num_reasoning_tokens for choice in self.choices.values())
        return Usage(self.prompt_tokens, self.completion_tokens, reasoning, self.cached_tokens)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that none of their choices had to compute.

        Never the last one, which the answer's first token is drawn from: clients take a prompt of
        no tokens for a fault.
        """
        reused, n = list(self._reused.values()), self._num_choices
        return sum(
            min(*reused[i * n : i * n + n], length - 1) for i, length in enumerate(self._lengths)
        )

    def timings(self) -> dict[str, Any]:
        """The times, in llama.cpp's form.

        The prompt's time lasts until the first token, waiting included; the rate of prediction is
        that of the tokens after the first step, whose time is the prompt's.
        """
        first = self._last if self._first is None else self._first
        prompt, predicted = first - self._began, self._last - first
        computed = self.prompt_tokens - self.cached_tokens
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": prompt * 1e3,
            "prompt_per_second": _rate(computed, prompt),
            "predicted_n": self.completion_tokens,
            "predicted_ms": predicted * 1e3,
            "predicted_per_second": _rate(self.completion_tokens - self._first_tokens, predicted),
            "draft_n": sum(choice.num_drafts for choice in self.choices.values()),
            "draft_n_accepted": sum(choice.num_accepted for choice in self.choices.values()),
        }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
