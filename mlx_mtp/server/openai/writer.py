"""The JSON of whole answers and of stream chunks, for chats and for plain completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_mtp.server.choice import Content, Delta, Piece, TokenInfo
from mlx_mtp.server.generation import Generation, Usage
from mlx_mtp.server.http_errors import error_body
from mlx_mtp.server.parsing.events import Reasoning, ToolArguments, ToolStart
from mlx_mtp.server.whole import Answer
from mlx_mtp.server.writer import COMMENT, event, new_id

# JSON has no infinity; OpenAI's servers write this for an impossible token.
_LEAST_LOGPROB = -9999.0


class TokenNames(Protocol):
    """What naming a token takes: `Tokenizer` has it."""

    def token_text(self, token_id: int) -> str:
        """A token as text."""

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What an answer and all of its chunks have in common."""

    request_id: str
    created: int
    model: str
    seed: int
    fingerprint: str

    def fields(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The JSON object around `choices`."""
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "seed": self.seed,
            "choices": list(choices),
        }


class OpenAIWriter(ABC):
    """What chats and completions have in common.

    Args:
        envelope: of the answer.
        names: names tokens, for logprobs.
        with_logprobs: they were asked for.
        include_usage: a usage chunk ends the stream, and the others have a null in its place.
        continuous_usage: they have the usage so far instead.
    """

    answer_kind: str
    chunk_kind: str
    keep_alive = COMMENT
    done = b"data: [DONE]\n\n"

    def __init__(
        self,
        envelope: Envelope,
        names: TokenNames,
        *,
        with_logprobs: bool,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._envelope = envelope
        self._names = names
        self._with_logprobs = with_logprobs
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._call_ids: dict[tuple[int, int], str] = {}

    @property
    def request_id(self) -> str:
        """The answer's name."""
        return self._envelope.request_id

    def opening(self, generation: Generation) -> Iterable[bytes]:
        """The role, where there is such a thing, of each choice."""
        for index in range(len(generation.choices)):
            first = self.first_choice(index)
            if first is not None:
                yield self._chunk(generation, first)

    def delta(self, delta: Delta, generation: Generation) -> Iterable[bytes]:
        """A chunk for each piece; then one with the finish reason alone."""
        for piece in delta.pieces:
            choice = self.piece_choice(delta.index, piece)
            if choice is not None:
                yield self._chunk(generation, choice)
        if delta.finish_reason is not None:
            last = self.last_choice(delta.index, delta.finish_reason)
            more = {"timings": generation.timings()} if generation.is_finished else {}
            yield self._chunk(generation, last, **more)

    def ending(self, generation: Generation) -> Iterable[bytes]:
        """The usage, if the client wants it."""
        if self._include_usage:
            fields = self._envelope.fields(self.chunk_kind, [])
            usage = usage_fields(generation.usage())
            yield event(fields | {"usage": usage, "timings": generation.timings()})

    def failure(self, error: Exception) -> Iterable[bytes]:
        """The error, as its HTTP answer would have had it."""
        yield event(error_body(error))

    def whole(self, answers: Sequence[Answer], generation: Generation) -> dict[str, Any]:
        """All choices, usage and timings."""
        fields = self._envelope.fields(self.answer_kind, [self.whole_choice(a) for a in answers])
        usage = usage_fields(generation.usage())
        return fields | {"usage": usage, "timings": generation.timings()}

    @abstractmethod
    def first_choice(self, index: int) -> dict[str, Any] | None:
        """What comes before any text; None where there is no such thing."""

    @abstractmethod
    def piece_choice(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """A piece; None: there is nothing to tell of it."""

    @abstractmethod
    def last_choice(self, index: int, reason: str) -> dict[str, Any]:
        """The finish reason, and never any text."""

    @abstractmethod
    def whole_choice(self, answer: Answer) -> dict[str, Any]:
        """The whole choice of an answer that isn't streamed."""

    def _chunk(self, generation: Generation, choice: dict[str, Any], **more: object) -> bytes:
        fields = self._envelope.fields(self.chunk_kind, [choice])
        if self._include_usage:
            so_far = usage_fields(generation.usage()) if self._continuous_usage else None
            fields["usage"] = so_far
        return event(fields | more)


class ChatWriter(OpenAIWriter):
    """/v1/chat/completions."""

    answer_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """The role comes first."""
        return self._choice(index, {"role": "assistant", "content": ""})

    def piece_choice(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """Some text, some reasoning, a call's name, or some of its arguments."""
        if isinstance(piece, Content):
            return self._choice(index, {"content": piece.text}, self._logprobs(piece.tokens))
        if isinstance(piece, Reasoning):
            return self._choice(index, {"reasoning_content": piece.text})
        if isinstance(piece, ToolStart):
            call = {"index": piece.call, **self._call(index, piece.call, piece.name, "")}
            return self._choice(index, {"tool_calls": [call]})
        if isinstance(piece, ToolArguments):
            call = {"index": piece.call, "function": {"arguments": piece.text}}
            return self._choice(index, {"tool_calls": [call]})
        return None

    def last_choice(self, index: int, reason: str) -> dict[str, Any]:
        """The reason alone."""
        return self._choice(index, {}, reason=reason)

    def whole_choice(self, answer: Answer) -> dict[str, Any]:
        """One message; its content is null if all that it has is calls."""
        calls = answer.calls
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                self._call(answer.index, call.call, call.name, call.arguments) for call in calls
            ]
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": answer.finish_reason,
        }

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _call(self, index: int, call: int, name: str, arguments: str) -> dict[str, Any]:
        # An answer that is streamed and then stored has the same ids in both.
        call_id = self._call_ids.setdefault((index, call), new_id("call"))
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {"content": logprob_entries(self._names, tokens), "refusal": None}


class TextWriter(OpenAIWriter):
    """/v1/completions."""

    answer_kind = "text_completion"
    chunk_kind = "text_completion"

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """Text has no role."""
        return None

    def piece_choice(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """Some text: nothing else is looked for in it."""
        assert isinstance(piece, Content), "plain text has no other pieces"
        return self._choice(index, piece.text, piece.tokens, None)

    def last_choice(self, index: int, reason: str) -> dict[str, Any]:
        """The reason alone."""
        return self._choice(index, "", (), reason)

    def whole_choice(self, answer: Answer) -> dict[str, Any]:
        """All of the text."""
        return self._choice(answer.index, answer.text, answer.tokens, answer.finish_reason)

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenInfo], reason: str | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self._with_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        name = self._names.token_text
        return {
            "tokens": [name(info.token_id) for info in tokens],
            "token_logprobs": [max(info.logprobs.logprob, _LEAST_LOGPROB) for info in tokens],
            "top_logprobs": [
                # The token that was taken is always among them, as OpenAI has it.
                {
                    name(token): max(value, _LEAST_LOGPROB)
                    for token, value in (*info.logprobs.top, (info.token_id, info.logprobs.logprob))
                }
                for info in tokens
            ],
            "text_offset": [info.offset for info in tokens],
        }


def logprob_entries(names: TokenNames, tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
    """The logprobs of some tokens, each with its alternatives."""

    def candidate(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": names.token_text(token_id),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(names.token_bytes(token_id)),
        }

    return [
        {
            **candidate(info.token_id, info.logprobs.logprob),
            "top_logprobs": [candidate(*pair) for pair in info.logprobs.top],
        }
        for info in tokens
    ]


def usage_fields(usage: Usage) -> dict[str, Any]:
    """The counts in OpenAI's form."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
