"""OpenAI's routes. Each reads as its steps: body, checks, prompt, generation, answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp.errors import UnsupportedParameterError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.body import read_body
from mlx_mtp.server.context import Context, answer_id
from mlx_mtp.server.openai.stored import StoredChat, StoringWriter, packed_json
from mlx_mtp.server.openai.wire import ChatRequest, CompletionRequest, GenerateRequest
from mlx_mtp.server.openai.writer import ChatWriter, Envelope, OpenAIWriter, TextWriter
from mlx_mtp.server.respond import admit, context_of, respond, stored_of

W = TypeVar("W", bound=OpenAIWriter)


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    context = context_of(request)
    body = await read_body(request, ChatRequest, context.config.max_body_bytes)
    options, params = admit(request, body)
    writer = _writer(ChatWriter, context, body, params, answer_id("chatcmpl"))
    storing = await _storing(writer, request, body) if body.store else writer
    generation = await context.chat(writer.request_id, body.conversation(), options, params)
    return await respond(request, generation, storing, stream=body.stream)


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    context = context_of(request)
    body = await read_body(request, CompletionRequest, context.config.max_body_bytes)
    options, params = admit(request, body)
    writer = _writer(TextWriter, context, body, params, answer_id("cmpl"))
    generation = await context.complete(
        writer.request_id, body.prompts, options, params, body.guided()
    )
    return await respond(request, generation, writer, stream=body.stream)


async def _storing(writer: ChatWriter, request: Request, body: ChatRequest) -> StoringWriter:
    """The same writer, whose answer is kept with what was asked.

    Raises:
        UnsupportedParameterError: this server keeps none.
    """
    if not context_of(request).config.max_stored_completions:
        raise UnsupportedParameterError(
            "store: this server keeps no completions (--max-stored-completions 0).", param="store"
        )

    def pack() -> tuple[bytes, ...]:
        asked = (message.model_dump(exclude_none=True) for message in body.messages)
        named = ({"id": f"{writer.request_id}-{n}", **m} for n, m in enumerate(asked))
        return tuple(map(packed_json, named))

    messages = await asyncio.to_thread(pack)
    kept = stored_of(request)

    def keep(completion: dict[str, Any]) -> None:
        kept.keep(StoredChat.of(completion, body.metadata or {}, messages))

    return StoringWriter(writer, keep)


def _writer(
    kind: type[W],
    context: Context,
    body: GenerateRequest,
    params: SamplingParams,
    request_id: str,
) -> W:
    envelope = Envelope(
        request_id=request_id,
        created=int(time.time()),
        model=context.config.model_name,
        seed=params.seed,
        fingerprint=context.fingerprint,
    )
    return kind(
        envelope,
        context.tokenizer,
        with_logprobs=params.top_logprobs is not None,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
