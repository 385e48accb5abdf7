"""The bodies of /v1/messages and of its count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, model_validator

from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server import conversation
from mlx_mtp.server.anthropic.blocks import (
    Blocks,
    CacheControl,
    TextBlock,
    TextBlocks,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    check_roles,
    text_of,
)
from mlx_mtp.server.conversation import Conversation
from mlx_mtp.server.fields import (
    MAX_LABELS,
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheSalt,
    Float,
    Int,
    Stops,
    WireModel,
    at_most,
    few_values,
    refusal,
)
from mlx_mtp.server.options import Options
from mlx_mtp.server.structured_fields import Schema as AnswerSchema
from mlx_mtp.server.structured_fields import schema_grammar
from mlx_mtp.server.thinking import BUDGETS


class Message(WireModel):
    """One message of a chat."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> Message:
        check_roles(self.content, self.role)
        return self

    def messages(self) -> Iterator[conversation.Message]:
        """The message as the server knows it: a tool's result is a message of its own."""
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                yield block.message()
        text = text_of(self.content)
        if self.role == "assistant":
            calls = (block.call() for block in self.content if isinstance(block, ToolUseBlock))
            thoughts = [b.text for b in self.content if isinstance(b, ThinkingBlock)]
            yield conversation.Message(
                "assistant", text, reasoning="\n".join(thoughts) or None, tool_calls=tuple(calls)
            )
        elif text or any(isinstance(block, TextBlock) for block in self.content):
            yield conversation.Message(self.role, text)


Schema = Annotated[dict[str, Any], BeforeValidator(few_values)]


class Tool(WireModel):
    """A tool that the client runs."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    input_schema: Schema
    type: Literal["custom"] = "custom"
    description: str | None = None
    strict: bool = False
    # Nothing of these changes what a server does that streams every call and loads every tool.
    cache_control: CacheControl | None = None
    defer_loading: bool = False
    eager_input_streaming: bool | None = None

    def tool(self) -> conversation.Tool:
        """The tool as the server knows it."""
        return conversation.Tool(self.name, self.description, self.input_schema, self.strict)


def _client_tool(value: object) -> object:
    """Name the tools that Anthropic's own servers run."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        raise refusal(
            f"this server runs no tools of its own, such as {json.dumps(kind)[:80]}",
            field="type",
            unsupported=True,
        )
    return value


class ToolChoice(WireModel):
    """Whether the model calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise refusal("is only for type tool", field="name")
        return self

    def choice(self) -> conversation.ToolChoice:
        """The choice as the server knows it."""
        if self.name is not None:
            return conversation.ToolChoice("required", frozenset({self.name}))
        if self.type == "any":
            return conversation.ToolChoice("required")
        return conversation.ToolChoice("none" if self.type == "none" else "auto")


class Thinking(WireModel):
    """Whether the model thinks before it answers, and how long."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _a_budget_is_for_enabled(self) -> Thinking:
        if self.budget_tokens is not None and self.type != "enabled":
            raise refusal("is for type enabled", field="budget_tokens")
        return self


class OutputFormat(WireModel):
    """The form of the answer."""

    type: Literal["json_schema"]
    json_schema: AnswerSchema = Field(alias="schema")


class OutputConfig(WireModel):
    """How much effort goes into the answer, and its form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(WireModel):
    """Labels."""

    user_id: str | None = None


class KeptThinking(WireModel):
    """How many of the latest turns keep their thinking."""

    type: Literal["thinking_turns", "all"]
    value: Annotated[int, Field(ge=1)] | None = None


class ContextEdit(WireModel):
    """What to leave out of the chat.

    Thinking of earlier turns alone: Qwen's templates keep what they need of it by themselves.
    """

    type: Literal["clear_thinking_20251015"]
    keep: KeptThinking | Literal["all"] | None = None


class ContextManagement(WireModel):
    """What to leave out of a long chat."""

    edits: Annotated[list[ContextEdit], FailFast(), at_most(MAX_LABELS)] = Field(
        default_factory=list
    )


class CountRequest(WireModel):
    """POST /v1/messages/count_tokens."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Message], FailFast(), Field(min_length=1), at_most(MAX_MESSAGES)]
    system: TextBlocks = Field(default_factory=list)
    tools: Annotated[
        list[Annotated[Tool, BeforeValidator(_client_tool)]], FailFast(), at_most(MAX_TOOLS)
    ] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    # Hints for Anthropic's own servers.
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None

    @model_validator(mode="after")
    def _calls_have_results(self) -> CountRequest:
        # The last message would be the beginning of the answer, and a call can't be gone on with.
        if any(isinstance(block, ToolUseBlock) for block in self.messages[-1].content):
            raise refusal(
                "the last message has a tool_use block, and its result is missing: add a message "
                "of role user with a tool_result block, or leave the tool_use out",
                field="messages",
            )
        return self

    def conversation(self) -> Conversation:
        """What the model is asked, as the server knows it."""
        messages = [message for wire in self.messages for message in wire.messages()]
        system = text_of(self.system)
        if system:
            messages.insert(0, conversation.Message("system", system))
        last = messages[-1] if messages else None
        choice = self.tool_choice
        return Conversation(
            messages=messages,
            tools=[tool.tool() for tool in self.tools],
            tool_choice=choice.choice() if choice else conversation.ToolChoice(),
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            thinking=self._thinking,
            thinking_budget=self._budget,
            response=self._response,
            response_field="output_format" if self.output_format else "output_config.format",
            continue_final=last is not None and last.role == "assistant",
        )

    @property
    def _thinking(self) -> bool | None:
        if self.thinking is None:
            return False
        return {"enabled": True, "disabled": False}.get(self.thinking.type)

    @property
    def _budget(self) -> int | None:
        effort = self.output_config.effort if self.output_config else None
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            return self.thinking.budget_tokens
        return BUDGETS.get(effort) if effort else None

    @property
    def _response(self) -> GrammarSpec | None:
        form = (self.output_config and self.output_config.format) or self.output_format
        if form is None:
            return None
        return schema_grammar(form.json_schema)


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 63)]
    stream: bool = False
    temperature: Annotated[Float, Field(le=1.0)] | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    stop_sequences: Stops = Field(default_factory=list)
    # Not of this API, but of the others here.
    cache_salt: CacheSalt | None = None
    seed: Int | None = None
    # Labels, which mean nothing to a model.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: Annotated[dict[str, Any], at_most(MAX_LABELS)] | None = None

    def options(self) -> Options:
        """The numbers, as the server knows them."""
        return Options(
            max_tokens=self.max_tokens,
            # "The absolute maximum": agents ask for more than small contexts have.
            cut_to_context=True,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            seed=self.seed,
            user=self.metadata.user_id if self.metadata is not None else None,
            cache_salt=self.cache_salt,
        )
