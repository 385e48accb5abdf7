"""OpenAI's routes for chats and completions, and the form of their answers."""

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp import __version__
from mlx_mtp.server.api.openai.protocol import ChatRequest, CompletionRequest, OpenAIRequest
from mlx_mtp.server.api.openai.tokens import (
    OutputTokens,
    Trace,
    completion_logprobs,
    logprob_entries,
    prompt_logprobs,
)
from mlx_mtp.server.api.stored import keeper
from mlx_mtp.server.generation.generation import Generation
from mlx_mtp.server.generation.job import Job, admit
from mlx_mtp.server.generation.writer import Block, BlockKind, Content, Writer, event, respond
from mlx_mtp.server.http.errors import error_body
from mlx_mtp.text.stream import Delta


class _OpenAIWriter(Writer):
    done = b"data: [DONE]\n\n"
    answer_kind: str
    chunk_kind: str
    chunk_key: str  # the key of the content in a chunk's choice
    empty: ClassVar[Any]  # content of a choice's last chunk, which has the finish reason
    body: OpenAIRequest

    def __init__(self, job: Job[Any], generation: Generation) -> None:
        super().__init__(job, generation)
        body = self.body
        self.record = not body.stream or getattr(body, "store", False)
        self._shared = {
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": f"mlx-mtp-{__version__}",
            "seed": job.params.seed,
        }
        self._num_choices = job.options.n
        self.slow = job.params.prompt_logprobs is not None
        self._num_sent: Counter[int] = Counter()  # token ids in chunks so far, by choice
        self._traces = [
            Trace(self.tokenizer.token_bytes, stream.steps) if body.mtp.trace else None
            for stream in generation.streams
        ]

    def prompt_progress(self, choice: int, fields: Mapping[str, int]) -> list[bytes]:
        empty = {"index": choice, self.chunk_key: self.empty, "logprobs": None}
        more = {"usage": None} if self.body.stream_options.include_usage else {}
        choices = [empty | {"finish_reason": None}]
        return [event(self._fields(self.chunk_kind, choices, **more, prompt_progress=fields))]

    def choice_end(self, delta: Delta) -> list[bytes]:
        return [self.chunk(delta.index, self.empty, None, delta.finish_reason)]

    def ending(self) -> list[bytes]:
        if not self.body.stream_options.include_usage:
            return []
        return [event(self._fields(self.chunk_kind, [], **self._costs()))]

    def failure(self, error: Exception) -> list[bytes]:
        return [event(error_body(error))]

    def whole(self) -> dict[str, Any]:
        choices = []
        for stream in self.generation.streams:
            blocks = self.whole_blocks(stream.index)
            tokens = [token for block in blocks for token in block.tokens]
            content = self.content(blocks)
            if self.body.return_token_ids:
                content["token_ids"] = stream.token_ids
            choices.append(self._choice(stream.index, tokens, stream.finish_reason, **content))
        return self._fields(self.answer_kind, choices, **self.prompt_ids(), **self._costs())

    def prompt_ids(self) -> dict[str, Any]:
        return {}

    @abstractmethod
    def content(self, blocks: Sequence[Block]) -> dict[str, Any]: ...

    @abstractmethod
    def logprobs(self, tokens: OutputTokens | None) -> dict[str, Any] | None: ...

    def prompt_logprobs(self, index: int) -> dict[str, Any]:
        """Returns the logprobs of a choice's prompt, {} if they weren't asked for.

        They are read from the first choice of the same prompt, which always has them.
        """
        most = self.body.prompt_logprobs
        if most is None:
            return {}
        first = index - index % self._num_choices
        token_ids = self.generation.requests[first].prompt_token_ids
        entries = self.generation.streams[first].prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(self.tokenizer, token_ids, entries, most)}

    def _choice(
        self, index: int, tokens: OutputTokens | None, reason: str | None, **content: Any
    ) -> dict[str, Any]:
        logprobs = self.logprobs(tokens) if self.with_logprobs else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def chunk(
        self,
        index: int,
        content: Any,
        tokens: OutputTokens | None = None,
        reason: str | None = None,
        **more: Any,
    ) -> bytes:
        # The usage comes last. Until then each chunk has null, or the usage so far.
        options = self.body.stream_options
        if options.include_usage:
            more["usage"] = _usage(self.generation) if options.continuous_usage_stats else None
        if reason is not None and self.generation.is_finished:
            more["timings"] = self.generation.timings()
        choice = self._choice(index, tokens, reason, **{self.chunk_key: content})
        if self.body.return_token_ids and not self.prompt_ids().keys() & more.keys():
            ids, sent = self.generation.streams[index].token_ids, self._num_sent[index]
            choice["token_ids"], self._num_sent[index] = ids[sent:], len(ids)
        trace = self._traces[index]
        if trace is not None and (steps := trace.take()):
            choice["mtp"] = {"trace": steps}
        return event(self._fields(self.chunk_kind, [choice], **more))

    def _fields(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, **self._shared, "choices": choices, **more}

    def _costs(self) -> dict[str, Any]:
        return {"usage": _usage(self.generation), "timings": self.generation.timings()}


