"""Embeddings: POST /v1/embeddings, and Ollama's /api/embed."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp.engine.request import prompt_too_long
from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.server.api import schema
from mlx_mtp.server.api.openai.protocol import as_prompts
from mlx_mtp.server.context import Context
from mlx_mtp.server.generation.writer import packed_slowly
from mlx_mtp.server.http.body import read_request, until_disconnect
from mlx_mtp.server.http.record import client_of

MAX_INPUTS = 2048  # of a request, as in OpenAI's API
_CHARACTERS = 20  # of a number as JSON, about


class OllamaEmbedRequest(schema.WireModel):
    """POST /api/embed."""

    model: schema.ModelName = ""
    # Texts or lists of token ids.
    input: Annotated[list[Any], BeforeValidator(partial(as_prompts, most=MAX_INPUTS))]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool = True


class EmbeddingRequest(OllamaEmbedRequest):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None
    truncate: bool = False


_Body = TypeVar("_Body", bound=OllamaEmbedRequest)

Embedded = tuple[Any, int]  # normalized vectors, float32 [inputs, dimensions]; tokens of the inputs


async def _vectors(request: Request, context: Context, body: OllamaEmbedRequest) -> Embedded:
    engine: Any = context.engine
    most, limit = engine.info.embedding_size, context.max_model_len
    if (size := body.dimensions or most) > most:
        message = f"dimensions: the vectors of this model have {most} numbers."
        raise InvalidRequestError(message, param="dimensions")

    def ids_of(given: Any) -> tuple[int, ...]:
        ids = given
        if isinstance(given, str):
            ids = context.tokenizer.encode(given, limit=None if body.truncate else limit)
        if len(ids) > limit and not body.truncate:
            raise prompt_too_long(len(ids), limit)
        # The last token is kept: it ends each text.
        ids = ids if len(ids) <= limit else (*ids[: limit - 1], ids[-1])
        return context.checked_ids(ids, "input")

    run: Any = partial(context.embedding.run, client_of(request.scope))
    rows = await run(lambda: [ids_of(each) for each in body.input])
    found = np.empty((len(rows), size), np.float32)
    for group in engine.groups(rows):
        found[group] = (await run(partial(engine.embed, [rows[i] for i in group])))[:, :size]
    found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return found, sum(map(len, rows))


async def _respond(request: Request, kind: type[_Body], write: Callable[..., Any]) -> Response:
    """Answer with the JSON of what `write` returns for the body and the `Embedded` inputs."""
    context, body = await read_request(request, kind)
    context.limiter.reserve(request.scope, 1)
    async with context.in_time(request.scope):
        work = _vectors(request, context, body)
        found, count = await until_disconnect(request.receive, work)

    def content() -> str:
        return packed_slowly({"model": body.model, **write(body, found, count)})

    size, packing = _CHARACTERS * found.size, context.limiter.packing
    text = await packing.run_by_size(size, client_of(request.scope), content)
    return Response(text, media_type="application/json")


async def embeddings(request: Request) -> Response:
    """POST /v1/embeddings."""

    def write(body: EmbeddingRequest, found: Any, count: int) -> dict[str, Any]:
        rows = found.tolist()
        if body.encoding_format == "base64":
            rows = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in found]
        entries = [
            {"object": "embedding", "index": index, "embedding": row}
            for index, row in enumerate(rows)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": entries, "usage": usage}

    return await _respond(request, EmbeddingRequest, write)


async def ollama_embed(request: Request) -> Response:
    """POST /api/embed."""
    began = time.perf_counter()

    def write(_: OllamaEmbedRequest, found: Any, count: int) -> dict[str, Any]:
        total = {"total_duration": int(1e9 * (time.perf_counter() - began)), "load_duration": 0}
        return {"embeddings": found.tolist(), **total, "prompt_eval_count": count}

    return await _respond(request, OllamaEmbedRequest, write)
