"""What all generating routes share: they check a request and make its generation."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from mlx_mtp.server.api.schema import AnswerRequest, note_ignored
from mlx_mtp.server.context import Context
from mlx_mtp.server.generation.generation import Generation
from mlx_mtp.server.generation.inputs import (
    AnswerOptions,
    Conversation,
    Tool,
    engine_requests,
    sampling_params,
)
from mlx_mtp.server.generation.prompting import ChatPrompt, Images
from mlx_mtp.server.grammar.answer_grammar import check_tools, max_calls
from mlx_mtp.server.http.body import read_request
from mlx_mtp.server.http.record import client_of, record_of
from mlx_mtp.text.parsing.answer import AnswerParser, PlainParser
from mlx_mtp.text.stop_strings import StopStrings
from mlx_mtp.text.stream import Detokenizer, Echo, OutputStream, echo_of

Body = TypeVar("Body", bound=AnswerRequest)


@dataclass(frozen=True, slots=True)
class Job(Generic[Body]):
    """An admitted request for answers; `chat` or `complete` makes its generation."""

    context: Context
    scope: Scope
    body: Body
    answer_id: str
    options: AnswerOptions
    params: SamplingParams

    async def chat(self, conversation: Conversation) -> Generation:
        context, choice = self.context, conversation.tool_choice
        if conversation.tools or choice.names or choice.mode == "required":
            check_tools(conversation, context.output_format)
        limit, tools = context.engine.info.max_model_len, conversation.offered_tools
        client = self.options.engine.client
        async with context.in_time(self.scope):
            prompt = await chat_prompt(
                context, self.scope, conversation, limit, client, with_grammar=True
            )
            make_parser = partial(
                context.output_format.parser,
                thinking=prompt.thinking,
                schemas={tool.name: tool.parameters or {} for tool in tools} or None,
                max_calls=max_calls(conversation) if tools else None,
            )
            field = "tools" if conversation.response is None else conversation.response_field
            return await self._generation(
                [prompt.token_ids],
                make_parser,
                field,
                prompt.grammar,
                tools=tools,
                images=prompt.images,
            )

    async def complete(
        self,
        prompts: Sequence[str | list[int]],
        guided: tuple[str, GrammarSpec | None] | None,
        suffix: str = "",
    ) -> Generation:
        context, tokenizer = self.context, self.context.tokenizer
        limit = context.engine.info.max_model_len
        with_tokens = self.params.top_logprobs is not None

        def encode(prompt: str | list[int]) -> tuple[tuple[int, ...], Echo | None]:
            text = partial(context.prompter.text.encode, limit=limit)
            if isinstance(prompt, str):
                token_ids = text(prompt, param="prompt")
            else:
                token_ids = context.checked_ids(prompt, "prompt")
            if suffix:
                return tokenizer.fill_in(token_ids, text(suffix, param="suffix")), None
            if not self.options.echo or not 0 < len(token_ids) < limit:
                return token_ids, None
            return token_ids, echo_of(
                prompt, token_ids, tokenizer.token_bytes, with_tokens=with_tokens
            )

        field, spec = guided or ("", None)
        async with context.in_time(self.scope):
            size, client = record_of(self.scope).body_bytes, self.options.engine.client
            encoded = await context.prompter.executor.run_by_size(
                size, client, lambda: list(map(encode, prompts))
            )
            token_ids, echoes = zip(*encoded)
            return await self._generation(token_ids, PlainParser, field, spec, echoes)

    async def _generation(
        self,
        prompts: Sequence[tuple[int, ...]],
        make_parser: Callable[[], AnswerParser],
        field: str,  # the body's field that asked for the grammar
        spec: GrammarSpec | None,
        echoes: Sequence[Echo | None] = (None,),  # one per prompt
        tools: Sequence[Tool] = (),
        images: Images = None,
    ) -> Generation:
        context, options = self.context, self.options
        params, client = replace(self.params, grammar=spec), options.engine.client
        grammar = bad_words = None
        if spec is not None:
            grammar = await context.grammars.compile(spec, field, client, tools)
        tokenizer, words = context.tokenizer, options.bad_words
        shown = context.text_bytes if options.skip_special_tokens else tokenizer.token_bytes
        if words:
            bad_words = await asyncio.to_thread(tokenizer.bad_words, words, shown)
        requests = engine_requests(
            self.answer_id,
            prompts,
            params,
            options,
            context.engine.info.max_model_len,
            grammar=grammar,
            bad_words=bad_words,
            images=images,
        )
        streams = [
            OutputStream(
                index,
                Detokenizer(shown),
                make_parser(),
                StopStrings(options.stop, params.min_tokens, options.include_stop),
                echoes[index // options.n],
            )
            for index in range(len(requests))
        ]
        return Generation(
            context.dispatcher,
            context.metrics,
            requests,
            streams,
            options.n,
            context.config.request_timeout,
            record_of(self.scope).began,
        )


async def chat_prompt(
    context: Context,
    scope: Scope,
    conversation: Conversation,
    limit: int,
    client: tuple[str, ...],
    *,
    with_grammar: bool = False,
) -> ChatPrompt:
    """Render and encode a chat in its client's turn; note parameters that its template ignores.

    Raises RequestError for a chat that can't be rendered or has more than `limit` tokens.
    """
    record, prompter = record_of(scope), context.prompter
    work = partial(prompter.prompt, conversation, limit, with_grammar=with_grammar)
    prompt = await prompter.executor.run_by_size(record.body_bytes, client, work)
    for name in prompt.ignored:
        note_ignored(record.ignored, name)
    return prompt


async def admit(request: Request, model: type[Body], prefix: str) -> Job[Body]:
    """Read and check a request's body, and reserve its slots; `prefix` begins the answer's id.

    Raises RequestError, or BytesLimitError if there is no memory for the body.
    """
    context, body = await read_request(request, model)
    config, scope, options = context.config, request.scope, body.options()
    params = sampling_params(
        options, context.defaults, context.seeds, context.engine.info, config.max_choices
    )
    context.limiter.reserve(scope, options.n * options.num_prompts)
    salt = body.cache_salt or ""
    if context.has_several_keys and not config.share_prefixes:
        salt = f"{record_of(scope).key} {salt}"
    engine = replace(options.engine, client=client_of(scope, options.user), cache_salt=salt)
    answer_id = prefix + uuid.uuid4().hex[:24]
    return Job(context, scope, body, answer_id, replace(options, engine=engine), params)
