"""The route of responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp.server.body import read_body
from mlx_mtp.server.respond import admit, context_of, respond
from mlx_mtp.server.responses.output_items import Items
from mlx_mtp.server.responses.wire import ENCRYPTED, ResponsesRequest
from mlx_mtp.server.responses.writer import ResponseWriter


async def responses(request: Request) -> Response:
    """POST /v1/responses."""
    context = context_of(request)
    body = await read_body(request, ResponsesRequest, context.config.max_body_bytes)
    options, params = admit(request, body)
    items = Items(
        context.tokenizer,
        with_logprobs=params.top_logprobs is not None,
        as_summary=body.reasoning.summary is not None,
        with_seal=ENCRYPTED in body.include,
    )
    writer = ResponseWriter(body, params, context.config.model_name, items)
    generation = await context.chat(writer.response_id, body.chat(), options, params)
    return await respond(request, generation, writer, stream=body.stream)
