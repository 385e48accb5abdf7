"""What every route that generates does: check what is asked, and make the generation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from starlette.requests import Request

from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from mlx_mtp.server.admission import client_of
from mlx_mtp.server.answer_grammar import check_tools, max_calls
from mlx_mtp.server.context import Context, read
from mlx_mtp.server.conversation import Conversation
from mlx_mtp.server.detokenizer import Detokenizer, Echo, echo_of
from mlx_mtp.server.fields import GenerateRequest
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.output_stream import OutputStream
from mlx_mtp.server.params import RequestOptions, engine_requests, sampling_params
from mlx_mtp.server.parsing.answer import AnswerParser, PlainParser
from mlx_mtp.server.writer import new_id

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

    async def chat(self, conversation: Conversation) -> Generation:
        context = self.context
        check_tools(conversation, context.output_format)
        limit = context.engine.info.max_model_len
        prompt = await context.prompter.prompt(conversation, limit, with_grammar=True)
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
            if isinstance(prompt, str):
                token_ids = context.tokenizer.encode(prompt, limit=limit)
            else:
                token_ids = context.checked_ids(prompt, "prompt")
            if suffix:
                return context.tokenizer.fill_in(token_ids, suffix, limit), None
            if not self.options.echo or not 0 < len(token_ids) < limit:
                return token_ids, None
            name = context.tokenizer.token_bytes
            return token_ids, echo_of(prompt, token_ids, name, with_tokens=with_tokens)

        texts = [suffix, *(prompt for prompt in prompts if isinstance(prompt, str))]
        size = sum(map(len, texts))
        encoded = await context.prompter.in_thread(size, lambda: list(map(encode, prompts)))
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
        grammar = None if spec is None else await context.grammars.compile(spec, field)
        tokenizer, words = context.tokenizer, options.bad_words
        visible = tokenizer.text_bytes_with(context.output_format.markers)
        shown = visible if options.skip_special_tokens else tokenizer.token_bytes
        in_thread, bad_words = context.prompter.in_thread, None
        if words:
            bad_words = await in_thread(0, lambda: tokenizer.bad_words(words, shown))
        requests = engine_requests(
            *(self.answer_id, prompts, params, options, limit),
            grammar=grammar,
            bad_words=bad_words,
            client=self.client,
        )
        rules = options.stop, params.min_tokens, options.include_stop
        texts = (Detokenizer(shown, *rules) for _ in requests)
        streams = [
            OutputStream(i, text, make_parser(), echoes[i // options.n])
            for i, text in enumerate(texts)
        ]
        parts = context.dispatcher, context.metrics, requests, streams
        return Generation(*parts, options.n, context.config.request_timeout)


async def admit(request: Request, model: type[Body], prefix: str) -> Admitted[Body]:
    """Read and check what is asked for, and reserve slots; `prefix` begins the answer's id."""
    context, body = await read(request, model)
    options, info = body.options(), context.engine.info
    options.check(context.config.max_choices, mtp_enabled=info.mtp_enabled)
    params = sampling_params(options, context.defaults, context.seeds, info.vocab_size)
    context.limiter.reserve(request.scope, options.n * options.num_prompts)
    client = client_of(request.scope, options.user)
    return Admitted(context, body, new_id(prefix), client, options, params)
