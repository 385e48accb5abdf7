"""Anthropic's routes. Any `anthropic-version` will do: the form has not changed with it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.server.anthropic.wire import CountRequest, MessagesRequest
from mlx_mtp.server.anthropic.writer import MessageWriter
from mlx_mtp.server.body import read_body
from mlx_mtp.server.fields import MAX_PROMPT_IDS
from mlx_mtp.server.respond import admit, context_of, respond
from mlx_mtp.server.writer import new_id


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    context = context_of(request)
    body = await read_body(request, MessagesRequest, context.config.max_body_bytes)
    options, params = admit(request, body)
    omit = body.thinking is not None and body.thinking.display == "omitted"
    model = context.config.model_name
    writer = MessageWriter(new_id("msg"), model, params.seed, omit_thinking=omit)
    generation = await context.chat(writer.message_id, body.conversation(), options, params)
    return await respond(request, generation, writer, stream=body.stream)


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    context = context_of(request)
    body = await read_body(request, CountRequest, context.config.max_body_bytes)
    context.check_model(body.model)
    prompt = await context.prompt(body.conversation(), MAX_PROMPT_IDS)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})
