"""A chat in the server's own form, whichever API it came through."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlx_mtp.sampling.params import GrammarSpec

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

BUDGETS: Mapping[str, int] = {"minimal": 512, "low": 2048}
"""Most tokens to think at an effort; at higher ones the model thinks as long as it likes."""
_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an earlier answer; its arguments are JSON text, or what the model wrote."""

    name: str
    arguments: str
    id: str | None = None

    def for_template(self, *, as_object: bool = False) -> dict[str, Any]:
        """The call, with an object for its text; other text is a field of one if `as_object`."""
        arguments = object_or_text(self.arguments)
        if as_object and isinstance(arguments, str):
            arguments = {"arguments": arguments}
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    """A message; one of role tool answers the call `tool_call_id`."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def for_template(self, *, as_object: bool = False) -> dict[str, Any]:
        calls = [call.for_template(as_object=as_object) for call in self.tool_calls]
        more = {
            "name": self.name,
            "reasoning_content": self.reasoning,
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
        }
        given = {name: value for name, value in more.items() if value is not None}
        return {"role": self.role, "content": self.content, **given}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; if `strict`, calls must fit the schema `parameters`."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """The tool as the client described it, with its fields in the usual order."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or can't call tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: frozenset[str] | None = None  # of the tools that it may call; None: all
    field: str = "tool_choice"  # the name in the request, for errors


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the model is asked, and how it may answer."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True  # one answer may have several calls
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # the client's own
    thinking: bool | None = None  # None: as the template has it
    thinking_budget: int | None = None  # most tokens to think; then the think block is closed
    response: GrammarSpec | None = None  # the form of an answer that is no tool call
    response_field: str = "response_format"  # the name in the request, for errors
    effort: str | None = None  # how much to think, for templates that know OpenAI's word
    continue_final: bool = False  # the last message is the beginning of the answer
    generation_prompt: bool = True  # the prompt ends with the beginning of an answer
    template: str | None = None  # the client's own

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt describes; calls of others are text."""
        if self.tool_choice.mode == "none":
            return []
        names = self.tool_choice.names
        return [tool for tool in self.tools if names is None or tool.name in names]

    def with_effort(self, effort: Effort | None) -> Conversation:
        """The same chat with as much thinking as OpenAI's `reasoning_effort` asks for."""
        if effort is None:
            return self
        budget = BUDGETS.get(effort) if self.thinking_budget is None else self.thinking_budget
        return replace(self, thinking=effort != "none", thinking_budget=budget, effort=effort)


def folded(messages: Iterable[Message]) -> list[Message]:
    """The same chat with at most one message of role system, the first.

    Agents send more of them, and Qwen's templates take no other. A later one becomes a part of the
    user's message before it, or a user's message: if the first message changed with each turn, no
    prefix could be reused.
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


def object_or_text(text: str) -> Any:
    """The value of an object's JSON text, {} for blank text; other text as it is."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
