"""How a chat is written as text: ChatML with our own words for tools, as a template and in Python.

Two forms of tool calls: "hermes" (JSON, the demo model's) and "xml" (tags, the dense model's).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from demo_model.conversation import Conversation, Message

ToolFormat = Literal["hermes", "xml"]
Segment = tuple[str, bool]
"""A piece of a chat, and whether it is the model's to write."""

START, END = "<|im_start|>", "<|im_end|>"
_TOOLS_BEFORE = (
    "# Tools\n\n"
    "You can call the functions listed in <tools></tools>, one JSON object a line:\n<tools>"
)
_HOW = {
    "hermes": (
        "\n</tools>\n\nTo call a function, write its name and its arguments as JSON:\n<tool_call>\n"
        '{"name": NAME, "arguments": {KEY: VALUE}}\n</tool_call>'
    ),
    "xml": (
        "\n</tools>\n\nTo call a function, write its name and its arguments in tags:\n<tool_call>\n"
        "<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
    ),
}


def template(tool_format: ToolFormat) -> str:
    """The chat template, in the Jinja that transformers runs."""
    text = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    calls = (Path(__file__).parent / f"calls_{tool_format}.jinja").read_text(encoding="utf-8")
    values = {"TOOLS_BEFORE": _TOOLS_BEFORE, "TOOLS_AFTER": _HOW[tool_format]}
    for name, value in values.items():
        quoted = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        text = text.replace(f"@{name}@", f"'{quoted}'")
    return text.replace("@CALLS@", calls.strip()).strip()


def segments(conversation: Conversation, tool_format: ToolFormat) -> list[Segment]:
    """The chat in pieces, each of which is encoded on its own; equal to what the template writes.

    The pieces that are the model's begin after the generation prompt and end with the end token.
    """
    messages = conversation.messages
    out: list[Segment] = []
    written = _system(conversation, tool_format)
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            thinking = message.get("reasoning_content") if index > last else None
            out.append((f"{written}{START}assistant\n" + ("<think>\n" if thinking else ""), False))
            thought = f"{thinking}\n</think>\n\n" if thinking else ""
            out.append((f"{thought}{_answer(message, tool_format)}{END}", True))
            written = "\n"
        elif role == "tool":
            written += _tool_result(messages, index)
        elif role == "user" or index > 0:
            written += f"{START}{role}\n{message['content']}{END}\n"
    return out


def prompt_text(conversation: Conversation, tool_format: ToolFormat) -> str:
    """All of the chat before the last answer."""
    return "".join(text for text, _ in segments(conversation, tool_format)[:-1])


def _system(conversation: Conversation, tool_format: ToolFormat) -> str:
    first = conversation.messages[0]
    own = first["content"] if first["role"] == "system" else ""
    if not conversation.tools:
        return f"{START}system\n{own}{END}\n" if own else ""
    listed = "".join("\n" + json.dumps(t, ensure_ascii=False) for t in conversation.tools)
    before = f"{own}\n\n" if own else ""
    return f"{START}system\n{before}{_TOOLS_BEFORE}{listed}{_HOW[tool_format]}{END}\n"


def _answer(message: Message, tool_format: ToolFormat) -> str:
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        parts.append(call_text(call["function"], tool_format))
    return "\n".join(parts)


def _tool_result(messages: list[Message], index: int) -> str:
    text = ""
    if messages[index - 1]["role"] != "tool":
        text += f"{START}user"
    text += f"\n<tool_response>\n{messages[index]['content']}\n</tool_response>"
    if index + 1 == len(messages) or messages[index + 1]["role"] != "tool":
        text += f"{END}\n"
    return text


def call_text(function: dict[str, Any], tool_format: ToolFormat) -> str:
    """A call as the model writes it."""
    name, arguments = function["name"], function["arguments"]
    if tool_format == "hermes":
        written = json.dumps(arguments, ensure_ascii=False)
        return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'
    parameters = "".join(
        f"<parameter={key}>\n{_xml_value(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _xml_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
