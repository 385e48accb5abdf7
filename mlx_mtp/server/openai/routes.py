"""OpenAI's routes. Each reads as its steps: body, checks, prompt, generation, answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp import __version__
from mlx_mtp.errors import UnsupportedParameterError
from mlx_mtp.server.context import context_of, read
from mlx_mtp.server.generate import Admitted, admit, respond
from mlx_mtp.server.openai.stored import StoredChat
from mlx_mtp.server.openai.wire import ChatRequest, CompletionRequest, GenerateRequest
from mlx_mtp.server.openai.writer import ChatWriter, TextWriter
from mlx_mtp.server.sse import Keep
from mlx_mtp.server.writer import packed_json


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    context, body = await read(request, ChatRequest)
    admitted = admit(context, request, body)
    writer = ChatWriter(**_settings("chatcmpl", admitted, body))
    keep = await _keep(request, body, writer.answer_id) if body.store else None
    generation = await admitted.chat(writer.answer_id, body.conversation())
    return await respond(request, generation, writer, stream=body.stream, keep=keep)


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    context, body = await read(request, CompletionRequest)
    admitted = admit(context, request, body)
    writer = TextWriter(**_settings("cmpl", admitted, body))
    generation = await admitted.complete(writer.answer_id, body.prompt, body.guided())
    return await respond(request, generation, writer, stream=body.stream)


async def _keep(request: Request, body: ChatRequest, answer_id: str) -> Keep:
    """What keeps the answer, with what was asked.

    Raises:
        UnsupportedParameterError: this server keeps none.
    """
    context = context_of(request)
    if not context.config.max_stored_completions:
        raise UnsupportedParameterError(
            "store: this server keeps no completions (--max-stored-completions 0).", param="store"
        )

    def pack() -> tuple[bytes, ...]:
        asked = (message.model_dump(exclude_none=True) for message in body.messages)
        named = ({"id": f"{answer_id}-{n}", **m} for n, m in enumerate(asked))
        return tuple(packed_json(message).encode() for message in named)

    messages = await asyncio.to_thread(pack)
    stored = context.stored(request)
    return lambda answer: stored.keep(StoredChat.of(answer, body.metadata or {}, messages))


def _settings(prefix: str, admitted: Admitted, body: GenerateRequest) -> dict[str, Any]:
    """The arguments of both writers."""
    params, options = admitted.params, body.stream_options
    return {
        "answer_id": f"{prefix}-{uuid.uuid4().hex}",
        "shared": {
            "created": int(time.time()),
            "model": admitted.context.config.model_name,
            "system_fingerprint": f"mlx-mtp-{__version__}",
            "seed": params.seed,
        },
        "tokenizer": admitted.context.tokenizer,
        "with_logprobs": params.top_logprobs is not None,
        "include_usage": options is not None and options.include_usage,
        "continuous_usage": options is not None and options.continuous_usage_stats,
    }
