"""A chat as the server knows it, whichever API it came through."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.sampling.params import GrammarSpec

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

BUDGETS: Mapping[str, int] = {"minimal": 512, "low": 2048}
"""Most tokens to think at an effort; at the higher ones the model thinks as long as it likes."""
_BUDGET = "thinking_budget"
_BUDGET_FIELD = f"chat_template_kwargs.{_BUDGET}"
_MAX_BUDGET = 1 << 31
_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an earlier answer; its arguments are JSON text, if the model wrote any."""

    name: str
    arguments: str
    id: str | None = None

    def for_template(self, *, as_object: bool = False) -> dict[str, Any]:
        """The call; an object's text becomes the object, other text its field if `as_object`."""
        arguments = object_or_text(self.arguments)
        if as_object and isinstance(arguments, str):
            arguments = {"arguments": arguments}
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    """One message; a message of role tool answers the call `tool_call_id`."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def for_template(self, *, as_object: bool = False) -> dict[str, Any]:
        calls = [call.for_template(as_object=as_object) for call in self.tool_calls]
        more = _given(
            name=self.name,
            reasoning_content=self.reasoning,
            tool_call_id=self.tool_call_id,
            tool_calls=calls or None,
        )
        return {"role": self.role, "content": self.content, **more}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; if `strict`, calls must fit the schema `parameters`."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """The tool as the client described it, in the usual order of fields."""
        more = _given(description=self.description, parameters=self.parameters)
        return {"type": "function", "function": {"name": self.name, **more}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or can't call tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: frozenset[str] | None = None  # the only ones; None: all
    field: str = "tool_choice"  # of the request that says so


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the model is asked."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True  # one answer may have several
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # the client's own
    thinking: bool | None = None  # None: as the template does by itself
    thinking_budget: int | None = None  # most tokens to think; then the think block is closed
    response: GrammarSpec | None = None  # the form of an answer that is no tool call
    response_field: str = "response_format"  # of the request that says so
    effort: str | None = None  # how much to think, for templates that know OpenAI's word
    continue_final: bool = False  # the last message is the beginning of the answer
    generation_prompt: bool = True  # the prompt ends with the beginning of an answer
    template: str | None = None  # the client's own

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt describes; only their calls are read."""
        if self.tool_choice.mode == "none":
            return []
        names = self.tool_choice.names
        return [tool for tool in self.tools if names is None or tool.name in names]

    def with_effort(self, effort: Effort | None) -> Conversation:
        """The same, with as much thinking as OpenAI's `reasoning_effort` asks for."""
        if effort is None:
            return self
        budget = BUDGETS.get(effort) if self.thinking_budget is None else self.thinking_budget
        return replace(self, thinking=effort != "none", thinking_budget=budget, effort=effort)


def split_template_kwargs(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """The kwargs that are the template's, and the thinking budget, which is the server's."""
    rest = dict(kwargs)
    budget = rest.pop(_BUDGET, None)
    if budget is None:
        return rest, None
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget < _MAX_BUDGET:
        raise InvalidRequestError(
            f"{_BUDGET_FIELD} must be a number of tokens, 0 or more.", param=_BUDGET_FIELD
        )
    return rest, budget


def folded(messages: Iterable[Message]) -> list[Message]:
    """The same chat with at most one message of role system, the first: Qwen's templates take no
    other, but agents send them.

    Others become part of the user's message before them, or one of their own: a first message that
    changed with each turn would spoil the prefix cache.
    """
    chat: list[Message] = []
    for message in messages:
        if message.role != "system" or not chat:
            chat.append(message)
        elif chat[-1].role in ("system", "user"):
            last = chat.pop()
            chat.append(replace(last, content=last.content + _BETWEEN + message.content))
        else:
            chat.append(replace(message, role="user"))
    return chat


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def object_or_text(text: str) -> Any:
    """A JSON object's value; no text at all is an object without fields; other text stays."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
