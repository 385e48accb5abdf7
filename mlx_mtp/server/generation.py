"""One HTTP request's answers: engine outputs to text, counts and times."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_mtp.engine.request import Request, RequestOutput, TokenLogprobs
from mlx_mtp.errors import EngineError, MlxMtpError
from mlx_mtp.server.detokenizer import Detokenizer
from mlx_mtp.server.dispatch import Dispatcher
from mlx_mtp.server.metrics import Metrics
from mlx_mtp.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token that has become text, with its logprobs.

    Args:
        offset: characters of the answer before it.
    """

    token_id: int
    logprobs: TokenLogprobs
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one choice; its last delta has a finish reason."""

    index: int
    text: str
    tokens: tuple[TokenInfo, ...]
    finish_reason: str | None

    @property
    def is_empty(self) -> bool:
        """There is nothing to tell: the text is held back."""
        return not (self.text or self.tokens or self.finish_reason)


class Choice:
    """One sequence: detokenizes it and counts its tokens.

    Tokens are taken singly: text, counts and logprobs don't depend on how many a step brought.
    """

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer) -> None:
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.num_drafts = 0
        self.num_accepted = 0
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._waiting: deque[TokenInfo] = deque()

    def take(self, output: RequestOutput) -> Delta:
        """Take one step's output.

        Raises:
            MlxMtpError: the one that the output carries, or one for logprobs that are no numbers.
        """
        if output.error is not None:
            raise output.error
        if output.finish_reason in ("error", "cancelled"):
            raise EngineError(f"The engine ended a sequence: {output.finish_reason}.")
        _check_logprobs(output.logprobs)
        before = self.num_tokens
        text = ""
        for position, token in enumerate(output.token_ids):
            self.num_tokens += 1
            is_last = position == len(output.token_ids) - 1
            if is_last and output.finish_reason == "stop":
                break  # The token that stopped the sequence counts, but isn't shown.
            if output.logprobs:
                info = TokenInfo(token, output.logprobs[position], self._detokenizer.num_decoded)
                self._waiting.append(info)
            text += self._detokenizer.push(token)
            if self._detokenizer.stopped:
                break
        self.num_drafts += output.num_draft_tokens
        # Drafts come first in a step: where a stop string cut it, some were accepted for nothing.
        self.num_accepted += min(output.num_accepted_tokens, self.num_tokens - before)
        self.finish_reason = "stop" if self._detokenizer.stopped else output.finish_reason
        if self.finish_reason is not None:
            text += self._detokenizer.flush()
            # What was held until now may have completed a stop string after all.
            self.finish_reason = "stop" if self._detokenizer.stopped else self.finish_reason
        return Delta(self.index, text, tuple(self._released_tokens()), self.finish_reason)

    def _released_tokens(self) -> list[TokenInfo]:
        """The tokens whose text has been given out, or will never be more than it is."""
        whole = self.finish_reason is not None and not self._detokenizer.stopped
        released = []
        while self._waiting and (whole or self._waiting[0].offset < self._detokenizer.num_released):
            released.append(self._waiting.popleft())
        return released


class Generation:
    """The choices of one HTTP request, from submission to the last token.

    Use it as a context: on leaving, whatever is unfinished in the engine is cancelled.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: Metrics,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        stops: Sequence[str],
        prompt_tokens: int,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.choices = {
            request.request_id: Choice(i, request, Detokenizer(tokenizer.text_bytes, stops))
            for i, request in enumerate(requests)
        }
        self._metrics = metrics
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
            MlxMtpError: a choice failed, or the engine did.
        """
        while not self.is_finished:
            arrived = await self._inbox.take(patience)
            if not arrived:
                yield []
                continue
            told, failure = self._take_all(arrived)
            if told:
                yield told
            if failure is not None:
                raise failure

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
            return Delta(choice.index, "", (), None)  # Arrived with the step that completed a stop.
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

    def usage(self) -> dict[str, Any]:
        """The counts, in OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def timings(self) -> dict[str, Any]:
        """The times, in llama.cpp's form.

        The prompt's time lasts until the first token, waiting included; the rate of prediction is
        that of the tokens after the first step, whose time is the prompt's.
        """
        first = self._last if self._first is None else self._first
        prompt, predicted = first - self._began, self._last - first
        return {
            "prompt_n": self.prompt_tokens,
            "prompt_ms": prompt * 1e3,
            "prompt_per_second": _rate(self.prompt_tokens, prompt),
            "predicted_n": self.completion_tokens,
            "predicted_ms": predicted * 1e3,
            "predicted_per_second": _rate(self.completion_tokens - self._first_tokens, predicted),
            "draft_n": sum(choice.num_drafts for choice in self.choices.values()),
            "draft_n_accepted": sum(choice.num_accepted for choice in self.choices.values()),
        }


def _check_logprobs(logprobs: Sequence[TokenLogprobs]) -> None:
    for entry in logprobs:
        # Written so that NaN fails it too; an impossible token's -inf is fine.
        if not all(
            value < math.inf for value in (entry.logprob, *(value for _, value in entry.top))
        ):
            raise EngineError(
                "The model computed NaN: its weights are damaged, or its activations overflow the "
                "data type (try --dtype float32)."
            )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
