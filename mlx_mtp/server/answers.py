"""What goes back to clients: the JSON of whole answers and of stream chunks, for both endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_mtp.server.generation import Delta, TokenInfo

# JSON has no infinity; OpenAI's servers write this for an impossible token.
_LEAST_LOGPROB = -9999.0


class TokenNames(Protocol):
    """What naming a token takes: `Tokenizer` has it."""

    def token_text(self, token_id: int) -> str:
        """A token as text."""

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes."""


@dataclass(frozen=True, slots=True)
class Head:
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


class Dialect(Protocol):
    """How one endpoint words its choices."""

    answer_kind: str
    chunk_kind: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that comes before any text; None where there is no such thing."""

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A chunk with text, and never with a finish reason."""

    def closing(self, delta: Delta) -> dict[str, Any]:
        """The chunk with the finish reason, and never with text."""

    def choice(self, delta: Delta) -> dict[str, Any]:
        """The whole choice of an answer that isn't streamed."""


class ChatDialect:
    """/v1/chat/completions."""

    answer_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, names: TokenNames, with_logprobs: bool) -> None:
        self._names = names
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role comes first."""
        return _chat_chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Some text."""
        return _chat_chunk(delta.index, {"content": delta.text}, self._logprobs(delta.tokens), None)

    def closing(self, delta: Delta) -> dict[str, Any]:
        """The reason alone."""
        return _chat_chunk(delta.index, {}, None, delta.finish_reason)

    def choice(self, delta: Delta) -> dict[str, Any]:
        """One message."""
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text},
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = []
        for info in tokens:
            entry = self._candidate(info.token_id, info.logprobs.logprob)
            entry["top_logprobs"] = [self._candidate(*pair) for pair in info.logprobs.top]
            content.append(entry)
        return {"content": content}

    def _candidate(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._names.token_text(token_id),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(self._names.token_bytes(token_id)),
        }


class TextDialect:
    """/v1/completions."""

    answer_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, names: TokenNames, with_logprobs: bool) -> None:
        self._names = names
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        """Text has no role."""
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Some text."""
        return self._choice(delta.index, delta.text, delta.tokens, None)

    def closing(self, delta: Delta) -> dict[str, Any]:
        """The reason alone."""
        return self._choice(delta.index, "", (), delta.finish_reason)

    def choice(self, delta: Delta) -> dict[str, Any]:
        """All of the text."""
        return self._choice(delta.index, delta.text, delta.tokens, delta.finish_reason)

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


def whole(deltas: Iterable[Delta], count: int) -> list[Delta]:
    """All deltas of an answer, joined to one per choice."""
    texts: list[list[str]] = [[] for _ in range(count)]
    tokens: list[list[TokenInfo]] = [[] for _ in range(count)]
    reasons: list[str | None] = [None] * count
    for delta in deltas:
        texts[delta.index].append(delta.text)
        tokens[delta.index].extend(delta.tokens)
        reasons[delta.index] = delta.finish_reason
    return [
        Delta(index, "".join(texts[index]), tuple(tokens[index]), reasons[index])
        for index in range(count)
    ]


def _chat_chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
