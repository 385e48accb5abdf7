"""The body of /v1/responses."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    Tag,
    model_validator,
)

from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server import conversation
from mlx_mtp.server.conversation import Conversation, Message
from mlx_mtp.server.fields import (
    FORM,
    MAX_LABELS,
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheSalt,
    Float,
    Int,
    Labels,
    OnlyFalse,
    Retention,
    WireModel,
    at_most,
    few_values,
    only,
    refusal,
)
from mlx_mtp.server.openai.messages import FORMS_OF_CHOICE
from mlx_mtp.server.options import Options
from mlx_mtp.server.responses.input_items import Item, as_items, messages_of
from mlx_mtp.server.structured_fields import Schema as AnswerSchema
from mlx_mtp.server.structured_fields import schema_grammar
from mlx_mtp.server.thinking import Effort, with_effort

logger = logging.getLogger(__name__)

IGNORED_TOOLS = frozenset({"web_search", "web_search_preview", "namespace", "image_generation"})
"""Codex offers these to every server. What a server doesn't have, its model isn't told of."""
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
Schema = Annotated[dict[str, Any], BeforeValidator(few_values)]


class FunctionTool(WireModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool = False
    defer_loading: bool | None = None

    def tool(self) -> conversation.Tool:
        """The tool as the server knows it."""
        return conversation.Tool(self.name, self.description, self.parameters, self.strict)


def _without_ignored(value: object) -> object:
    if not isinstance(value, list):
        return value
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in value]
    ignored = sorted({kind for kind in kinds if isinstance(kind, str) and kind in IGNORED_TOOLS})
    if ignored:
        logger.debug("tools that are not offered here: %s", ", ".join(ignored))
    return [tool for tool, kind in zip(value, kinds) if kind not in ignored]


class NamedTool(WireModel):
    """A function, by its name."""

    type: Literal["function"]
    name: str


class AllowedTools(WireModel):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FailFast(), at_most(MAX_TOOLS), Field(min_length=1)]


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag(FORM + "word")]
    | Annotated[NamedTool, Tag(FORM + "function")]
    | Annotated[AllowedTools, Tag(FORM + "allowed_tools")],
    FORMS_OF_CHOICE,
]


class Reasoning(WireModel):
    """How much the model thinks, and where its thoughts are told."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(WireModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: AnswerSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _a_schema_is_there(self) -> TextFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise refusal("is only for type json_schema", field="schema")
        return self

    def grammar(self) -> GrammarSpec | None:
        """What an answer of this form must look like."""
        if self.type == "json_object":
            return GrammarSpec("json_object")
        if self.json_schema is not None:
            return schema_grammar(self.json_schema)
        return None


class TextConfig(WireModel):
    """What the text is like."""

    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Annotated[str, AfterValidator(only("medium"))] = "medium"


class StreamOptions(WireModel):
    """What a stream carries beside the answer."""

    include_obfuscation: OnlyFalse = False


def _no_state(_: object) -> object:
    raise refusal("this server stores no responses; send the whole chat as input", unsupported=True)


class ResponsesRequest(WireModel):
    """POST /v1/responses."""

    model: Annotated[str, Field(min_length=1)]
    input: Annotated[
        list[Item],
        FailFast(),
        Field(min_length=1),
        at_most(MAX_MESSAGES),
        BeforeValidator(as_items),
    ]
    instructions: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: Int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_logprobs: Int | None = None
    tools: Annotated[
        list[FunctionTool], FailFast(), at_most(MAX_TOOLS), BeforeValidator(_without_ignored)
    ] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Field(default_factory=Reasoning)
    text: TextConfig = Field(default_factory=TextConfig)
    include: Annotated[
        list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]],
        FailFast(),
        at_most(MAX_LABELS),
    ] = Field(default_factory=list)
    truncation: Annotated[str, AfterValidator(only("disabled"))] = "disabled"
    store: OnlyFalse = False
    background: OnlyFalse = False
    previous_response_id: Annotated[None, BeforeValidator(_no_state)] = None
    conversation: Annotated[None, BeforeValidator(_no_state)] = None
    # Not of this API, but of the others here.
    cache_salt: CacheSalt | None = None
    seed: Int | None = None
    # Of the tools that a server runs itself, of which there are none here.
    max_tool_calls: Int | None = None
    # Labels, which mean nothing to a model.
    user: str | None = None
    metadata: Labels | None = None
    client_metadata: Annotated[dict[str, Any], at_most(MAX_LABELS)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    # A wish about OpenAI's caches: here whoever starts the server says where prefixes are kept.
    prompt_cache_retention: Retention | None = None
    safety_identifier: str | None = None

    def options(self) -> Options:
        """The numbers, as the server knows them."""
        wanted = self.top_logprobs is not None or LOGPROBS in self.include
        return Options(
            max_tokens=self.max_output_tokens,
            max_tokens_field="max_output_tokens",
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            top_logprobs=(self.top_logprobs or 0) if wanted else None,
            user=self.user or self.safety_identifier,
            cache_salt=self.cache_salt,
        )

    def chat(self) -> Conversation:
        """What the model is asked, as the server knows it."""
        messages = messages_of(self.input)
        if self.instructions:
            messages.insert(0, Message("system", self.instructions))
        chat = Conversation(
            messages=messages,
            tools=[tool.tool() for tool in self.tools],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response=self.text.format.grammar(),
            response_field="text.format",
        )
        return with_effort(chat, self.reasoning.effort)


def _choice(choice: Any) -> conversation.ToolChoice:
    if isinstance(choice, NamedTool):
        return conversation.ToolChoice("required", frozenset({choice.name}))
    if isinstance(choice, AllowedTools):
        names = frozenset(tool.name for tool in choice.tools)
        return conversation.ToolChoice(choice.mode, names)
    return conversation.ToolChoice(choice)
