"""What every route works with."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_mtp import __version__
from mlx_mtp.config import ServerConfig
from mlx_mtp.engine.request import check_num_draft_tokens
from mlx_mtp.errors import InvalidRequestError, ModelNotFoundError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.answers import Head
from mlx_mtp.server.dispatch import Dispatcher
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.metrics import Metrics
from mlx_mtp.server.params import (
    SamplingDefaults,
    SeedSource,
    check_choices,
    engine_requests,
    sampling_params,
)
from mlx_mtp.server.protocols import EngineLike
from mlx_mtp.server.text import cut
from mlx_mtp.server.tokenizer import Tokenizer
from mlx_mtp.server.wire import ChatRequest, CompletionRequest, GenerateRequest

Prompts = list[tuple[int, ...]]


@dataclass(frozen=True)
class Context:
    """One app's parts. Its methods are the steps from a request body to a generation."""

    engine: EngineLike
    tokenizer: Tokenizer
    config: ServerConfig
    defaults: SamplingDefaults
    dispatcher: Dispatcher
    metrics: Metrics
    seeds: SeedSource
    created: int

    @classmethod
    def build(
        cls,
        engine: EngineLike,
        tokenizer: Tokenizer,
        config: ServerConfig,
        generation_config: Mapping[str, Any],
    ) -> Context:
        """Make the parts that `create_app` isn't given."""
        return cls(
            engine=engine,
            tokenizer=tokenizer,
            config=config,
            defaults=SamplingDefaults.from_generation_config(generation_config),
            dispatcher=Dispatcher(engine),
            metrics=Metrics(engine),
            seeds=SeedSource(config.seed),
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

    def sampling(self, body: GenerateRequest, num_prompts: int) -> SamplingParams:
        """Check the body's numbers, and choose a seed if it has none."""
        info = self.engine.info
        check_choices(body.n, num_prompts, self.config.max_choices)
        check_num_draft_tokens(body.num_draft_tokens, mtp_enabled=info.mtp_enabled)
        seed = self.seeds.next() if body.seed is None else body.seed
        return sampling_params(body, self.defaults, seed, info.vocab_size)

    async def chat_prompts(self, body: ChatRequest) -> Prompts:
        """Render and encode a chat, off the event loop."""
        limit = self.engine.info.max_model_len

        def encode() -> Prompts:
            messages = [message.for_template() for message in body.messages]
            tools, extra = body.template_tools(), body.chat_template_kwargs
            return [self.tokenizer.encode_chat(messages, tools, extra, limit=limit)]

        return await asyncio.to_thread(encode)

    async def text_prompts(self, body: CompletionRequest) -> Prompts:
        """Encode the prompts that are texts, off the event loop, and check those that are ids."""

        limit = self.engine.info.max_model_len

        def encode() -> Prompts:
            return [
                self.tokenizer.encode(prompt, limit=limit)
                if isinstance(prompt, str)
                else self._checked(prompt)
                for prompt in body.prompts
            ]

        return await asyncio.to_thread(encode)

    def _checked(self, prompt: list[int]) -> tuple[int, ...]:
        limit = self.engine.info.vocab_size
        for token in prompt:
            if not 0 <= token < limit:
                raise InvalidRequestError(
                    f"prompt has token {cut(str(token))}, but this model's token ids are 0 to "
                    f"{limit - 1}.",
                    param="prompt",
                )
        return tuple(prompt)

    def generation(
        self, head: Head, body: GenerateRequest, params: SamplingParams, prompts: Prompts
    ) -> Callable[[], Generation]:
        """Check the room in the context; what is returned submits the request."""
        requests = engine_requests(head.request_id, prompts, params, body, self.engine.info)
        prompt_tokens = sum(map(len, prompts))
        return lambda: Generation(
            self.dispatcher, self.metrics, self.tokenizer, requests, body.stop, prompt_tokens
        )

    def head(self, prefix: str, seed: int) -> Head:
        """The fields that an answer starts with."""
        return Head(
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.config.model_name,
            seed=seed,
            fingerprint=f"mlx-mtp-{__version__}",
        )

    def model_card(self) -> dict[str, Any]:
        """The served model, as /v1/models lists it."""
        return {
            "id": self.config.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "mlx-mtp",
            "max_model_len": self.engine.info.max_model_len,
        }
