"""Chat messages and tools as OpenAI's clients send them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mlx_mtp.server import conversation
from mlx_mtp.server.conversation import object_or_text
from mlx_mtp.server.text import has_half_character

MAX_MESSAGES = 4096
"""Most messages of a chat, and most parts of a message: far above what fits a context."""
MAX_TOOLS = 1024
"""Most tools of a chat, and most tool calls of a message."""
MAX_VALUES = 1 << 16
"""Most values within one tool's parameters, and within the arguments of one tool call."""
MAX_LEVELS = 128
"""Most objects and lists within each other there: whoever writes them recurses."""
MAX_FIELDS = 100
"""Most fields of an object of the API."""

FORM = "\0"
"""Begins the tag of a union's form, which pydantic puts among the names of fields."""
UNSUPPORTED = "unsupported"
"""The pydantic error type that becomes an UnsupportedParameterError."""


def refusal(message: str, *, field: str | None = None, unsupported: bool = False) -> Exception:
    """An error for a validator to raise.

    Args:
        message: what is wrong and what would be right.
        field: the field at fault, where the validator sees more than that.
        unsupported: the value makes sense, but this server does not offer it.
    """
    kind = UNSUPPORTED if unsupported else "refused"
    return PydanticCustomError(kind, "{message}", {"message": message, "field": field})


def at_most(limit: int) -> BeforeValidator:
    """Count the items of a list or an object before any of them is looked at.

    `Field(max_length=...)` looks at each, and collects an error for each that is wrong.
    """

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            raise refusal(f"has {len(value)} entries; at most {limit} are allowed")
        return value

    return BeforeValidator(check)


class WireModel(BaseModel):
    """Strict: no coercion, no unknown fields; an explicit null means that the field is absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise refusal(f"has {len(data)} fields; at most {MAX_FIELDS} are allowed")
        return {key: value for key, value in data.items() if value is not None}


def joined_text(value: object) -> object:
    """A list of text parts becomes one string; other media are refused by name."""
    if not isinstance(value, list):
        return value
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise refusal(
                f"part {number} has type {json.dumps(kind)[:80]}, but this server takes text only",
                unsupported=True,
            )
        # A hint for caches of other servers, which LiteLLM and others pass on.
        fields = part.keys() - {"cache_control"}
        if fields != {"type", "text"} or not isinstance(part["text"], str):
            raise refusal(f'part {number} must have the form {{"type": "text", "text": "..."}}')
        texts.append(part["text"])
    return "".join(texts)


def few_values(value: Any) -> Any:
    """Bound what a template has to write as JSON, which holds up every thread while it lasts."""
    left, level, depth = MAX_VALUES, [value], 0
    while level:
        if depth > MAX_LEVELS:
            raise refusal(f"is nested more than {MAX_LEVELS} levels deep")
        inner = [each for each in level if isinstance(each, dict | list)]
        left -= sum(map(len, inner))
        if left < 0:
            raise refusal(f"has too many values in it; at most {MAX_VALUES} are allowed")
        level = [v for each in inner for v in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return value


def whole_characters(arguments: str) -> str:
    """Check a call's arguments, JSON or not; a template may have to write them."""
    value = few_values(object_or_text(arguments))
    try:
        half = has_half_character(arguments, value)
    except RecursionError:
        raise refusal("its JSON is nested too deeply") from None
    if half:
        raise refusal("its JSON has half of a surrogate pair, which is not a character")
    return arguments


# LiteLLM's own notes on an answer, which it sends back with the chat. They tell a model nothing.
Notes = Annotated[dict[str, Any], BeforeValidator(few_values)]
Content = Annotated[str | None, BeforeValidator(joined_text), at_most(MAX_MESSAGES)]


class FunctionCall(WireModel):
    """The function that an earlier answer called."""

    name: str
    arguments: Annotated[str, AfterValidator(whole_characters)]


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
    "provider_specific_fields": "assistant",
    "tool_call_id": "tool",
}


class Message(WireModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], at_most(MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    provider_specific_fields: Notes | None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Message:
        for field, role in _FIELDS_OF_ONE_ROLE.items():
            if getattr(self, field) is not None and self.role != role:
                raise refusal(f"belongs to messages of role {role}, not {self.role}", field=field)
        if self.content is None and not self.tool_calls:
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
            content=self.content or "",
            reasoning=self.reasoning_content,
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