class ChatWriter(_OpenAIWriter):
    """Formats an answer of /v1/chat/completions."""

    answer_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    chunk_key = "delta"
    empty: ClassVar[Any] = {}
    prefixes: ClassVar[dict[BlockKind, str]] = {"call": "call_"}
    body: ChatRequest

    def opening(self) -> list[bytes]:
        message = {"role": "assistant", "content": ""}
        streams = self.generation.streams
        return [self.chunk(stream.index, message, **self.prompt_ids()) for stream in streams]

    def prompt_ids(self) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self.generation.requests[0].prompt_token_ids}

    def block_start(self, block: Block) -> list[bytes]:
        if block.kind != "call":
            return []
        call = {"index": block.number, **_call(block)}
        return [self.chunk(block.choice, {"tool_calls": [call]})]

    def block_delta(self, block: Block, content: Content) -> list[bytes]:
        text = content.text
        delta: dict[str, Any] = {"content": text}
        if block.kind == "reasoning":
            if self.body.hides_reasoning:
                return []
            delta = {"reasoning_content": text}
        elif block.kind == "call":
            delta = {"tool_calls": [{"index": block.number, "function": {"arguments": text}}]}
        return [self.chunk(block.choice, delta, getattr(content, "tokens", None))]

    def content(self, blocks: Sequence[Block]) -> dict[str, Any]:
        text = "".join(block.text for block in blocks if block.kind == "text")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if any(block.kind == "reasoning" for block in blocks) and not self.body.hides_reasoning:
            thoughts = (block.text for block in blocks if block.kind == "reasoning")
            message["reasoning_content"] = "".join(thoughts)
        if any(block.kind == "call" for block in blocks):
            message["content"] = text or None
            message["tool_calls"] = [_call(block) for block in blocks if block.kind == "call"]
        return {"message": message}

    def whole(self) -> dict[str, Any]:
        return super().whole() | self.prompt_logprobs(0)

    def logprobs(self, tokens: OutputTokens | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {"content": logprob_entries(self.tokenizer, tokens), "refusal": None}


class _CompletionWriter(_OpenAIWriter):
    answer_kind = chunk_kind = "text_completion"
    chunk_key = "text"
    empty = ""

    def _choice(
        self, index: int, tokens: OutputTokens | None, reason: str | None, **content: Any
    ) -> dict[str, Any]:
        if self.body.return_token_ids and not self._num_sent[index]:
            content["prompt_token_ids"] = self.generation.requests[index].prompt_token_ids
        return super()._choice(index, tokens, reason, **content)

    def block_delta(self, block: Block, content: Content) -> list[bytes]:
        return [self.chunk(block.choice, content.text, getattr(content, "tokens", None))]

    def content(self, blocks: Sequence[Block]) -> dict[str, Any]:
        return {"text": "".join(block.text for block in blocks)}

    def logprobs(self, tokens: OutputTokens | None) -> dict[str, Any]:
        return completion_logprobs(self.tokenizer, tokens or (), self.params.top_logprobs or 0)

    def whole(self) -> dict[str, Any]:
        answer = super().whole()
        for choice in answer["choices"]:
            choice.update(self.prompt_logprobs(choice["index"]))
        return answer


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


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    job = await admit(request, ChatRequest, "chatcmpl-")
    body, name = job.body, job.answer_id
    keep = None
    if body.store:
        messages = partial(body.listed_messages, name)
        keep = await keeper(request, True, body.metadata, messages)
    generation = await job.chat(body.conversation())
    return await respond(request, ChatWriter(job, generation), keep)


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    job = await admit(request, CompletionRequest, "cmpl-")
    body = job.body
    generation = await job.complete(body.prompt, body.guided(), body.suffix)
    return await respond(request, _CompletionWriter(job, generation))
