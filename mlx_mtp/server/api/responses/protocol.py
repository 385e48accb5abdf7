"""The body of /v1/responses."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AliasChoices,
    BeforeValidator,
    FailFast,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.server.api import schema as fields
from mlx_mtp.server.api.forms import AnswerSchema, AnswerType, type_grammar
from mlx_mtp.server.api.history import readable
from mlx_mtp.server.api.schema import FORM, Many, ManyTools, WireModel, at_most, refusal
from mlx_mtp.server.generation import pictures
from mlx_mtp.server.generation.inputs import (
    AnswerOptions,
    Conversation,
    Effort,
    Message,
    ToolCall,
    unwrap,
)
from mlx_mtp.server.http.errors import from_validation

# Codex sends these to every server; the prompt describes functions only.
_IGNORED_TOOLS = {
    *("custom", "local_shell", "tool_search", "web_search", "web_search_preview"),
    *("namespace", "image_generation"),
}
ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_Included = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]

_INCLUDED = get_args(_Included)

_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_JoinedText = Annotated[str, fields.joined_text(*_PARTS), at_most(fields.MAX_MESSAGES)]
_JoinedContent = Annotated[
    str, fields.joined_text(*_PARTS, "input_image"), at_most(fields.MAX_MESSAGES)
]


class _AnyItem(WireModel):
    parts: ClassVar[Mapping[str, str]] = {}  # fields that the API lists as parts of these types
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def listed(self, name: str) -> dict[str, Any]:
        """Returns the item as the API lists it, with the id `name` if it has none."""
        fields = {
            "id": name,
            "status": "completed",
            **self.model_dump(exclude_defaults=True, exclude={"parsed_arguments"}),
        }
        for field, kind in self.parts.items():
            text = fields.get(field, "")
            fields[field] = [{"type": kind, "text": text}] if text else []
        return fields


class _MessageItem(_AnyItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _JoinedContent
    phase: Literal["commentary", "final_answer"] | None = None

    def listed(self, name: str) -> dict[str, Any]:
        parts = pictures.listed(self.content, ("input_text", "input_image"))
        if isinstance(parts, str):
            parts = [{"type": "input_text", "text": parts}]
            if self.role == "assistant":
                parts[0] |= {"type": "output_text", "annotations": []}
        return {"type": self.type, **super().listed(name), "content": parts}

    def message(self) -> Message:
        role = "system" if self.role == "developer" else self.role
        return Message(role, self.content)


class _DirectCaller(WireModel):
    type: Literal["direct"]  # the model; with OpenAI's servers also a program


class _CallItem(_AnyItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: fields.Arguments
    parsed_arguments: fields.Parsed | None = None
    namespace: str | None = None
    caller: _DirectCaller | None = None
    # `async` is a keyword in Python, so the openai package sends `async_`.
    runs_async: fields.OnlyFalse = Field(False, validation_alias=AliasChoices("async", "async_"))

    def message(self) -> Message:
        return Message("assistant", tool_calls=(ToolCall(self.name, self.arguments, self.call_id),))


class _CallOutputItem(_AnyItem):
    type: Literal["function_call_output"]
    call_id: str
    output: _JoinedContent
    caller: _DirectCaller | None = None

    def listed(self, name: str) -> dict[str, Any]:
        output = pictures.listed(self.output, ("input_text", "input_image"))
        return super().listed(name) | {"output": output}

    def message(self) -> Message:
        return Message("tool", self.output, tool_call_id=self.call_id)


class _ReasoningItem(_AnyItem):
    parts: ClassVar[Mapping[str, str]] = {"summary": "summary_text", "content": "reasoning_text"}
    type: Literal["reasoning"]
    summary: _JoinedText = ""
    content: _JoinedText = ""
    encrypted_content: str | None = None

    def message(self) -> Message:
        text = self.content or unwrap(self.encrypted_content or "") or self.summary
        return Message("assistant", reasoning=text)


_TYPES = "message, function_call, function_call_output, reasoning"
InputItem = Annotated[
    Annotated[_MessageItem, Tag(FORM + "message")]
    | Annotated[_CallItem, Tag(FORM + "function_call")]
    | Annotated[_CallOutputItem, Tag(FORM + "function_call_output")]
    | Annotated[_ReasoningItem, Tag(FORM + "reasoning")],
    fields.form_by_type(f"this server takes items of these types only: {_TYPES}", role="message"),
]


_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)


def items_of(inputs: Iterable[bytes]) -> list[InputItem]:
    """Returns stored items as a request has them.

    Raises RequestError for an item that a client could not send.
    """
    try:
        # One by one: other threads run only between pydantic's calls.
        return [_ITEM.validate_json(item) for item in inputs]
    except ValidationError as error:
        raise from_validation(error) from None


_as_items = fields.text_or_list("items", lambda text: {"role": "user", "content": text})


def _messages(items: Iterable[InputItem]) -> list[Message]:
    # The items of one answer become one message.
    turns: list[list[Message]] = []
    for message in (item.message() for item in items):
        if turns and _continues(turns[-1], message):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [
        Message(
            turn[0].role,
            "".join(part.content for part in turn),
            reasoning=next((part.reasoning for part in turn if part.reasoning), None),
            tool_calls=tuple(call for part in turn for call in part.tool_calls),
            tool_call_id=turn[0].tool_call_id,
        )
        for turn in turns
    ]


def _continues(turn: Sequence[Message], part: Message) -> bool:
    # Within an answer reasoning comes before text, and both before calls.
    if part.role != "assistant" or turn[0].role != "assistant":
        return False
    if part.tool_calls or turn[-1].tool_calls:
        return bool(part.tool_calls)
    return part.reasoning is None or not any(earlier.content for earlier in turn)


class _ResponsesNamedTool(WireModel):
    type: Literal["function"]
    name: str


class _FunctionTool(fields.Function, _ResponsesNamedTool):
    defer_loading: bool | None = None


class _ResponsesAllowedTools(WireModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[ManyTools[_ResponsesNamedTool], Field(min_length=1)]


class _ReasoningOptions(WireModel):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class _TextFormat(WireModel):
    type: AnswerType = "text"
    name: str | None = None
    description: str | None = None
    schema_: AnswerSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _a_schema_is_there(self) -> Self:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise refusal("is only for type json_schema", field="schema")
        return self


class _TextConfig(WireModel):
    format: _TextFormat = Field(default_factory=_TextFormat)


def _no_conversations(_: object) -> object:
    raise refusal("this server has none; continue a previous_response_id", unsupported=True)


class _StreamOptions(WireModel):
    """An object without fields: a stream has nothing but the answer."""


@fields.sampled("temperature", "top_p", "top_k", "seed")
class ResponsesRequest(fields.AnswerRequest, fields.OpenAILabels):
    """POST /v1/responses."""

    input: Annotated[Many[InputItem], readable, _as_items]
    instructions: str | None = None
    stream_options: _StreamOptions | None = None
    max_output_tokens: fields.Int | None = None
    top_logprobs: fields.Int | None = None
    tools: Annotated[
        ManyTools[Annotated[_FunctionTool, fields.unless_dropped(_IGNORED_TOOLS.__contains__)]],
        fields.without_none,
    ] = Field([])
    tool_choice: fields.OpenAIToolChoice[_ResponsesNamedTool, _ResponsesAllowedTools] = "auto"
    parallel_tool_calls: bool = True
    reasoning: _ReasoningOptions = Field(default_factory=_ReasoningOptions)
    text: _TextConfig = Field(default_factory=_TextConfig)
    include: Annotated[
        list[_Included], FailFast(), fields.known_only(*_INCLUDED), at_most(fields.MAX_LABELS)
    ] = Field([])
    store: bool | None = None  # None: stored if possible
    previous_response_id: str | None = None
    conversation: Annotated[None, BeforeValidator(_no_conversations)] = None
    max_tool_calls: fields.Int | None = None  # without effect: limits tools that a server runs
    chat_template_kwargs: fields.TemplateKwargs = Field({})
    client_metadata: Annotated[dict[str, Any], at_most(fields.MAX_LABELS)] | None = None

    def options(self) -> AnswerOptions:
        default = 0 if _LOGPROBS in self.include else None
        top_logprobs = default if self.top_logprobs is None else self.top_logprobs
        return AnswerOptions(
            self.sampling(max_tokens=self.max_output_tokens, top_logprobs=top_logprobs),
            max_tokens_field="max_output_tokens",
            user=self.user or self.safety_identifier,
        )

    def listed_input(self, answer_id: str) -> Iterator[dict[str, Any]]:
        for number, item in enumerate(self.input):
            yield item.listed(f"{answer_id}-{number}")

    def conversation_after(self, earlier: Sequence[InputItem] = ()) -> Conversation:
        count, most = len(earlier) + len(self.input), fields.MAX_MESSAGES
        if count > most:
            message = f"The chat that is continued has {count} items; at most {most} are allowed."
            raise InvalidRequestError(message, param="previous_response_id")
        messages = _messages((*earlier, *self.input))
        if self.instructions:
            messages.insert(0, Message("system", self.instructions))
        if not messages:
            raise InvalidRequestError("input must not be empty.", param="input")
        chat = Conversation(
            messages=messages,
            tools=[tool.tool() for tool in self.tools],
            tool_choice=fields.tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response=type_grammar(self.text.format.type, self.text.format.schema_),
            response_field="text.format",
        )
        return chat.with_template_kwargs(self.chat_template_kwargs).with_effort(
            self.reasoning.effort
        )
