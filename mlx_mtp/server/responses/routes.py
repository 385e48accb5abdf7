"""The route of responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp.server.generate import admit
from mlx_mtp.server.responses.wire import ResponsesRequest
from mlx_mtp.server.responses.writer import ResponseWriter
from mlx_mtp.server.sse import respond


async def responses(request: Request) -> Response:
    """POST /v1/responses."""
    admitted = await admit(request, ResponsesRequest, "resp_")
    generation = await admitted.chat(admitted.body.chat())
    return await respond(request, ResponseWriter(admitted, generation), admitted.body.stream)
