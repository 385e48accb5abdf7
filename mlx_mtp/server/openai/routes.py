"""OpenAI's routes that generate."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp.server.generate import admit
from mlx_mtp.server.openai.stored import keeper
from mlx_mtp.server.openai.wire import ChatRequest, CompletionRequest
from mlx_mtp.server.openai.writer import ChatWriter, TextWriter
from mlx_mtp.server.sse import respond


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    admitted = await admit(request, ChatRequest, "chatcmpl-")
    body = admitted.body
    keep = await keeper(request, body, admitted.answer_id) if body.store else None
    generation = await admitted.chat(body.conversation())
    return await respond(request, ChatWriter(admitted, generation), body.stream, keep)


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    admitted = await admit(request, CompletionRequest, "cmpl-")
    generation = await admitted.complete(admitted.body.prompt, admitted.body.guided())
    return await respond(request, TextWriter(admitted, generation), admitted.body.stream)
