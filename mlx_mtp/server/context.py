"""The parts of an application that the routes share."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Scope

from mlx_mtp.config import ServerConfig
from mlx_mtp.errors import InvalidRequestError, ModelNotFoundError
from mlx_mtp.server.cards import model_card, wrong_kind
from mlx_mtp.server.generation.generation import Dispatcher, timeout_error
from mlx_mtp.server.generation.inputs import model_defaults, with_flags
from mlx_mtp.server.generation.prompting import Prompter
from mlx_mtp.server.grammar.grammars import Grammars
from mlx_mtp.server.http.admission import FairExecutor, HeldBytes, RequestLimiter
from mlx_mtp.server.http.record import Route, record_of
from mlx_mtp.server.metrics import Metrics
from mlx_mtp.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine


class Context:
    """One application's parts, built from the arguments of `create_app`."""

    loop = "asyncio"  # uvloop would gain little beside the engine and the tokenizer.

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: ServerConfig,
        defaults: Mapping[str, Any],
    ) -> None:
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.has_several_keys = config.num_keys > 1
        self.model_names = (config.model_name, *config.other_names)
        self.defaults = replace(
            with_flags(model_defaults(defaults), config.sampling), optimistic=config.optimistic
        )
        self.prompter = Prompter(tokenizer, config, engine.info.images)
        self.workers = self.prompter.workers
        self.output_format = self.prompter.output_format
        # Maps a token id to the token's bytes in an answer's text.
        self.text_bytes = tokenizer.text_bytes_with(self.output_format.markers)
        self.grammars = Grammars(
            tokenizer, engine.info.eos_token_ids, as_standard=config.json_schemas == "standard"
        )
        self.limiter = RequestLimiter(engine, config.max_queue)
        self.held = HeldBytes(config.max_held_bytes, self.limiter.rejected)
        self.metrics = Metrics(engine, self.limiter, config)
        self.dispatcher = Dispatcher(engine)
        # If the model makes embeddings: gives clients turns on the engine's thread.
        self.embedding = FairExecutor(1, getattr(engine, "threads", None))
        self.seeds = random.Random(config.seed)
        self.stored: dict[str, Any] = {}  # a `Store` for each API key
        self.created = datetime.now(UTC).replace(microsecond=0)

    @contextlib.asynccontextmanager
    async def in_time(self, scope: Scope) -> AsyncIterator[None]:
        """Cancel the block when --request-timeout is exceeded, and raise RequestTimeoutError."""
        seconds = self.config.request_timeout
        left = record_of(scope).began + seconds - time.perf_counter() if seconds else None
        try:
            async with asyncio.timeout(left):
                yield
        except TimeoutError:
            self.metrics.count("request_timeouts")
            raise timeout_error(seconds) from None

    @property
    def fault(self) -> str | None:
        """The reason why the server can't answer now, or None."""
        reason = self.engine.unhealthy_reason or self.engine.hang_reason
        return reason or (None if self.workers is None else self.workers.fault)

    def end_all(self) -> None:
        """End all open requests with an error."""
        self.dispatcher.end_all()

    def resume(self) -> None:
        """Resume after the process was stopped and continued (SIGCONT)."""
        self.engine.resume()

    def close(self) -> None:
        self.grammars.close()
        if self.workers is not None:
            self.workers.close()

    def served_name(self, name: str) -> str:
        """Returns the model's name in the answer: the requested `name`, or for "" the first one.

        Raises ModelNotFoundError.
        """
        names = self.model_names
        # Ollama's clients add the tag ":latest" to names without a tag.
        is_known = name in ("", *names) or name.removesuffix(":latest") in names
        if not is_known and not self.config.any_model_name:
            served = f"this server has {', '.join(map(repr, names))}"
            message = f"The model {name[:120]!r} is not served here; {served}."
            raise ModelNotFoundError(f"{message} --any-model-name takes any name.", param="model")
        return name or names[0]

    def check_kind(self, route: Route) -> None:
        """Raises UnsupportedRouteError for a text route on an embedding model, or the reverse."""
        if (embeds := bool(self.engine.info.embedding_size)) != route.embeds and route.generates:
            raise wrong_kind(self.model_names[0], embeds=embeds)

    def checked_ids(self, token_ids: Sequence[int], field: str) -> tuple[int, ...]:
        """Returns a client's token ids; raises InvalidRequestError if one is out of range."""
        limit = self.engine.info.vocab_size
        for token in token_ids:
            if not 0 <= token < limit:
                valid = f"but this model's token ids are 0 to {limit - 1}."
                message = f"{field} has token {str(token)[:40]}, {valid}"
                raise InvalidRequestError(message, param=field)
        return tuple(token_ids)

    def model_card(self, name: str) -> dict[str, Any]:
        sources = self.engine.info.draft_sources  # for the page
        more: dict[str, Any] = {"images": True} if self.sees_images else {}
        if size := self.engine.info.embedding_size:
            more |= {"embeddings": True, "dimensions": size}
        return model_card(name, self.created, self.max_model_len, draft_sources=sources, **more)

    @property
    def sees_images(self) -> bool:
        return self.engine.info.images is not None

    @property
    def max_model_len(self) -> int:
        return self.engine.info.max_model_len


def context_of(request: Request) -> Context:
    """Returns the context of the application that received the request."""
    context: Context = request.app.state.context
    return context
