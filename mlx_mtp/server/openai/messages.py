"""Chat messages and tools as OpenAI's clients send them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)

from mlx_mtp.server import conversation
from mlx_mtp.server.fields import (
    FORM,
    MAX_MESSAGES,
    MAX_TOOLS,
    UNSUPPORTED,
    Parsed,
    WireModel,
    at_most,
    few_values,
    refusal,
    whole_characters,
)


def joined_text(value: object, info: ValidationInfo) -> object:
    """A list of text parts becomes one string; other media are refused by name."""
    if not isinstance(value, list):
        return value
    # A refusal is the text of an answer too.
    kinds = ("text", "refusal") if info.data.get("role") == "assistant" else ("text",)
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise refusal(
                f"part {number} has type {json.dumps(kind)[:80]}, but this server takes text only",
                unsupported=True,
            )
        # A hint for caches of other servers, which LiteLLM and others pass on.
        fields = part.keys() - {"cache_control"}
        if fields != {"type", kind} or not isinstance(part[kind], str):
            form = f'{{"type": "{kind}", "{kind}": "..."}}'
            raise refusal(f"part {number} must have the form {form}")
        texts.append(part[kind])
    return "".join(texts)


# LiteLLM's own notes on an answer, which it sends back with the chat. They tell a model nothing.
Notes = Annotated[dict[str, Any], BeforeValidator(few_values)]
Content = Annotated[str | None, BeforeValidator(joined_text), at_most(MAX_MESSAGES)]


class FunctionCall(WireModel):
    """The function that an earlier answer called."""

    name: str
    arguments: Annotated[str, AfterValidator(whole_characters)]
    parsed_arguments: Parsed | None = None


class ToolCall(WireModel):
    """One tool call of an earlier answer."""

    function: FunctionCall
    type: Literal["function"] = "function"
    id: str | None = None
    index: int | None = None
    provider_specific_fields: Notes | None = None

    def call(self) -> conversation.ToolCall:
        """The call as the server knows it."""
        return conversation.ToolCall(self.function.name, self.function.arguments, self.id)


_FIELDS_OF_ONE_ROLE = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "refusal": "assistant",
    "annotations": "assistant",
    "parsed": "assistant",
    "provider_specific_fields": "assistant",
    "tool_call_id": "tool",
}


class Message(WireModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    reasoning_content: str | None = None
    # The name that OpenRouter and newer versions of vLLM have for it.
    reasoning: str | None = None
    refusal: str | None = None
    # They say what of an earlier answer's text came from where: nothing that a prompt has a place
    # for, and no instruction. OpenAI's answers have a list of them in any case.
    annotations: Annotated[list[Any], at_most(MAX_MESSAGES)] | None = None
    parsed: Parsed | None = None
    tool_calls: Annotated[list[ToolCall], at_most(MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    provider_specific_fields: Notes | None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Message:
        for field, role in _FIELDS_OF_ONE_ROLE.items():
            if getattr(self, field) is not None and self.role != role:
                raise refusal(f"belongs to messages of role {role}, not {self.role}", field=field)
        if self.reasoning is not None and self.reasoning_content not in (None, self.reasoning):
            raise refusal("differs from reasoning_content; give one of them", field="reasoning")
        # An answer that was cut while the model thought has reasoning alone.
        said = (self.content, self.refusal, self.reasoning_content, self.reasoning)
        if all(text is None for text in said) and not self.tool_calls:
            alternative = " or tool_calls" if self.role == "assistant" else ""
            raise refusal(
                f"a message of role {self.role} needs content{alternative}", field="content"
            )
        return self

    def message(self) -> conversation.Message:
        """The message as the server knows it."""
        return conversation.Message(
            # Templates know no developer; OpenAI made it the new name of system.
            role="system" if self.role == "developer" else self.role,
            content=(self.content or "") + (self.refusal or ""),
            reasoning=self.reasoning if self.reasoning_content is None else self.reasoning_content,
            tool_calls=tuple(call.call() for call in self.tool_calls or ()),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )


class Function(WireModel):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(few_values)] | None = None
    strict: bool | None = None


class Tool(WireModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def tool(self) -> conversation.Tool:
        """The tool as the server knows it."""
        function = self.function
        return conversation.Tool(
            function.name, function.description, function.parameters, bool(function.strict)
        )


class NamedFunction(WireModel):
    """A function, by its name."""

    name: str


class FunctionChoice(WireModel):
    """The one function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(WireModel):
    """The tools that the model may call, of those that it is told of."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], FailFast(), at_most(MAX_TOOLS), Field(min_length=1)]


class AllowedToolsChoice(WireModel):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def form_of_choice(value: object) -> str | None:
    """Which form of tool_choice this is."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "word")
    return FORM + kind if isinstance(kind, str) else None


FORMS_OF_CHOICE = Discriminator(
    form_of_choice,
    custom_error_type=UNSUPPORTED,
    custom_error_message='must be "auto", "none", "required", or an object of type "function" '
    'or "allowed_tools"',
)
ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag(FORM + "word")]
    | Annotated[FunctionChoice, Tag(FORM + "function")]
    | Annotated[AllowedToolsChoice, Tag(FORM + "allowed_tools")],
    FORMS_OF_CHOICE,
]


def tool_choice(choice: Any) -> conversation.ToolChoice:
    """The choice as the server knows it."""
    if isinstance(choice, FunctionChoice):
        return conversation.ToolChoice("required", frozenset({choice.function.name}))
    if isinstance(choice, AllowedToolsChoice):
        names = frozenset(tool.function.name for tool in choice.allowed_tools.tools)
        return conversation.ToolChoice(choice.allowed_tools.mode, names)
    return conversation.ToolChoice(choice)
