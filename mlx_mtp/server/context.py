"""What every route works with."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar

from mlx_mtp import __version__
from mlx_mtp.config import ServerConfig
from mlx_mtp.engine.request import check_num_draft_tokens
from mlx_mtp.errors import InvalidRequestError, ModelNotFoundError
from mlx_mtp.sampling.grammar import Grammar
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from mlx_mtp.server.admission import Client, RequestLimiter, named
from mlx_mtp.server.answer_grammar import answer_grammar, check_tools, max_calls
from mlx_mtp.server.choice import Choice
from mlx_mtp.server.conversation import Conversation
from mlx_mtp.server.detokenizer import Detokenizer
from mlx_mtp.server.dispatch import Dispatcher
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.metrics import Metrics
from mlx_mtp.server.openai.stored import StoredChats
from mlx_mtp.server.options import Options
from mlx_mtp.server.params import (
    SamplingDefaults,
    SeedSource,
    check_choices,
    engine_requests,
    sampling_params,
)
from mlx_mtp.server.parsing.answer import AnswerParser, PlainParser
from mlx_mtp.server.parsing.formats import OutputFormat
from mlx_mtp.server.prompting import Prompt, Prompter
from mlx_mtp.server.protocols import EngineLike
from mlx_mtp.server.structured import Grammars
from mlx_mtp.server.text import cut
from mlx_mtp.server.tokenizer import Tokenizer

TokenIds = tuple[int, ...]
Result = TypeVar("Result")

LARGE_TEXT = 1 << 18
"""Longer prompts, in characters, are rendered and encoded `LARGE_AT_ONCE` at a time: one may take
hundreds of megabytes, and a core for seconds, which the engine and other prompts need meanwhile."""
LARGE_AT_ONCE = 1
OpenGeneration = Callable[[Client], Generation]
"""Submits a request of a client, all of whose checks are done."""


@dataclass(frozen=True)
class Context:
    """One app's parts. Its methods are the steps from a request to a generation."""

    engine: EngineLike
    tokenizer: Tokenizer
    config: ServerConfig
    defaults: SamplingDefaults
    output_format: OutputFormat
    prompter: Prompter
    grammars: Grammars
    dispatcher: Dispatcher
    limiter: RequestLimiter
    metrics: Metrics
    seeds: SeedSource
    stored: Callable[[str], StoredChats]
    created: int
    _large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_AT_ONCE))

    @classmethod
    def build(
        cls,
        engine: EngineLike,
        tokenizer: Tokenizer,
        config: ServerConfig,
        generation_config: Mapping[str, Any],
    ) -> Context:
        """Make the parts that `create_app` isn't given."""
        output_format = OutputFormat.choose(
            tokenizer.template, config.reasoning_parser, config.tool_call_parser
        )
        limiter = RequestLimiter(engine, config.max_queue)
        return cls(
            engine=engine,
            tokenizer=tokenizer,
            config=config,
            defaults=SamplingDefaults.from_generation_config(generation_config),
            output_format=output_format,
            prompter=Prompter(tokenizer, output_format, config.template_seconds),
            grammars=Grammars.for_tokenizer(tokenizer, engine.info.eos_token_ids),
            dispatcher=Dispatcher(engine),
            limiter=limiter,
            metrics=Metrics(engine, limiter),
            seeds=SeedSource(config.seed),
            stored=cache(lambda _: StoredChats(config.max_stored_completions)),
            created=int(time.time()),
        )

    def check_model(self, name: str) -> None:
        """Refuse a model that isn't served here.

        Raises:
            ModelNotFoundError: names the one that is.
        """
        if name != self.config.model_name:
            raise ModelNotFoundError(
                f"The model {cut(name)!r} is not served here; this server has "
                f"{self.config.model_name!r}.",
                param="model",
            )

    def sampling(self, options: Options) -> SamplingParams:
        """Check the options' numbers, and choose a seed if there is none."""
        info = self.engine.info
        check_choices(options.n, options.num_prompts, self.config.max_choices)
        check_num_draft_tokens(options.num_draft_tokens, mtp_enabled=info.mtp_enabled)
        seed = self.seeds.next() if options.seed is None else options.seed
        return sampling_params(options, self.defaults, seed, info.vocab_size)

    async def chat(
        self, request_id: str, conversation: Conversation, options: Options, params: SamplingParams
    ) -> OpenGeneration:
        """Make the answer to a conversation.

        Raises:
            RequestError: it can't be answered as it is.
        """
        check_tools(conversation, self.output_format)
        prompt = await self.prompt(conversation, self.engine.info.max_model_len)
        # Of many tools the grammar is a long text: off the event loop.
        grammar = await asyncio.to_thread(
            answer_grammar,
            conversation,
            self.output_format,
            self.tokenizer.added_tokens,
            thinking=prompt.thinking,
        )
        field = "tools" if conversation.response is None else conversation.response_field
        params = dataclasses.replace(params, grammar=grammar)
        tools = conversation.offered_tools
        schemas = {tool.name: tool.parameters or {} for tool in tools} if tools else None

        def parser() -> AnswerParser:
            return self.output_format.parser(
                thinking=prompt.thinking, schemas=schemas, max_calls=max_calls(conversation)
            )

        compiled = await self._compiled(grammar, field)
        prompts = [prompt.token_ids]
        return self._generation(request_id, prompts, options, params, parser, compiled)

    async def prompt(self, conversation: Conversation, limit: int | None = None) -> Prompt:
        """Render and encode a conversation, off the event loop.

        Raises:
            RequestError: it can't be rendered, or is longer than `limit` tokens.
        """
        size = sum(len(message.content) for message in conversation.messages)
        return await self.aside(size, lambda: self.prompter.prompt(conversation, limit))

    async def aside(self, size: int, work: Callable[[], Result]) -> Result:
        """Do some work on a text of so many characters off the event loop."""
        if size <= LARGE_TEXT:
            return await asyncio.to_thread(work)
        async with self._large:
            return await asyncio.to_thread(work)

    async def complete(
        self,
        request_id: str,
        prompts: Sequence[str | list[int]],
        options: Options,
        params: SamplingParams,
        guided: tuple[str, GrammarSpec] | None = None,
    ) -> OpenGeneration:
        """Go on with some prompts.

        Args:
            request_id: of the answer.
            prompts: texts or token ids.
            options: how the answer is made.
            params: the same, for the engine.
            guided: what the answers must look like, after the field that says so.

        Raises:
            RequestError: they can't be gone on with.
        """
        limit = self.engine.info.max_model_len

        def encode() -> list[TokenIds]:
            return [
                self.tokenizer.encode(prompt, limit=limit)
                if isinstance(prompt, str)
                else self.checked_ids(prompt, "prompt")
                for prompt in prompts
            ]

        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        token_ids = await self.aside(size, encode)
        field, spec = guided or ("", None)
        params = dataclasses.replace(params, grammar=spec)
        compiled = await self._compiled(spec, field)
        return self._generation(request_id, token_ids, options, params, PlainParser, compiled)

    async def _compiled(self, spec: GrammarSpec | None, field: str) -> Grammar | None:
        return None if spec is None else await self.grammars.compile(spec, field)

    def checked_ids(self, token_ids: Sequence[int], field: str) -> TokenIds:
        """Token ids from a client.

        Raises:
            InvalidRequestError: one is out of range.
        """
        limit = self.engine.info.vocab_size
        for token in token_ids:
            if not 0 <= token < limit:
                raise InvalidRequestError(
                    f"{field} has token {cut(str(token))}, but this model's token ids are 0 to "
                    f"{limit - 1}.",
                    param=field,
                )
        return tuple(token_ids)

    def _generation(
        self,
        request_id: str,
        prompts: Sequence[TokenIds],
        options: Options,
        params: SamplingParams,
        make_parser: Callable[[], AnswerParser],
        grammar: Grammar | None,
    ) -> OpenGeneration:
        """Check the room in the context; what is returned submits the request."""
        requests = [
            dataclasses.replace(request, grammar=grammar)
            for request in engine_requests(request_id, prompts, params, options, self.engine.info)
        ]
        text_bytes = self.tokenizer.text_bytes_with(self.output_format.markers)

        def choice(index: int) -> Choice:
            return Choice(index, Detokenizer(text_bytes, options.stop), make_parser())

        def opened(client: Client) -> Generation:
            owner = named(client, options.user)
            return Generation(
                self.dispatcher,
                self.metrics,
                [dataclasses.replace(request, client=owner) for request in requests],
                choice,
                options.n,
                self.config.request_timeout,
            )

        return opened

    @property
    def fingerprint(self) -> str:
        """Names what made an answer."""
        return f"mlx-mtp-{__version__}"

    def model_card(self) -> dict[str, Any]:
        """The served model, as /v1/models lists it."""
        return {
            "id": self.config.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "mlx-mtp",
            "max_model_len": self.engine.info.max_model_len,
            # Anthropic's words for the same.
            "type": "model",
            "display_name": self.config.model_name,
            "created_at": datetime.fromtimestamp(self.created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": self.engine.info.max_model_len,
        }


def answer_id(prefix: str) -> str:
    """A name for an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"
