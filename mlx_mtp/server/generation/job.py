"""What every route that generates does: check what is asked, and make the generation."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from mlx_mtp.server.api.schema import GenerateRequest
from mlx_mtp.server.context import Context, read_request
from mlx_mtp.server.generation.conversation import Conversation
from mlx_mtp.server.generation.generation import Generation
from mlx_mtp.server.generation.params import RequestOptions, engine_requests, sampling_params
from mlx_mtp.server.generation.writer import new_id
from mlx_mtp.server.grammar.answer_grammar import check_tools, max_calls
from mlx_mtp.server.http.record import client_of, record_of
from mlx_mtp.text.detokenizer import Detokenizer, Echo, echo_of
from mlx_mtp.text.parsing.answer import AnswerParser, PlainParser
from mlx_mtp.text.stream import OutputStream

Body = TypeVar("Body", bound=GenerateRequest)


@dataclass(frozen=True, slots=True)
class Admitted(Generic[Body]):
    """A request that was admitted; `chat` or `complete` makes its generation."""

    context: Context
    body: Body
    answer_id: str
    client: tuple[str, ...]
    options: RequestOptions
    params: SamplingParams
    scope: Scope

    async def chat(self, conversation: Conversation) -> Generation:
        context = self.context
        check_tools(conversation, context.output_format)
        limit = context.engine.info.max_model_len
        async with context.in_time(self.scope):
            prompt = await context.prompter.prompt(
                conversation, limit, self.client, with_grammar=True
            )
        schemas = {tool.name: tool.parameters or {} for tool in conversation.offered_tools}

        def parser() -> AnswerParser:
            return context.output_format.parser(
                thinking=prompt.thinking, schemas=schemas or None, max_calls=max_calls(conversation)
            )

        field = "tools" if conversation.response is None else conversation.response_field
        return await self._generation([prompt.token_ids], parser, field, prompt.grammar)

    async def complete(
        self,
        prompts: Sequence[str | list[int]],
        guided: tuple[str, GrammarSpec | None] | None,
        suffix: str = "",
    ) -> Generation:
        context = self.context
        limit = context.engine.info.max_model_len
        with_tokens = self.params.top_logprobs is not None

        def encode(prompt: str | list[int]) -> tuple[tuple[int, ...], Echo | None]:
            text = partial(context.prompter.encode, limit=limit)
            if isinstance(prompt, str):
                token_ids = text(prompt, "prompt")
            else:
                token_ids = context.checked_ids(prompt, "prompt")
            if suffix:
                return context.tokenizer.fill_in(token_ids, text(suffix, "suffix")), None
            if not self.options.echo or not 0 < len(token_ids) < limit:
                return token_ids, None
            name = context.tokenizer.token_bytes
            return token_ids, echo_of(prompt, token_ids, name, with_tokens=with_tokens)

        size = len(suffix) + sum(map(len, prompts))
        async with context.in_time(self.scope):
            encoded = await context.prompter.in_turn(
                size, self.client, lambda: list(map(encode, prompts))
            )
        token_ids, echoes = zip(*encoded)
        field, spec = guided or ("", None)
        return await self._generation(token_ids, PlainParser, field, spec, echoes)

    async def _generation(
        self,
        prompts: Sequence[tuple[int, ...]],
        make_parser: Callable[[], AnswerParser],
        field: str,
        spec: GrammarSpec | None,
        echoes: Sequence[Echo | None] = (None,),  # of each prompt
    ) -> Generation:
        context, options = self.context, self.options
        params, limit = replace(self.params, grammar=spec), context.engine.info.max_model_len
        grammar = None
        if spec is not None:
            async with context.in_time(self.scope):
                grammar = await context.grammars.compile(spec, field, self.client)
        tokenizer, words = context.tokenizer, options.bad_words
        visible = tokenizer.text_bytes_with(context.output_format.markers)
        shown = visible if options.skip_special_tokens else tokenizer.token_bytes
        bad_words = None
        if words:
            bad_words = await asyncio.to_thread(tokenizer.bad_words, words, shown)
        requests = engine_requests(
            self.answer_id,
            prompts,
            params,
            options,
            limit,
            grammar=grammar,
            bad_words=bad_words,
            client=self.client,
        )
        streams = [
            OutputStream(
                index,
                Detokenizer(shown, options.stop, params.min_tokens, options.include_stop),
                make_parser(),
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


async def admit(request: Request, model: type[Body], prefix: str) -> Admitted[Body]:
    """Read and check what is asked for, and reserve slots; `prefix` begins the answer's id."""
    context, body = await read_request(request, model)
    options, info = body.options(), context.engine.info
    drafts = bool(info.draft_sources)
    options.check(context.config.max_choices, mtp_enabled=info.mtp_enabled, drafts=drafts)
    params = sampling_params(options, context.defaults, context.seeds, info.vocab_size)
    context.limiter.reserve(request.scope, options.n * options.num_prompts)
    config = context.config
    if len(config.api_keys) > 1 and not config.share_prefixes:
        salt = f"{record_of(request.scope).key} {options.cache_salt or ''}"
        options = replace(options, cache_salt=salt)
    client = client_of(request.scope, options.user)
    return Admitted(context, body, new_id(prefix), client, options, params, request.scope)
