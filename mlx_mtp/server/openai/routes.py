"""OpenAI's routes. Each reads as its steps: body, checks, prompt, generation, answer."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.body import read_body
from mlx_mtp.server.context import Context, answer_id
from mlx_mtp.server.openai.answers import ChatWriter, Head, OpenAIWriter, TextWriter
from mlx_mtp.server.respond import context_of, reserve, respond
from mlx_mtp.server.wire import ChatRequest, CompletionRequest, GenerateRequest


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    context = context_of(request)
    body = await read_body(request, ChatRequest, context.config.max_body_bytes)
    context.check_model(body.model)
    options = body.options()
    params = context.sampling(options)
    reserve(request, options.n)
    writer = _writer(ChatWriter, context, body, params, answer_id("chatcmpl"))
    generation = await context.chat(writer.request_id, body.conversation(), options, params)
    return await respond(request, generation, writer, stream=body.stream)


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    context = context_of(request)
    body = await read_body(request, CompletionRequest, context.config.max_body_bytes)
    context.check_model(body.model)
    options = body.options()
    params = context.sampling(options, num_prompts=len(body.prompts))
    reserve(request, options.n * len(body.prompts))
    writer = _writer(TextWriter, context, body, params, answer_id("cmpl"))
    generation = await context.complete(
        writer.request_id, body.prompts, options, params, body.guided()
    )
    return await respond(request, generation, writer, stream=body.stream)


def _writer(
    kind: type[OpenAIWriter],
    context: Context,
    body: GenerateRequest,
    params: SamplingParams,
    request_id: str,
) -> OpenAIWriter:
    head = Head(
        request_id=request_id,
        created=int(time.time()),
        model=context.config.model_name,
        seed=params.seed,
        fingerprint=context.fingerprint,
    )
    return kind(
        head,
        context.tokenizer,
        with_logprobs=params.top_logprobs is not None,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
