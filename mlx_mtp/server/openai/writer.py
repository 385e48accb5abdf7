"""The JSON of whole answers and of stream chunks, for chats and for plain completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from mlx_mtp.server.generation import Generation
from mlx_mtp.server.http_errors import error_body
from mlx_mtp.server.output_stream import Delta
from mlx_mtp.server.parsing import events
from mlx_mtp.server.tokenizer import Tokenizer
from mlx_mtp.server.writer import Writer, event, new_id

# JSON has no infinity; OpenAI's servers write this for an impossible token.
_LEAST_LOGPROB = -9999.0
Tokens = Sequence[events.OutputToken]


class OpenAIWriter(Writer):
    """What chats and completions have in common.

    Args:
        answer_id: the answer's.
        shared: fields of the answer and of all of its chunks.
        tokenizer: names tokens, for logprobs.
        with_logprobs: they were asked for.
        include_usage: a usage chunk ends the stream, and the others have a null in its place.
        continuous_usage: they have the usage so far instead.

    Attributes:
        chunk_key: names the content in the choice of a chunk.
        empty: the content of a choice's last chunk, which has the finish reason alone.
    """

    done = b"data: [DONE]\n\n"
    answer_kind: str
    chunk_kind: str
    chunk_key: str
    empty: ClassVar[Any]

    def __init__(
        self,
        answer_id: str,
        shared: dict[str, Any],
        tokenizer: Tokenizer,
        *,
        with_logprobs: bool,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        super().__init__(answer_id)
        self._shared = shared
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._call_ids: dict[tuple[int, int], str] = {}

    def opening(self, generation: Generation) -> Iterable[bytes]:
        return ()

    def delta(self, delta: Delta, generation: Generation) -> Iterable[bytes]:
        for found in delta.events:
            content = self.content(delta.index, found)
            if content is not None:
                tokens = getattr(found, "tokens", None)
                yield self.chunk(generation, self.choice(delta.index, content, tokens))
        if delta.finish_reason is not None:
            last = self.choice(delta.index, self.empty, None, delta.finish_reason)
            more = {"timings": generation.timings()} if generation.is_finished else {}
            yield self.chunk(generation, last, **more)

    def ending(self, generation: Generation) -> Iterable[bytes]:
        if self._include_usage:
            yield event(self._fields(self.chunk_kind, [], **_costs(generation)))

    def failure(self, error: Exception) -> Iterable[bytes]:
        yield event(error_body(error))

    def whole(self, answers: Sequence[Delta], generation: Generation) -> dict[str, Any]:
        choices = [self.whole_choice(answer) for answer in answers]
        return self._fields(self.answer_kind, choices, **_costs(generation))

    @abstractmethod
    def content(self, index: int, found: events.Event) -> Any:
        """What an event brings to the choice of this index; None for nothing."""

    @abstractmethod
    def whole_choice(self, answer: Delta) -> dict[str, Any]:
        """The choice of an answer that isn't streamed."""

    @abstractmethod
    def logprobs(self, tokens: Tokens | None) -> dict[str, Any] | None:
        """The logprobs of some tokens; None: of something that is no text."""

    def choice(
        self,
        index: int,
        content: Any,
        tokens: Tokens | None = None,
        reason: str | None = None,
        key: str | None = None,
    ) -> dict[str, Any]:
        logprobs = self.logprobs(tokens) if self._with_logprobs else None
        content = {key or self.chunk_key: content}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def chunk(self, generation: Generation, choice: dict[str, Any], **more: Any) -> bytes:
        if self._include_usage:
            so_far = usage_fields(generation) if self._continuous_usage else None
            more = {"usage": so_far, **more}
        return event(self._fields(self.chunk_kind, [choice], **more))

    def _fields(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": kind}
        return {**head, **self._shared, "choices": choices, **more}


class ChatWriter(OpenAIWriter):
    """/v1/chat/completions."""

    answer_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    chunk_key = "delta"
    empty: ClassVar[Any] = {}

    def opening(self, generation: Generation) -> Iterable[bytes]:
        for stream in generation.streams:
            role = {"role": "assistant", "content": ""}
            yield self.chunk(generation, self.choice(stream.index, role))

    def content(self, index: int, found: events.Event) -> dict[str, Any] | None:
        match found:
            case events.Text() | events.ToolBroken():
                return {"content": found.text}
            case events.Reasoning():
                return {"reasoning_content": found.text}
            case events.ToolStart():
                call = self._call(index, found.call, found.name, "")
                return {"tool_calls": [{"index": found.call, **call}]}
            case events.ToolArguments():
                function = {"arguments": found.text}
                return {"tool_calls": [{"index": found.call, "function": function}]}
        return None

    def whole_choice(self, answer: Delta) -> dict[str, Any]:
        """One message; its content is null if all that it has is calls."""
        text, tokens = _text_of(answer)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        for found in answer.events:
            if isinstance(found, events.Reasoning):
                before = message.get("reasoning_content", "")
                message["reasoning_content"] = before + found.text
            elif isinstance(found, events.ToolStart):
                message["content"] = text or None
                call = self._call(answer.index, found.call, found.name, "")
                message.setdefault("tool_calls", []).append(call)
            elif isinstance(found, events.ToolArguments):
                message["tool_calls"][-1]["function"]["arguments"] = found.text
        return self.choice(answer.index, message, tokens, answer.finish_reason, key="message")

    def logprobs(self, tokens: Tokens | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {"content": logprob_entries(self._tokenizer, tokens), "refusal": None}

    def _call(self, index: int, call: int, name: str, arguments: str) -> dict[str, Any]:
        # An answer that is streamed and then stored has the same ids in both.
        call_id = self._call_ids.setdefault((index, call), new_id("call"))
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}


class TextWriter(OpenAIWriter):
    """/v1/completions."""

    answer_kind = chunk_kind = "text_completion"
    chunk_key = "text"
    empty = ""

    def content(self, index: int, found: events.Event) -> str:
        assert isinstance(found, events.Text), "nothing else is looked for in plain text"
        return found.text

    def whole_choice(self, answer: Delta) -> dict[str, Any]:
        return self.choice(answer.index, *_text_of(answer), answer.finish_reason)

    def logprobs(self, tokens: Tokens | None) -> dict[str, Any]:
        name = self._tokenizer.token_text
        tokens = tokens or ()
        taken = [(token.token_id, _finite(token.logprobs.logprob)) for token in tokens]
        return {
            "tokens": [name(token_id) for token_id, _ in taken],
            "token_logprobs": [logprob for _, logprob in taken],
            # The token that was taken is always among them, as OpenAI has it.
            "top_logprobs": [
                {name(other): _finite(value) for other, value in (*token.logprobs.top, pair)}
                for token, pair in zip(tokens, taken)
            ],
            "text_offset": [token.start for token in tokens],
        }


def logprob_entries(tokenizer: Tokenizer, tokens: Tokens) -> list[dict[str, Any]]:
    """The logprobs of some tokens, each with its alternatives."""

    def candidate(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return [
        {
            **candidate(token.token_id, token.logprobs.logprob),
            "top_logprobs": [candidate(*pair) for pair in token.logprobs.top],
        }
        for token in tokens
    ]


def _text_of(answer: Delta) -> tuple[str, list[events.OutputToken]]:
    texts = [found for found in answer.events if isinstance(found, events.Text)]
    return "".join(t.text for t in texts), [token for t in texts for token in t.tokens]


def usage_fields(generation: Generation) -> dict[str, Any]:
    """The counts in OpenAI's form."""
    usage = generation.usage()
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _costs(generation: Generation) -> dict[str, Any]:
    return {"usage": usage_fields(generation), "timings": generation.timings()}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
