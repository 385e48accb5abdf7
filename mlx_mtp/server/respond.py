"""What every route that generates begins and ends with: what is asked, and the answer."""

from __future__ import annotations

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.admission import client_of, key_of
from mlx_mtp.server.context import Context, OpenGeneration
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.openai.stored import StoredChats
from mlx_mtp.server.options import Options
from mlx_mtp.server.sse import EventStreamResponse, until_disconnect
from mlx_mtp.server.whole import assemble
from mlx_mtp.server.writer import Writer


class Body(Protocol):
    """A request to generate, of any API."""

    @property
    def model(self) -> str:
        """The model that is asked for."""

    def options(self) -> Options:
        """The numbers, as the server knows them."""


def context_of(request: Request) -> Context:
    """The application's parts."""
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


def stored_of(request: Request) -> StoredChats:
    """The completions that those with the request's API key have stored; without keys, all."""
    context = context_of(request)
    # Without keys anything may stand there, and each would get its own share of memory.
    return context.stored(key_of(request.scope) if context.config.api_keys else "")


def admit(request: Request, body: Body) -> tuple[Options, SamplingParams]:
    """Check what is asked for, and take places for its sequences.

    Raises:
        RequestError: it can't be answered as it is.
        QueueFullError: there are not so many places.
    """
    context = context_of(request)
    context.check_model(body.model)
    options = body.options()
    params = context.sampling(options)
    # Before any work is done for them.
    context.limiter.reserve(request.scope, options.n * options.num_prompts)
    return options, params


async def respond(
    request: Request, open_generation: OpenGeneration, writer: Writer, *, stream: bool
) -> Response:
    """Generate for as long as the client stays, and answer in the writer's words."""
    patience = context_of(request).config.keep_alive_seconds
    client = client_of(request.scope)
    if stream:
        return EventStreamResponse(lambda: open_generation(client), writer, patience)
    with open_generation(client) as generation:
        answer = await until_disconnect(
            request.receive, _whole_answer(generation, writer, patience)
        )
    return JSONResponse(answer)


async def _whole_answer(generation: Generation, writer: Writer, patience: float) -> dict[str, Any]:
    deltas = [delta async for batch in generation.deltas(patience) for delta in batch]
    return writer.whole(assemble(deltas, len(generation.choices)), generation)
