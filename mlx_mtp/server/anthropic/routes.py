"""Anthropic's routes. Any `anthropic-version` will do: the form has not changed with it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.server.anthropic.wire import CountRequest, MessagesRequest
from mlx_mtp.server.anthropic.writer import MessageWriter
from mlx_mtp.server.context import read
from mlx_mtp.server.fields import MAX_PROMPT_IDS
from mlx_mtp.server.generate import admit
from mlx_mtp.server.sse import respond


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    admitted = await admit(request, MessagesRequest, "msg_")
    generation = await admitted.chat(admitted.body.conversation())
    return await respond(request, MessageWriter(admitted, generation), admitted.body.stream)


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    context, body = await read(request, CountRequest)
    prompt = await context.prompter.prompt(body.conversation(), MAX_PROMPT_IDS)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})
