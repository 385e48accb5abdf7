"""The route of responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp.server.context import read
from mlx_mtp.server.generate import admit, respond
from mlx_mtp.server.responses.wire import ResponsesRequest
from mlx_mtp.server.responses.writer import ResponseWriter


async def responses(request: Request) -> Response:
    """POST /v1/responses."""
    context, body = await read(request, ResponsesRequest)
    admitted = admit(context, request, body)
    name, tokenizer = context.config.model_name, context.tokenizer
    writer = ResponseWriter(body, admitted.params, name, tokenizer)
    generation = await admitted.chat(writer.answer_id, body.chat())
    return await respond(request, generation, writer, stream=body.stream)
