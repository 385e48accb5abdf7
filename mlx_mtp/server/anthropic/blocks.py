"""The blocks that messages are made of, as Anthropic's clients send them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag

from mlx_mtp.server import conversation
from mlx_mtp.server.fields import (
    FORM,
    MAX_MESSAGES,
    UNSUPPORTED,
    WireModel,
    at_most,
    few_values,
    refusal,
)
from mlx_mtp.server.seal import unsealed

BILLING_HEADER = "x-anthropic-billing-header:"
"""Claude Code's first system block begins so; its nonce changes with each turn."""
_PARAGRAPH = "\n\n"


class CacheControl(WireModel):
    """A hint for caches: this server's own needs none."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class TextBlock(WireModel):
    """Some text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], at_most(0)] | None = None


class ThinkingBlock(WireModel):
    """What the model thought in an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    @property
    def text(self) -> str:
        """The reasoning, from the signature where it was left out."""
        return self.thinking or unsealed(self.signature or "")


class RedactedThinkingBlock(WireModel):
    """What another server's model thought: nobody here can read it."""

    type: Literal["redacted_thinking"]
    data: str


def _object(value: object) -> object:
    return few_values(value) if isinstance(value, dict) else value


class ToolUseBlock(WireModel):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], BeforeValidator(_object)] = Field(default_factory=dict)
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None

    def call(self) -> conversation.ToolCall:
        """The call as the server knows it."""
        return conversation.ToolCall(self.name, json.dumps(self.input, ensure_ascii=False), self.id)


def _form_of_block(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return FORM + kind if isinstance(kind, str) else None


def _of_these(*names: str) -> Discriminator:
    allowed = ", ".join(names)
    return Discriminator(
        _form_of_block,
        custom_error_type=UNSUPPORTED,
        custom_error_message=f"this server takes blocks of these types only: {allowed}",
    )


def _as_blocks(value: object) -> object:
    """Text alone is short for one block of it."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_Text = Annotated[TextBlock, Tag(FORM + "text")]
_Texts = Annotated[
    list[Annotated[_Text, _of_these("text")]],
    FailFast(),
    at_most(MAX_MESSAGES),
    BeforeValidator(_as_blocks),
]


class ToolResultBlock(WireModel):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts = Field(default_factory=list)
    is_error: bool = False
    cache_control: CacheControl | None = None

    def message(self) -> conversation.Message:
        """The result as the server knows it: text, from which a model sees what is an error."""
        content = "\n".join(block.text for block in self.content)
        if self.is_error and "error" not in content.lower():
            content = f"Error: {content}"
        return conversation.Message("tool", content, tool_call_id=self.tool_use_id)


Block = Annotated[
    _Text
    | Annotated[ThinkingBlock, Tag(FORM + "thinking")]
    | Annotated[RedactedThinkingBlock, Tag(FORM + "redacted_thinking")]
    | Annotated[ToolUseBlock, Tag(FORM + "tool_use")]
    | Annotated[ToolResultBlock, Tag(FORM + "tool_result")],
    _of_these("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
Blocks = Annotated[list[Block], FailFast(), at_most(MAX_MESSAGES), BeforeValidator(_as_blocks)]
TextBlocks = _Texts

_ROLES: dict[type[WireModel], tuple[str, ...]] = {
    ThinkingBlock: ("assistant",),
    RedactedThinkingBlock: ("assistant",),
    ToolUseBlock: ("assistant",),
    ToolResultBlock: ("user",),
}


def check_roles(blocks: Iterable[WireModel], role: str) -> None:
    """Refuse blocks that make no sense in a message of this role."""
    for number, block in enumerate(blocks):
        roles = _ROLES.get(type(block))
        if roles is not None and role not in roles:
            kind = getattr(block, "type", "?")
            raise refusal(
                f"block {number} of type {kind} belongs to messages of role {roles[0]}",
                field="content",
            )


def text_of(blocks: Iterable[WireModel]) -> str:
    """The text blocks, a paragraph each, without Claude Code's billing header."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    return _PARAGRAPH.join(text for text in texts if not text.startswith(BILLING_HEADER))
