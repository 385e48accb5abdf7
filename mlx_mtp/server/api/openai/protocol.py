"""The bodies of /v1/chat/completions and /v1/completions."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.engine.request import RequestOptions
from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.sampling.params import MAX_TOP_LOGPROBS
from mlx_mtp.server.api import schema
from mlx_mtp.server.api.forms import GuidedFields, ThinkingFields
from mlx_mtp.server.api.history import readable
from mlx_mtp.server.api.schema import ManyTools, OneOrMore, WireModel, at_most, refusal
from mlx_mtp.server.generation import inputs, pictures
from mlx_mtp.server.generation.inputs import MAX_SEQUENCES, AnswerOptions, Conversation

MAX_TEMPLATE = 1 << 16  # characters


_join = schema.joined_text("text", "image_url", of_assistants=("refusal",))
_MessageText = Annotated[str | None, _join, at_most(schema.MAX_MESSAGES)]


class _FunctionCall(WireModel):
    name: str
    arguments: schema.Arguments
    parsed_arguments: schema.Parsed | None = None


class _OpenAIToolCall(WireModel):
    function: _FunctionCall
    type: Literal["function"] = "function"
    id: str | None = None
    index: int | None = None
    provider_specific_fields: schema.Schema | None = None  # LiteLLM's notes on an answer


_OF_ASSISTANTS = (
    *("tool_calls", "reasoning_content", "reasoning", "refusal", "annotations", "parsed"),
    "provider_specific_fields",
)
_ROLES = {**dict.fromkeys(_OF_ASSISTANTS, "assistant"), "tool_call_id": "tool"}


class OpenAIMessage(WireModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _MessageText = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # OpenRouter's and vLLM's `reasoning_content`
    refusal: str | None = None
    annotations: Annotated[list[Any], at_most(schema.MAX_MESSAGES)] | None = None
    parsed: schema.Parsed | None = None
    tool_calls: Annotated[list[_OpenAIToolCall], at_most(schema.MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    provider_specific_fields: schema.Schema | None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Self:
        for field, role in _ROLES.items():
            if getattr(self, field) is not None and self.role != role:
                raise refusal(f"belongs to messages of role {role}, not {self.role}", field=field)
        if self.reasoning is not None and self.reasoning_content not in (None, self.reasoning):
            raise refusal("differs from reasoning_content; give one of them", field="reasoning")
        texts = (self.content, self.refusal, self.reasoning_content, self.reasoning)
        if all(text is None for text in texts) and not self.tool_calls:
            more = " or tool_calls" if self.role == "assistant" else ""
            raise refusal(f"a message of role {self.role} needs content{more}", field="content")
        return self

    def message(self) -> inputs.Message:
        return inputs.Message(
            role="system" if self.role == "developer" else self.role,
            content=(self.content or "") + (self.refusal or ""),
            reasoning=self.reasoning if self.reasoning_content is None else self.reasoning_content,
            tool_calls=tuple(
                inputs.ToolCall(call.function.name, call.function.arguments, call.id)
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )


class OpenAITool(WireModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: schema.Function


class _Name(WireModel):
    name: str


class _OpenAINamedTool(WireModel):
    type: Literal["function"]
    function: _Name

    @property
    def name(self) -> str:
        return self.function.name


class _OpenAIAllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: Annotated[ManyTools[_OpenAINamedTool], Field(min_length=1)]


class _AllowedToolsChoice(WireModel):
    type: Literal["allowed_tools"]
    allowed_tools: _OpenAIAllowedTools


class _UsageOptions(WireModel):
    include_usage: bool = False
    # vLLM's: with include_usage every chunk has the usage so far.
    continuous_usage_stats: bool = False
    include_progress: bool = False  # the same as `return_progress`


class _MtpOptions(WireModel):
    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    trace: bool = False
    optimistic: Annotated[float, Field(ge=0, le=1)] | None = None  # 0: off; None: the server's


@schema.sampled()
class OpenAIRequest(schema.AnswerRequest, schema.OpenAILabels, GuidedFields):
    """The fields that both bodies have."""

    stream_options: _UsageOptions = _UsageOptions()
    stop: schema.Stops = Field([])
    n: schema.Int = 1
    prompt_logprobs: schema.Int | None = None
    return_progress: bool = False  # llama.cpp's; has an effect on streams only
    mtp: _MtpOptions = _MtpOptions()
    # vLLM's fields for how an answer's tokens become text.
    bad_words: schema.BadWordTexts = Field([])
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise refusal("needs stream: true", field="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise refusal("can't be streamed; it needs stream: false", field="prompt_logprobs")
        if self.mtp.trace and not self.stream:
            raise refusal("needs stream: true", field="mtp.trace")
        return self

    def options(self, **more: Any) -> AnswerOptions:
        return AnswerOptions(
            sampling=self.sampling(
                **{"prompt_logprobs": self.prompt_logprobs, "optimistic": self.mtp.optimistic}
                | more
            ),
            n=self.n,
            stop=self.stop,
            bad_words=self.bad_words,
            skip_special_tokens=self.skip_special_tokens,
            include_stop=self.include_stop_str_in_output,
            user=self.user or self.safety_identifier,
            engine=RequestOptions(
                num_draft_tokens=self.mtp.num_draft_tokens,
                trace=self.mtp.trace,
                progress=self.stream
                and (self.return_progress or self.stream_options.include_progress),
            ),
        )


class TemplateFields(WireModel):
    """vLLM's fields for what a chat template gets beside the messages."""

    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    chat_template_kwargs: schema.TemplateKwargs = Field({})
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def template_fields(self) -> dict[str, Any]:
        """Returns the values of fields of a `Conversation`, without the template's variables.

        Raises InvalidRequestError for fields that contradict each other.
        """
        both = {field := "continue_final_message", "add_generation_prompt"} <= self.model_fields_set
        if both and self.continue_final_message and self.add_generation_prompt:
            message = f"{field}: can't be combined with add_generation_prompt: true."
            raise InvalidRequestError(message, param=field)
        return {
            "template": self.chat_template,
            "generation_prompt": self.add_generation_prompt,
            "continue_final": self.continue_final_message,
        }


