"""Chat messages and tools as clients send them, and as chat templates take them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mlx_mtp.server.text import has_half_character

MAX_MESSAGES = 4096
"""Most messages of a chat, and most parts of a message: far above what fits a context."""
MAX_TOOLS = 1024
"""Most tools of a chat, and most tool calls of a message."""
MAX_VALUES = 1 << 16
"""Most values within one tool's parameters, and within the arguments of one tool call."""
_MAX_FIELDS = 100

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
        if len(data) > _MAX_FIELDS:
            raise refusal(f"has {len(data)} fields; at most {_MAX_FIELDS} are allowed")
        return {key: value for key, value in data.items() if value is not None}


def _joined_text(value: object) -> object:
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
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise refusal(f'part {number} must have the form {{"type": "text", "text": "..."}}')
        texts.append(part["text"])
    return "".join(texts)


def _few_values(value: Any) -> Any:
    """Bound what a template has to write as JSON, which holds up every thread while it lasts."""
    left, waiting = MAX_VALUES, [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict | list):
            left -= len(inner)
            if left < 0:
                raise refusal(f"has too many values in it; at most {MAX_VALUES} are allowed")
            waiting.extend(inner.values() if isinstance(inner, dict) else inner)
    return value


def _whole_characters(arguments: str) -> str:
    value = _few_values(_object_or_text(arguments))
    try:
        half = has_half_character(arguments, value)
    except RecursionError:
        raise refusal("its JSON is nested too deeply") from None
    if half:
        raise refusal("its JSON has half of a surrogate pair, which is no character")
    return arguments


Content = Annotated[str | None, BeforeValidator(_joined_text), at_most(MAX_MESSAGES)]


class FunctionCall(WireModel):
    """The function that an earlier answer called."""

    name: str
    arguments: Annotated[str, AfterValidator(_whole_characters)]


class ToolCall(WireModel):
    """One tool call of an earlier answer."""

    function: FunctionCall
    type: Literal["function"] = "function"
    id: str | None = None
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """The call; arguments that are an object become one, as Qwen's templates want them."""
        return {
            "id": self.id,
            "type": self.type,
            "function": {
                "name": self.function.name,
                "arguments": _object_or_text(self.function.arguments),
            },
        }


_FIELDS_OF_ONE_ROLE = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
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

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it, with the fields that were given and no others."""
        fields: dict[str, Any] = {
            # Templates know no developer; OpenAI made it the new name of system.
            "role": "system" if self.role == "developer" else self.role,
            # Some templates concatenate without looking: an empty string suits them all.
            "content": self.content or "",
        }
        for field in ("name", "reasoning_content", "tool_call_id"):
            value = getattr(self, field)
            if value is not None:
                fields[field] = value
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return fields


class Function(WireModel):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(_few_values)] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _not_strict(self) -> Function:
        if self.strict:
            raise refusal(
                "true needs constrained decoding, which this server lacks",
                field="strict",
                unsupported=True,
            )
        return self


class Tool(WireModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as the client described it, in the usual order of fields."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        if self.function.parameters is not None:
            function["parameters"] = self.function.parameters
        return {"type": self.type, "function": function}


def _object_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
