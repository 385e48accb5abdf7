"""What every route that generates does: check what is asked, make the generation, answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.engine.request import check_num_draft_tokens
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from mlx_mtp.server.admission import client_of, named
from mlx_mtp.server.answer_grammar import check_tools, max_calls
from mlx_mtp.server.collect import collect_response
from mlx_mtp.server.context import Context, context_of
from mlx_mtp.server.conversation import Conversation
from mlx_mtp.server.detokenizer import Detokenizer
from mlx_mtp.server.fields import GenerateRequest
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.output_stream import OutputStream
from mlx_mtp.server.params import RequestOptions, engine_requests, sampling_params
from mlx_mtp.server.parsing.answer import AnswerParser, PlainParser
from mlx_mtp.server.sse import EventStreamResponse, Keep, until_disconnect
from mlx_mtp.server.writer import Writer


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that was admitted, its client, and how its answer is made and sampled."""

    context: Context
    client: tuple[str, ...]
    options: RequestOptions
    params: SamplingParams

    async def chat(self, answer_id: str, conversation: Conversation) -> Generation:
        """Make the answer to a conversation.

        Raises:
            RequestError: it can't be answered as it is.
        """
        context = self.context
        check_tools(conversation, context.output_format)
        limit = context.engine.info.max_model_len
        prompt = await context.prompter.prompt(conversation, limit, with_grammar=True)
        tools = conversation.offered_tools
        schemas = {tool.name: tool.parameters or {} for tool in tools} if tools else None

        def parser() -> AnswerParser:
            return context.output_format.parser(
                thinking=prompt.thinking, schemas=schemas, max_calls=max_calls(conversation)
            )

        field = "tools" if conversation.response is None else conversation.response_field
        return await self._generation(answer_id, [prompt.token_ids], parser, field, prompt.grammar)

    async def complete(
        self,
        answer_id: str,
        prompts: Sequence[str | list[int]],
        guided: tuple[str, GrammarSpec] | None,
    ) -> Generation:
        """Continue some prompts, texts or token ids.

        Args:
            answer_id: of the answer.
            prompts: to be continued.
            guided: the field that asks for a form of the answers, and the form.

        Raises:
            RequestError: they can't be continued.
        """
        context = self.context
        limit = context.engine.info.max_model_len

        def encode() -> list[tuple[int, ...]]:
            return [
                context.tokenizer.encode(prompt, limit=limit)
                if isinstance(prompt, str)
                else context.checked_ids(prompt, "prompt")
                for prompt in prompts
            ]

        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        token_ids = await context.prompter.in_thread(size, encode)
        return await self._generation(answer_id, token_ids, PlainParser, *(guided or ("", None)))

    async def _generation(
        self,
        answer_id: str,
        prompts: Sequence[tuple[int, ...]],
        make_parser: Callable[[], AnswerParser],
        field: str,
        spec: GrammarSpec | None,
    ) -> Generation:
        context, options = self.context, self.options
        requests = engine_requests(
            answer_id,
            prompts,
            replace(self.params, grammar=spec),
            options,
            context.engine.info.max_model_len,
            grammar=None if spec is None else await context.grammars.compile(spec, field),
            client=self.client,
        )
        text_bytes = context.tokenizer.text_bytes_with(context.output_format.markers)
        streams = [
            OutputStream(index, Detokenizer(text_bytes, options.stop), make_parser())
            for index in range(len(requests))
        ]
        return Generation(
            context.dispatcher,
            context.metrics,
            requests,
            streams,
            options.n,
            context.config.request_timeout,
        )


def admit(context: Context, request: Request, body: GenerateRequest) -> Admitted:
    """Check what is asked for, and reserve slots for its sequences.

    Raises:
        RequestError: it can't be answered as it is.
        QueueFullError: there are not so many slots.
    """
    context.check_model(body.model)
    options, info = body.options(), context.engine.info
    options.check_choices(context.config.max_choices)
    check_num_draft_tokens(options.num_draft_tokens, mtp_enabled=info.mtp_enabled)
    params = sampling_params(options, context.defaults, context.seeds, info.vocab_size)
    # Before any work is done for them.
    context.limiter.reserve(request.scope, options.n * options.num_prompts)
    return Admitted(context, named(client_of(request.scope), options.user), options, params)


async def respond(
    request: Request,
    generation: Generation,
    writer: Writer,
    *,
    stream: bool,
    keep: Keep | None = None,
) -> Response:
    """Generate for as long as the client stays, and answer in the writer's words.

    `keep` gets the whole answer at its end, streamed or not.
    """
    patience = context_of(request).config.keep_alive_seconds
    if stream:
        return EventStreamResponse(generation, writer, patience, keep)

    async def whole() -> dict[str, Any]:
        return writer.whole(await collect_response(generation, patience), generation)

    with generation:
        answer = await until_disconnect(request.receive, whole())
    if keep is not None:
        keep(answer)
    return JSONResponse(answer)