class ChatRequest(OpenAIRequest, ThinkingFields, TemplateFields):
    """POST /v1/chat/completions."""

    messages: Annotated[OneOrMore[OpenAIMessage], readable]
    max_completion_tokens: schema.Int | None = None
    logprobs: bool = False
    top_logprobs: schema.Int | None = None
    tools: ManyTools[OpenAITool] = Field([])
    tool_choice: schema.OpenAIToolChoice[_OpenAINamedTool, _AllowedToolsChoice] = "auto"
    parallel_tool_calls: bool = True
    store: bool = False

    def listed_messages(self, answer_id: str) -> Iterator[dict[str, Any]]:
        for number, message in enumerate(self.messages):
            fields = {"id": f"{answer_id}-{number}", **message.model_dump(exclude_none=True)}
            if message.content is not None:
                fields["content"] = pictures.listed(message.content, ("text", "image_url"))
            yield fields

    def options(self, **_: Any) -> AnswerOptions:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs: needs logprobs: true.", param="top_logprobs")
        top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        if (limit := self.max_completion_tokens) is None:
            return super().options(top_logprobs=top_logprobs)
        if self.sampling().get("max_tokens", limit) != limit:
            message = "max_tokens: differs from max_completion_tokens; give one of them."
            raise InvalidRequestError(message, param="max_tokens")
        options = super().options(max_tokens=limit, top_logprobs=top_logprobs)
        return replace(options, max_tokens_field="max_completion_tokens")

    def conversation(self) -> Conversation:
        field, response = self.guided() or ("response_format", None)
        wish = self._wish
        chat = Conversation(
            messages=[message.message() for message in self.messages],
            tools=[tool.function.tool() for tool in self.tools],
            tool_choice=schema.tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            thinking=wish.get("thinking"),
            thinking_budget=wish.get("budget"),
            response=response,
            response_field=field,
            **self.template_fields(),
        )
        return chat.with_template_kwargs(self.chat_template_kwargs).with_effort(wish.get("effort"))


def as_prompts(value: object, most: int = MAX_SEQUENCES) -> object:
    """Take a text, token ids, or a list of either as a list of at most `most` prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and schema.is_id(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        raise refusal("must be a string, a list of token ids, or a non-empty list of either")
    if len(value) > most:
        raise refusal(f"has {len(value)} prompts; at most {most} are allowed")
    for number, prompt in enumerate(value):
        if isinstance(prompt, list) and len(prompt) > schema.MAX_PROMPT_IDS:
            bound = f"at most {schema.MAX_PROMPT_IDS} are allowed"
            raise refusal(f"prompt {number} has {len(prompt)} token ids; {bound}")
        ids = isinstance(prompt, list) and all(map(schema.is_id, prompt))
        if not isinstance(prompt, str) and not ids:
            raise refusal(f"prompt {number} is neither a string nor a list of token ids")
        if not prompt:
            raise refusal(f"prompt {number} is empty")
    return value


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(as_prompts)]  # texts or lists of token ids
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: schema.Int | None = None
    echo: bool = False
    suffix: str = ""  # the text after the answer

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if self.best_of not in (None, self.n) and "n" in self.model_fields_set:
            raise refusal("must be equal to n: none is ranked", field="best_of", unsupported=True)
        if self.echo and self.suffix:
            raise refusal("can't be combined with suffix", field="echo", unsupported=True)
        return self

    def options(self, **_: Any) -> AnswerOptions:
        counts = (self.prompt_logprobs, self.logprobs if self.echo else None)
        most = max((top for top in counts if top is not None), default=None)
        made = super().options(top_logprobs=self.logprobs, prompt_logprobs=most)
        # `best_of` alone means `n`: all answers that are made are returned.
        count = self.n if self.best_of is None else self.best_of
        return replace(made, num_prompts=len(self.prompt), n=count, echo=self.echo)
