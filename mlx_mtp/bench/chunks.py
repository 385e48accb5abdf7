"""The part of a streamed chat completion that is measured; whatever else it holds is skipped."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from mlx_mtp.errors import BenchError


class _Function(BaseModel):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(BaseModel):
    function: _Function | None = None


class _Delta(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None

    @property
    def text(self) -> str:
        calls = [call.function for call in self.tool_calls or [] if call.function is not None]
        parts = [self.reasoning_content, self.reasoning, self.content]
        parts += [part for call in calls for part in (call.name, call.arguments)]
        return "".join(part for part in parts if part)


class _Choice(BaseModel):
    delta: _Delta | None = None
    finish_reason: str | None = None


class Usage(BaseModel):
    """Tokens, as OpenAI counts them."""

    completion_tokens: int
    prompt_tokens: int | None = None


class Timings(BaseModel):
    """Of llama.cpp's: the drafts."""

    draft_n: int = 0
    draft_n_accepted: int = 0


class Chunk(BaseModel):
    """One event of the stream."""

    choices: list[_Choice] | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """All that the model wrote in it: answer, reasoning and calls."""
        return "".join(choice.delta.text for choice in self.choices or [] if choice.delta)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended, if it did."""
        return next((c.finish_reason for c in self.choices or [] if c.finish_reason), None)


def parse_chunk(data: str) -> Chunk:
    """Read an event.

    Raises:
        BenchError: it is an error of the server's, or no chunk.
    """
    try:
        chunk = Chunk.model_validate_json(data)
    except ValidationError:
        raise BenchError(
            f"the stream has {data[:60]!r}, which is not a chat completion chunk."
        ) from None
    if chunk.error is not None:
        error = chunk.error
        told = error.get("message", error) if isinstance(error, dict) else error
        raise BenchError(f"an answer ended with the error: {str(told)[:300]}")
    return chunk
