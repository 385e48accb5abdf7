"""The bodies of /v1/messages and of its count_tokens."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, model_validator

from mlx_mtp.server.api import schema as fields
from mlx_mtp.server.api.forms import AnswerSchema, schema_grammar
from mlx_mtp.server.api.history import readable
from mlx_mtp.server.api.schema import FORM, Many, ManyTools, OneOrMore, WireModel, at_most, refusal
from mlx_mtp.server.generation import inputs
from mlx_mtp.server.generation.inputs import BUDGETS, AnswerOptions, Conversation, ToolCall, unwrap

# The beginning of Claude Code's first system block, which has a nonce that changes each turn.
BILLING_HEADER = "x-anthropic-billing-header:"


class _CacheControl(WireModel):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


def _image_source(value: object) -> str:
    return fields.image_text({"type": "image", "source": value})


class _TextBlock(WireModel):
    type: Literal["text"]
    text: str
    cache_control: _CacheControl | None = None
    citations: Annotated[list[Any], at_most(0)] | None = None


class _ImageBlock(WireModel):
    type: Literal["image"]
    # The image as a span of text (see `pictures`).
    text: Annotated[str, BeforeValidator(_image_source)] = Field(validation_alias="source")
    cache_control: _CacheControl | None = None


class _ThinkingBlock(WireModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class _RedactedThinkingBlock(WireModel):
    type: Literal["redacted_thinking"]
    data: str


class _ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: fields.Schema = Field({})
    cache_control: _CacheControl | None = None
    caller: dict[str, Any] | None = None

    def call(self) -> ToolCall:
        return ToolCall(self.name, json.dumps(self.input, ensure_ascii=False), self.id)


def _of_these(*names: str) -> Discriminator:
    return fields.form_by_type(f"this server takes blocks of these types only: {', '.join(names)}")


_as_blocks = fields.text_or_list("blocks", lambda text: {"type": "text", "text": text})
_TaggedTextBlock = Annotated[_TextBlock, Tag(FORM + "text")]
_TaggedImageBlock = Annotated[_ImageBlock, Tag(FORM + "image")]
_Texts = Annotated[Many[Annotated[_TaggedTextBlock, _of_these("text")]], _as_blocks]
_ResultBlock = Annotated[_TaggedTextBlock | _TaggedImageBlock, _of_these("text", "image")]


class _ToolResultBlock(WireModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Many[_ResultBlock], _as_blocks] = Field([])
    is_error: bool = False
    cache_control: _CacheControl | None = None

    def message(self) -> inputs.Message:
        content = "\n".join(block.text for block in self.content)
        if self.is_error and "error" not in content.lower():
            content = f"Error: {content}"
        return inputs.Message("tool", content, tool_call_id=self.tool_use_id)


_ContentBlock = Annotated[
    _TaggedTextBlock
    | _TaggedImageBlock
    | Annotated[_ThinkingBlock, Tag(FORM + "thinking")]
    | Annotated[_RedactedThinkingBlock, Tag(FORM + "redacted_thinking")]
    | Annotated[_ToolUseBlock, Tag(FORM + "tool_use")]
    | Annotated[_ToolResultBlock, Tag(FORM + "tool_result")],
    _of_these("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
_OF_ASSISTANTS = (_ThinkingBlock, _RedactedThinkingBlock, _ToolUseBlock)
_ROLES = {**dict.fromkeys(_OF_ASSISTANTS, "assistant"), _ToolResultBlock: "user"}
_ROLES[_ImageBlock] = "user"


def _text_of(blocks: Iterable[WireModel]) -> str:
    # Each text is a paragraph. Claude Code's billing header is left out.
    parts = [block for block in blocks if isinstance(block, _TextBlock | _ImageBlock)]
    parts = [part for part in parts if not part.text.startswith(BILLING_HEADER)]
    joined = ""
    for before, part in zip([None, *parts], parts):
        is_paragraph = isinstance(before, _TextBlock) and isinstance(part, _TextBlock)
        joined += "\n\n" * is_paragraph + part.text
    return joined


class _AnthropicMessage(WireModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Many[_ContentBlock], _as_blocks]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> Self:
        for number, block in enumerate(self.content):
            role = _ROLES.get(type(block), self.role)
            if role != self.role:
                message = f"block {number} of type {block.type} belongs to messages of role {role}"
                raise refusal(message, field="content")
        return self

    def messages(self) -> Iterator[inputs.Message]:
        yield from (b.message() for b in self.content if isinstance(b, _ToolResultBlock))
        text = _text_of(self.content)
        if self.role == "assistant":
            blocks = (block for block in self.content if isinstance(block, _ThinkingBlock))
            thoughts = [block.thinking or unwrap(block.signature or "") for block in blocks]
            calls = tuple(b.call() for b in self.content if isinstance(b, _ToolUseBlock))
            reasoning = "\n".join(thoughts) or None
            yield inputs.Message("assistant", text, reasoning, calls)
        elif text or any(isinstance(block, _TextBlock) for block in self.content):
            yield inputs.Message(self.role, text)


class _AnthropicTool(fields.Function):
    parameters: fields.Schema = Field(alias="input_schema")
    type: Literal["custom"] = "custom"
    cache_control: _CacheControl | None = None
    defer_loading: bool = False
    eager_input_streaming: bool | None = None


# Tools that Anthropic's servers run; the tools of clients have a schema.
_OF_VENDOR = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_\w+)_\d{8}")


def _client_tool(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        message = f"this server runs no tools of its own, such as {json.dumps(kind)[:80]}"
        raise refusal(message, field="type", unsupported=True)
    return value


class _AnthropicToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> Self:
        if (self.name is not None) != (self.type == "tool"):
            raise refusal("is only for type tool", field="name")
        return self

    def choice(self) -> inputs.ToolChoice:
        if self.type in ("any", "tool"):
            names = None if self.name is None else frozenset({self.name})
            return inputs.ToolChoice("required", names)
        return inputs.ToolChoice("none" if self.type == "none" else "auto")


class _ThinkingOptions(WireModel):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _a_budget_is_for_enabled(self) -> Self:
        if self.budget_tokens is not None and self.type != "enabled":
            raise refusal("is for type enabled", field="budget_tokens")
        return self


class _AnthropicFormat(WireModel):
    type: Literal["json_schema"]
    schema_: AnswerSchema = Field(alias="schema")


class _OutputConfig(WireModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _AnthropicFormat | None = None


class _Metadata(WireModel):
    user_id: str | None = None


class KeptThinking(WireModel):
    """How many of the latest turns keep their thinking. Errors show this class's name."""

    type: Literal["thinking_turns", "all"]
    value: Annotated[int, Field(ge=1)] | None = None


