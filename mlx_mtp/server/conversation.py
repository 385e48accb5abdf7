"""A chat as the server knows it, whichever API it came through."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlx_mtp.sampling.params import GrammarSpec

Role = Literal["system", "user", "assistant", "tool"]
_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an earlier answer.

    Args:
        name: of the function.
        arguments: as the client sent them back: JSON text, if the model wrote any.
        id: the client's name for the call.
    """

    name: str
    arguments: str
    id: str | None = None

    def for_template(self, *, as_object: bool = False) -> dict[str, Any]:
        """The call; arguments that are an object become one, as Qwen's templates want them.

        Args:
            as_object: the template takes nothing else. Arguments that are none (the answer ended
                within them) become the one field of one.
        """
        arguments = object_or_text(self.arguments)
        if as_object and isinstance(arguments, str):
            arguments = {"arguments": arguments}
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Args:
        role: whose it is.
        content: its text.
        reasoning: what the model thought before it answered; None: not told.
        tool_calls: what the model called.
        tool_call_id: the call that a message of role tool answers.
        name: of the author or of the tool; None: not told.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def for_template(self, *, as_object: bool = False) -> dict[str, Any]:
        """The message as chat templates take it, with what is known and nothing else.

        Args:
            as_object: see `ToolCall.for_template`.
        """
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        for key, value in (
            ("name", self.name),
            ("reasoning_content", self.reasoning),
            ("tool_call_id", self.tool_call_id),
        ):
            if value is not None:
                fields[key] = value
        if self.tool_calls:
            fields["tool_calls"] = [
                call.for_template(as_object=as_object) for call in self.tool_calls
            ]
        return fields


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Args:
        name: of the function.
        description: what it does.
        parameters: JSON schema of its parameters.
        strict: calls must fit the schema.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """The tool as the client described it, in the usual order of fields."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools, and which.

    Args:
        mode: "auto": as it likes; "none": it is not told of any; "required": it must.
        names: the only ones that it may call; None: all.
        field: where the client said so.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: frozenset[str] | None = None
    field: str = "tool_choice"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the model is asked.

    Args:
        messages: in order; see `folded` for those of role system.
        tools: that the model may call.
        tool_choice: whether it may or must.
        parallel_tool_calls: one answer may have several calls.
        template_kwargs: the client's own settings for the chat template.
        thinking: whether the model is to think first; None: as its template does by itself.
        thinking_budget: most tokens to think; then the think block is closed.
        continue_final: the last message is the beginning of the answer.
        response: the form that an answer must have if it is no tool call.
        response_field: where the client said so.
        effort: OpenAI's word for how much to think, for templates that know it.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    thinking_budget: int | None = None
    response: GrammarSpec | None = None
    response_field: str = "response_format"
    effort: str | None = None
    continue_final: bool = False

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of, and whose calls are read."""
        if self.tool_choice.mode == "none":
            return []
        names = self.tool_choice.names
        return [tool for tool in self.tools if names is None or tool.name in names]


def folded(messages: Iterable[Message]) -> list[Message]:
    """The same chat with at most one message of role system, the first.

    Qwen's templates take no other, but agents send them in mid-chat: those become part of the
    user's message before them, or one of their own. They stay in their place: a first message that
    changed with each turn would spoil what the server has computed of the chat.
    """
    groups: list[list[Message]] = []
    for message in messages:
        last = groups[-1][0] if groups else None
        if message.role != "system" or last is None:
            groups.append([message])
        elif last.role in ("system", "user"):
            groups[-1].append(message)
        else:
            groups.append([replace(message, role="user")])
    return [
        replace(group[0], content=_BETWEEN.join(each.content for each in group))
        if len(group) > 1
        else group[0]
        for group in groups
    ]


def object_or_text(text: str) -> Any:
    """A JSON object's value; no text at all is an object without fields; other text stays."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
