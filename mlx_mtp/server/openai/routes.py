"""OpenAI's routes for chats and plain completions: whole answers and the chunks of streams."""

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp import __version__
from mlx_mtp.server.generate import Admitted, admit
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.http_errors import error_body
from mlx_mtp.server.openai.wire import ChatRequest, CompletionRequest, GenerateRequest
from mlx_mtp.server.output_stream import Delta
from mlx_mtp.server.parsing.events import OutputToken
from mlx_mtp.server.sse import respond
from mlx_mtp.server.stored import keeper
from mlx_mtp.server.tokenizer import Tokenizer
from mlx_mtp.server.writer import Block, Content, Kind, Writer, event

_LEAST_LOGPROB = -9999.0  # OpenAI's, for an impossible token: JSON has no infinity
Tokens = Sequence[OutputToken]


class _OpenAIWriter(Writer):
    done = b"data: [DONE]\n\n"
    answer_kind: str
    chunk_kind: str
    chunk_key: str  # of the content in the choice of a chunk
    empty: ClassVar[Any]  # content of a choice's last chunk, which has the finish reason alone

    def __init__(self, admitted: Admitted[Any], generation: Generation) -> None:
        super().__init__(admitted.answer_id, generation)
        body: GenerateRequest = admitted.body
        self.record = not body.stream or getattr(body, "store", False)
        self._shared = {
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": f"mlx-mtp-{__version__}",
            "seed": admitted.params.seed,
        }
        self._tokenizer = admitted.context.tokenizer
        self._with_logprobs = admitted.params.top_logprobs is not None
        self._options = body.stream_options

    def finish(self, delta: Delta) -> Iterable[bytes]:
        yield self.chunk(delta.index, self.empty, None, delta.finish_reason)

    def ending(self) -> Iterable[bytes]:
        if self._options.include_usage:
            yield event(self._fields(self.chunk_kind, [], **self._costs()))

    def failure(self, error: Exception) -> Iterable[bytes]:
        yield event(error_body(error))

    def whole(self) -> dict[str, Any]:
        choices = []
        for stream in self.generation.streams:
            blocks = self.whole_blocks(stream.index)
            tokens = [token for block in blocks for token in block.tokens]
            content = self.content(blocks)
            choices.append(self._choice(stream.index, tokens, stream.finish_reason, **content))
        return self._fields(self.answer_kind, choices, **self._costs())

    @abstractmethod
    def content(self, blocks: Sequence[Block]) -> dict[str, Any]: ...

    @abstractmethod
    def logprobs(self, tokens: Tokens | None) -> dict[str, Any] | None: ...

    def _choice(
        self, index: int, tokens: Tokens | None, reason: str | None, **content: Any
    ) -> dict[str, Any]:
        logprobs = self.logprobs(tokens) if self._with_logprobs else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def chunk(
        self, index: int, content: Any, tokens: Tokens | None = None, reason: str | None = None
    ) -> bytes:
        more: dict[str, Any] = {}
        # All chunks have a null in the place of the usage, which comes last, or the usage so far.
        if self._options.include_usage:
            so_far = _usage(self.generation) if self._options.continuous_usage_stats else None
            more["usage"] = so_far
        if reason is not None and self.generation.is_finished:
            more["timings"] = self.generation.timings()
        choice = self._choice(index, tokens, reason, **{self.chunk_key: content})
        return event(self._fields(self.chunk_kind, [choice], **more))

    def _fields(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, **self._shared, "choices": choices, **more}

    def _costs(self) -> dict[str, Any]:
        return {"usage": _usage(self.generation), "timings": self.generation.timings()}


class ChatWriter(_OpenAIWriter):
    """/v1/chat/completions."""

    answer_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    chunk_key = "delta"
    empty: ClassVar[Any] = {}
    prefixes: ClassVar[dict[Kind, str]] = {"call": "call_"}

    def opening(self) -> Iterable[bytes]:
        for stream in self.generation.streams:
            yield self.chunk(stream.index, {"role": "assistant", "content": ""})

    def start(self, block: Block) -> Iterable[bytes]:
        if block.kind == "call":
            call = {"index": block.number, **_call(block)}
            yield self.chunk(block.choice, {"tool_calls": [call]})

    def add(self, block: Block, content: Content) -> Iterable[bytes]:
        text = content.text
        found: dict[str, Any] = {"content": text}
        if block.kind == "reasoning":
            found = {"reasoning_content": text}
        elif block.kind == "call":
            found = {"tool_calls": [{"index": block.number, "function": {"arguments": text}}]}
        yield self.chunk(block.choice, found, getattr(content, "tokens", None))

    def content(self, blocks: Sequence[Block]) -> dict[str, Any]:
        text = "".join(block.text for block in blocks if block.kind == "text")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if any(block.kind == "reasoning" for block in blocks):
            thoughts = (block.text for block in blocks if block.kind == "reasoning")
            message["reasoning_content"] = "".join(thoughts)
        if any(block.kind == "call" for block in blocks):
            message["content"] = text or None
            message["tool_calls"] = [_call(block) for block in blocks if block.kind == "call"]
        return {"message": message}

    def logprobs(self, tokens: Tokens | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {"content": logprob_entries(self._tokenizer, tokens), "refusal": None}


class _TextWriter(_OpenAIWriter):
    answer_kind = chunk_kind = "text_completion"
    chunk_key = "text"
    empty = ""

    def add(self, block: Block, content: Content) -> Iterable[bytes]:
        yield self.chunk(block.choice, content.text, getattr(content, "tokens", None))

    def content(self, blocks: Sequence[Block]) -> dict[str, Any]:
        return {"text": "".join(block.text for block in blocks)}

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
        text, content = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(content)}

    entries = []
    for token in tokens:
        top = [candidate(*pair) for pair in token.logprobs.top]
        entries.append(candidate(token.token_id, token.logprobs.logprob) | {"top_logprobs": top})
    return entries


def _usage(generation: Generation) -> dict[str, Any]:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
    }


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.text}
    return {"id": block.id, "type": "function", "function": function}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    admitted = await admit(request, ChatRequest, "chatcmpl-")
    body = admitted.body
    keep = None
    if body.store:
        name = admitted.answer_id
        keep = await keeper(request, body.metadata, lambda: body.listed_messages(name))
    generation = await admitted.chat(body.conversation())
    return await respond(request, ChatWriter(admitted, generation), body.stream, keep)


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    admitted = await admit(request, CompletionRequest, "cmpl-")
    generation = await admitted.complete(admitted.body.prompt, admitted.body.guided())
    return await respond(request, _TextWriter(admitted, generation), admitted.body.stream)