_CLEARING = "clear_thinking_20251015"


class _ContextEdit(WireModel):
    type: Literal["clear_thinking_20251015"]
    keep: KeptThinking | Literal["all"] | None = None


class _ContextManagement(WireModel):
    edits: Annotated[
        list[_ContextEdit], FailFast(), fields.known_only(_CLEARING), at_most(fields.MAX_LABELS)
    ] = Field([])


class CountRequest(WireModel):
    """POST /v1/messages/count_tokens."""

    model: fields.ModelName = ""
    messages: Annotated[OneOrMore[_AnthropicMessage], readable]
    system: _Texts = Field([])
    tools: Annotated[
        ManyTools[
            Annotated[
                _AnthropicTool,
                BeforeValidator(_client_tool),
                fields.unless_dropped(_OF_VENDOR.fullmatch),
            ]
        ],
        fields.without_none,
    ] = Field([])
    tool_choice: _AnthropicToolChoice = Field(_AnthropicToolChoice(type="auto"))
    thinking: _ThinkingOptions = Field(_ThinkingOptions(type="disabled"))
    output_config: _OutputConfig = Field(default_factory=_OutputConfig)
    output_format: _AnthropicFormat | None = None
    context_management: _ContextManagement | None = None
    cache_control: _CacheControl | None = None
    chat_template_kwargs: fields.TemplateKwargs = Field({})

    @model_validator(mode="after")
    def _calls_have_results(self) -> Self:
        # An assistant's last message begins the answer, and a model can't continue after a call.
        if any(isinstance(block, _ToolUseBlock) for block in self.messages[-1].content):
            message = "the last message has a tool_use block, and its result is missing: add a "
            message += "message of role user with a tool_result block, or leave the tool_use out"
            raise refusal(message, field="messages")
        return self

    def conversation(self) -> Conversation:
        messages = [message for given in self.messages for message in given.messages()]
        if system := _text_of(self.system):
            messages.insert(0, inputs.Message("system", system))
        thinking, budget = self.thinking, BUDGETS.get(self.output_config.effort or "")
        form = self.output_config.format or self.output_format
        chat = Conversation(
            messages=messages,
            tools=[tool.tool() for tool in self.tools],
            tool_choice=self.tool_choice.choice(),
            parallel_tool_calls=not self.tool_choice.disable_parallel_tool_use,
            thinking={"enabled": True, "disabled": False}.get(thinking.type),
            thinking_budget=budget if thinking.budget_tokens is None else thinking.budget_tokens,
            response=None if form is None else schema_grammar(form.schema_),
            response_field="output_format" if self.output_format else "output_config.format",
            effort=self.output_config.effort,
            continue_final=bool(messages) and messages[-1].role == "assistant",
        )
        return chat.with_template_kwargs(self.chat_template_kwargs)


@fields.sampled("temperature", "top_p", "top_k", "seed")
class MessagesRequest(CountRequest, fields.AnswerRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 63)]
    stop_sequences: fields.Stops = Field([])
    metadata: _Metadata = Field(default_factory=_Metadata)
    diagnostics: Annotated[dict[str, Any], at_most(fields.MAX_LABELS)] | None = None

    def options(self) -> AnswerOptions:
        return AnswerOptions(
            sampling=self.sampling(),
            stop=self.stop_sequences,
            user=self.metadata.user_id,
        )
