"""Anthropic's routes. Any `anthropic-version` will do: the form has not changed with it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.server.anthropic.wire import CountRequest, MessagesRequest
from mlx_mtp.server.anthropic.writer import MessageWriter
from mlx_mtp.server.context import read
from mlx_mtp.server.fields import MAX_PROMPT_IDS
from mlx_mtp.server.generate import admit, respond


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    context, body = await read(request, MessagesRequest)
    admitted = admit(context, request, body)
    omit = body.thinking.display == "omitted"
    writer = MessageWriter(context.config.model_name, admitted.params.seed, omit_thinking=omit)
    generation = await admitted.chat(writer.answer_id, body.conversation())
    return await respond(request, generation, writer, stream=body.stream)


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    context, body = await read(request, CountRequest)
    context.check_model(body.model)
    prompt = await context.prompter.prompt(body.conversation(), MAX_PROMPT_IDS)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})
