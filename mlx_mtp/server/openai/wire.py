"""OpenAI's two request bodies. What is not named here is refused by name, never ignored."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.sampling.params import MAX_TOP_LOGPROBS
from mlx_mtp.server.conversation import Conversation
from mlx_mtp.server.fields import (
    MAX_MESSAGES,
    MAX_PROMPT_IDS,
    MAX_TOOLS,
    CacheSalt,
    Float,
    Int,
    Labels,
    LogitBias,
    OnlyFalse,
    Retention,
    Stops,
    StopTokenIds,
    TemplateKwargs,
    WireModel,
    at_most,
    is_id,
    only,
    refusal,
)
from mlx_mtp.server.openai.messages import Message, Tool, ToolChoice, tool_choice
from mlx_mtp.server.options import Options
from mlx_mtp.server.params import MAX_SEQUENCES
from mlx_mtp.server.structured_fields import GuidedFields, ResponseFormat
from mlx_mtp.server.thinking import Effort, split_template_kwargs, with_effort

Tools = Annotated[list[Tool], FailFast(), at_most(MAX_TOOLS)]


class StreamOptions(WireModel):
    """What a stream carries beside the answer."""

    include_usage: bool = False
    include_obfuscation: OnlyFalse = False
    # vLLM's name: the counts so far stand in every chunk, which may hold several tokens.
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _continuous_needs_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise refusal("needs include_usage: true", field="continuous_usage_stats")
        return self


class MtpOptions(WireModel):
    """How this request is drafted; its answer is the same in any case."""

    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None


class GenerateRequest(GuidedFields):
    """What both endpoints take."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    presence_penalty: Float = 0.0
    frequency_penalty: Float = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Int | None = None
    stop: Stops = Field(default_factory=list)
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    n: Int = 1
    mtp: MtpOptions | None = None
    cache_salt: CacheSalt | None = None
    # Labels, which mean nothing to a model: OpenAI's own servers act on none of them either.
    user: str | None = None
    metadata: Labels | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerateRequest:
        if self.stream_options is not None and not self.stream:
            raise refusal("needs stream: true", field="stream_options")
        return self

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens to generate for each choice; None: as many as there is room for."""
        return self.max_tokens

    @property
    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """Alternatives to report for each token; None: no logprobs."""

    def options(self) -> Options:
        """The numbers, as the server knows them."""
        return Options(
            max_tokens=self.answer_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            n=self.n,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            logit_bias=self.logit_bias,
            top_logprobs=self.wanted_logprobs,
            num_draft_tokens=self.mtp.num_draft_tokens if self.mtp is not None else None,
            user=self.user or self.safety_identifier,
            cache_salt=self.cache_salt,
        )

    @property
    def include_usage(self) -> bool:
        """The stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Every chunk of the stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1), at_most(MAX_MESSAGES)]
    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], FailFast(), at_most(1)] = Field(
        default_factory=list
    )
    verbosity: Annotated[str, AfterValidator(only("medium"))] = "medium"
    store: bool = False
    # A wish about OpenAI's caches: here whoever starts the server says where prefixes are kept.
    prompt_cache_retention: Retention | None = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("needs logprobs: true", field="top_logprobs")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise refusal(
                "differs from max_completion_tokens; give one of them", field="max_tokens"
            )
        guided = self.guided()
        if guided is not None and self.response_format is not None:
            raise refusal("can't be combined with response_format", field=guided[0])
        return self

    @property
    def answer_tokens(self) -> int | None:
        """Either of the field's two names."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """`logprobs` switches them on, `top_logprobs` says how many."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> Conversation:
        """What the model is asked, as the server knows it."""
        kwargs, budget = split_template_kwargs(self.chat_template_kwargs)
        form = None if self.response_format is None else self.response_format.grammar()
        field, response = self.guided() or ("response_format", form)
        conversation = Conversation(
            messages=[message.message() for message in self.messages],
            tools=[tool.tool() for tool in self.tools],
            tool_choice=tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            template_kwargs=kwargs,
            thinking_budget=budget,
            response=response,
            response_field=field,
        )
        return with_effort(conversation, self.reasoning_effort)


def _as_prompts(value: object) -> object:
    """One prompt, as text or as token ids, becomes a list of one."""
    if isinstance(value, str) or (isinstance(value, list) and value and is_id(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        raise refusal("must be a string, a list of token ids, or a non-empty list of either")
    if len(value) > MAX_SEQUENCES:
        raise refusal(f"has {len(value)} prompts; at most {MAX_SEQUENCES} are allowed")
    for number, prompt in enumerate(value):
        if isinstance(prompt, list) and len(prompt) > MAX_PROMPT_IDS:
            raise refusal(
                f"prompt {number} has {len(prompt)} token ids; at most {MAX_PROMPT_IDS} are allowed"
            )
        ids = isinstance(prompt, list) and all(is_id(token) for token in prompt)
        if not isinstance(prompt, str) and not ids:
            raise refusal(f"prompt {number} is neither a string nor a list of token ids")
        if not prompt:
            raise refusal(f"prompt {number} is empty")
    return value


class CompletionRequest(GenerateRequest):
    """POST /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(_as_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Int | None = None
    echo: OnlyFalse = False
    suffix: Annotated[str, AfterValidator(only(""))] = ""

    @model_validator(mode="after")
    def _fields_fit_together(self) -> CompletionRequest:
        if self.best_of not in (None, 1, self.n):
            raise refusal("must be 1 or equal to n", field="best_of", unsupported=True)
        return self

    def options(self) -> Options:
        """The numbers, as the server knows them."""
        return replace(super().options(), num_prompts=len(self.prompts))

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        return self.prompt

    @property
    def wanted_logprobs(self) -> int | None:
        """One number does both."""
        return self.logprobs
