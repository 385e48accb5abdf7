"""Embeddings: POST /v1/embeddings, and Ollama's /api/embed."""

import base64
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp.engine.request import prompt_too_long
from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.server.api import schema
from mlx_mtp.server.api.openai.protocol import as_prompts
from mlx_mtp.server.generation.writer import packed_slowly, respond_packed
from mlx_mtp.server.http.body import read_request, until_disconnect
from mlx_mtp.server.http.record import client_of


class EmbedRequest(schema.WireModel):
    """The body of both routes: each takes the other's parameters."""

    model: schema.ModelName = ""
    # Texts or lists of token ids; OpenAI's API has the same limit on their number.
    input: Annotated[list[Any], BeforeValidator(partial(as_prompts, most=2048))]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    truncate: bool | None = None  # None: the default of the route's API
    user: str | None = None


async def embeddings(request: Request) -> Response:
    """POST /v1/embeddings."""

    def answer(vectors: list[Any], count: int) -> dict[str, Any]:
        data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "usage": usage}

    return await _embed(request, answer, truncates=False)


async def ollama_embed(request: Request) -> Response:
    """POST /api/embed."""
    began = time.perf_counter()

    def answer(vectors: list[Any], count: int) -> dict[str, Any]:
        total = {"total_duration": int(1e9 * (time.perf_counter() - began)), "load_duration": 0}
        return {"embeddings": vectors, "prompt_eval_count": count, **total}

    return await _embed(request, answer, truncates=True)


async def _embed(request: Request, answer: Callable[..., Any], *, truncates: bool) -> Response:
    """Embed the inputs; `answer` turns their vectors and number of tokens into the response."""
    context, body = await read_request(request, EmbedRequest)
    engine: Any = context.engine
    most, limit = engine.info.embedding_size, context.max_model_len
    if (size := body.dimensions or most) > most:
        message = f"dimensions: the vectors of this model have {most} numbers."
        raise InvalidRequestError(message, param="dimensions")
    truncates = truncates if body.truncate is None else body.truncate

    def ids_of(given: Any) -> tuple[int, ...]:
        ids = context.tokenizer.encode(given) if isinstance(given, str) else given
        if len(ids) > limit and not truncates:
            raise prompt_too_long(len(ids), limit)
        # Truncation keeps the last token, which ends each text.
        return context.checked_ids((*ids[:-1][: limit - 1], ids[-1]), "input")

    async def work() -> tuple[np.ndarray, int]:
        run: Any = partial(context.embedding.run, client_of(request.scope))
        rows = await run(lambda: list(map(ids_of, body.input)))
        found = np.empty((len(rows), size), np.float32)
        for group in engine.groups(rows):
            found[group] = await run(partial(engine.embed, [rows[i] for i in group], size))
        return found, sum(map(len, rows))

    context.limiter.reserve(request.scope, 1)
    async with context.in_time(request.scope):
        found, count = await until_disconnect(request.receive, work())

    def content() -> str:
        vectors = found.tolist()
        if body.encoding_format == "base64":
            vectors = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in found]
        return packed_slowly({"model": body.model, **answer(vectors, count)})

    return await respond_packed(request, 20 * found.size, content)  # about 20 characters per number
