"""One sequence of an answer: its tokens become text, and its text becomes events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_mtp.engine.request import RequestOutput, TokenLogprobs
from mlx_mtp.errors import EngineError
from mlx_mtp.server.detokenizer import Detokenizer
from mlx_mtp.server.parsing.answer import AnswerParser
from mlx_mtp.server.parsing.events import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolBroken,
    ToolCut,
    ToolEnd,
    ToolStart,
    merged,
)


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token that has become text, with its logprobs.

    Args:
        offset: characters of the raw answer before it.
        end: characters of the raw answer up to its end.
    """

    token_id: int
    logprobs: TokenLogprobs
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class Content:
    """Some of the answer proper.

    Args:
        text: what is new; empty where tokens have none, as half a character.
        tokens: those that became it, when logprobs were asked for.
        broken_call: the number of the call whose text this is after all.
    """

    text: str
    tokens: tuple[TokenInfo, ...] = ()
    broken_call: int | None = None


Piece = Content | Reasoning | ToolStart | ToolArguments | ToolEnd | ToolCut


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one choice; its last delta has a finish reason.

    Args:
        index: of the choice.
        pieces: in order.
        finish_reason: "stop", "length" or "tool_calls"; None while it goes on.
        stop: the stop string that ended it.
    """

    index: int
    pieces: tuple[Piece, ...]
    finish_reason: str | None = None
    stop: str | None = None

    @property
    def is_empty(self) -> bool:
        """There is nothing to tell: the text is held back."""
        return not self.pieces and self.finish_reason is None


class Choice:
    """One sequence: detokenizes it, parses it and counts its tokens.

    Tokens are taken singly: nothing of what comes out depends on how many a step brought, but for
    the number of pieces that it comes in.

    Args:
        index: among the answer's choices.
        detokenizer: from tokens to text.
        parser: from text to events.
    """

    def __init__(self, index: int, detokenizer: Detokenizer, parser: AnswerParser) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_drafts = 0
        self.num_accepted = 0
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._parser = parser
        self._tokens = _TokenQueue()

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
        events: list[Event] = []
        for position, token in enumerate(output.token_ids):
            is_last = position == len(output.token_ids) - 1
            if is_last and output.finish_reason == "stop":
                self.num_tokens += 1
                break  # The token that stopped the sequence counts, but isn't shown.
            events.extend(self._take(token, output.logprobs[position : position + 1]))
            if self._ended_early:
                break
        self.num_drafts += output.num_draft_tokens
        # Drafts come first in a step: where a stop string cut it, some were accepted for nothing.
        self.num_accepted += min(output.num_accepted_tokens, self.num_tokens - before)
        reason = "stop" if self._ended_early else output.finish_reason
        if reason is None:
            return Delta(self.index, tuple(self._pieces(events)))
        return self._finish(reason, events)

    def _take(self, token: int, logprobs: Sequence[TokenLogprobs]) -> list[Event]:
        self.num_tokens += 1
        offset = self._detokenizer.num_decoded
        text = self._detokenizer.push(token)
        if logprobs:
            end = self._detokenizer.num_decoded
            self._tokens.add(TokenInfo(token, logprobs[0], offset, end))
        was_reasoning = self._parser.in_reasoning
        events = self._parser.feed(text)
        self.num_reasoning_tokens += was_reasoning or self._parser.in_reasoning
        return events

    @property
    def _ended_early(self) -> bool:
        """The engine would go on, but nothing more is wanted."""
        return self._detokenizer.stopped or self._parser.done

    def _finish(self, reason: str, events: list[Event]) -> Delta:
        events.extend(self._parser.feed(self._detokenizer.flush()))
        events.extend(self._parser.finish())
        if self._detokenizer.stopped:
            reason = "stop"  # What was held until now has completed a stop string after all.
        # Half a call is not to be acted on, nor is what comes before it as if that were all.
        is_cut = any(isinstance(event, ToolCut) for event in events)
        if reason == "stop" and self._parser.num_calls and not is_cut:
            reason = "tool_calls"
        self.finish_reason = reason
        pieces = [*self._pieces(events), *self._rest()]
        return Delta(self.index, tuple(pieces), reason, self._detokenizer.stop)

    def _pieces(self, events: Iterable[Event]) -> Iterable[Piece]:
        for event in merged(events):  # A step's tokens are told at once.
            if isinstance(event, Text):
                yield Content(event.text, self._tokens.of(event.start, event.text))
            elif isinstance(event, ToolBroken):
                tokens = self._tokens.of(event.start, event.text)
                yield Content(event.text, tokens, broken_call=event.call)
            else:
                self._tokens.skip()
                yield event

    def _rest(self) -> Iterable[Piece]:
        """Tokens without any text of their own, at the end of the answer proper."""
        if not self._detokenizer.stopped:
            tokens = self._tokens.rest()
            if tokens:
                yield Content("", tokens)


class _TokenQueue:
    """Tokens that wait for their text to be told as content."""

    def __init__(self) -> None:
        self._waiting: deque[TokenInfo] = deque()
        self._told = 0
        self._in_content = True

    def add(self, token: TokenInfo) -> None:
        """A token, in order."""
        self._waiting.append(token)

    def of(self, start: int, text: str) -> tuple[TokenInfo, ...]:
        """The tokens of a piece of content; those before it are no content."""
        while self._waiting and self._waiting[0].offset < start >= self._waiting[0].end:
            self._waiting.popleft()
        end = start + len(text)
        found = []
        while self._waiting and self._waiting[0].offset < end:
            found.append(self._waiting.popleft())
        self._told, self._in_content = end, True
        return tuple(found)

    def skip(self) -> None:
        """What is told now is reasoning, or part of a call."""
        self._in_content = False

    def rest(self) -> tuple[TokenInfo, ...]:
        """Those that are left when all is told."""
        if not self._in_content:
            return ()
        return tuple(token for token in self._waiting if token.offset >= self._told)


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
