"""The items of a response's input: messages, calls, their results and reasoning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    Tag,
)

from mlx_mtp.server.conversation import Message, ToolCall
from mlx_mtp.server.fields import (
    FORM,
    MAX_MESSAGES,
    UNSUPPORTED,
    OnlyFalse,
    Parsed,
    WireModel,
    at_most,
    refusal,
    whole_characters,
)
from mlx_mtp.server.seal import unsealed


class TextPart(WireModel):
    """Some text; of an earlier answer, what clients got with it too."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: Annotated[list[Any], at_most(MAX_MESSAGES)] | None = None
    logprobs: Annotated[list[Any], at_most(1 << 16)] | None = None


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _refusal_as_text(value: object) -> object:
    """A refusal is the text of an answer too."""
    if not isinstance(value, dict) or value.get("type") != "refusal":
        return value
    if value.keys() != {"type", "refusal"} or not isinstance(value["refusal"], str):
        raise refusal('must have the form {"type": "refusal", "refusal": "..."}')
    return {"type": "output_text", "text": value["refusal"]}


Parts = Annotated[list[TextPart], FailFast(), at_most(MAX_MESSAGES), BeforeValidator(_as_parts)]
AnswerPart = Annotated[TextPart, BeforeValidator(_refusal_as_text)]
MessageParts = Annotated[
    list[AnswerPart], FailFast(), at_most(MAX_MESSAGES), BeforeValidator(_as_parts)
]
Status = Literal["in_progress", "completed", "incomplete"]


def _text(parts: Iterable[TextPart]) -> str:
    return "".join(part.text for part in parts)


class MessageItem(WireModel):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageParts
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class DirectCaller(WireModel):
    """The model called the function itself; of OpenAI's servers, a program may have."""

    type: Literal["direct"]


class CallItem(WireModel):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, AfterValidator(whole_characters)]
    parsed_arguments: Parsed | None = None
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None
    caller: DirectCaller | None = None
    # The openai package sends its own name of the field, which Python has a word for.
    runs_async: OnlyFalse = Field(default=False, validation_alias=AliasChoices("async", "async_"))


class CallOutputItem(WireModel):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: Status | None = None
    caller: DirectCaller | None = None


class ReasoningItem(WireModel):
    """What the model thought in an earlier answer."""

    type: Literal["reasoning"]
    summary: Parts = Field(default_factory=list)
    content: Parts = Field(default_factory=list)
    encrypted_content: str | None = None
    id: str | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        """The reasoning: itself, as this server sealed it, or in short."""
        return _text(self.content) or unsealed(self.encrypted_content or "") or _text(self.summary)


def _form_of_item(value: object) -> str | None:
    if isinstance(value, dict):
        kind = value.get("type", "message" if "role" in value else None)
    else:
        kind = getattr(value, "type", None)
    return FORM + kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag(FORM + "message")]
    | Annotated[CallItem, Tag(FORM + "function_call")]
    | Annotated[CallOutputItem, Tag(FORM + "function_call_output")]
    | Annotated[ReasoningItem, Tag(FORM + "reasoning")],
    Discriminator(
        _form_of_item,
        custom_error_type=UNSUPPORTED,
        custom_error_message="this server takes items of these types only: message, "
        "function_call, function_call_output, reasoning",
    ),
]


def as_items(value: object) -> object:
    """Text alone is short for one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def messages_of(items: Iterable[Item]) -> list[Message]:
    """The chat that the items make up: one message for all that one answer brought."""
    chat: list[Message] = []
    answer: list[Message] = []
    for item in items:
        addition = _of_answer(item)
        if addition is None or _begins_anew(answer, item):
            chat += _joined(answer)
            answer = []
        if addition is None:
            chat.append(_of_others(item))
        else:
            answer.append(addition)
    return chat + _joined(answer)


def _joined(parts: Sequence[Message]) -> list[Message]:
    """One message of all that an answer brought; none of nothing.

    At once: to add the parts one by one takes a time that grows with the square of their number.
    """
    if not parts:
        return []
    whole = Message(
        "assistant",
        "".join(part.content for part in parts),
        reasoning=next((part.reasoning for part in parts if part.reasoning), None),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )
    return [whole]


def _of_answer(item: Item) -> Message | None:
    """What an item adds to the model's own message; None if it is somebody else's."""
    if isinstance(item, ReasoningItem):
        return Message("assistant", reasoning=item.text or None)
    if isinstance(item, CallItem):
        return Message("assistant", tool_calls=(ToolCall(item.name, item.arguments, item.call_id),))
    if isinstance(item, MessageItem) and item.role == "assistant":
        return Message("assistant", _text(item.content))
    return None


def _of_others(item: Item) -> Message:
    if isinstance(item, CallOutputItem):
        return Message("tool", _text(item.output), tool_call_id=item.call_id)
    assert isinstance(item, MessageItem), "all other items are the model's own"
    return Message("user" if item.role == "user" else "system", _text(item.content))


def _begins_anew(answer: Sequence[Message], item: Item) -> bool:
    """The item can't belong to the answer so far: reasoning and text come before calls."""
    if not answer or isinstance(item, CallItem):
        return False
    if answer[-1].tool_calls:
        return True
    return isinstance(item, ReasoningItem) and any(part.content for part in answer)
