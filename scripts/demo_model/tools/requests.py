"""What a user says so that a tool has to be called, and the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo_model.dice import Dice
from demo_model.phrasing import in_words, question, request
from demo_model.tools.schemas import Tool, plain_value

_SUFFIXES = (
    "",
    "",
    "",
    "",
    "",
    " Use the tool.",
    " Use a tool.",
    " Call the function.",
    " Use the {} tool.",
)


@dataclass(frozen=True)
class Call:
    """A tool to be called.

    Args:
        name: of the function.
        arguments: in the order of the schema.
    """

    name: str
    arguments: dict[str, Any]

    @property
    def message(self) -> dict[str, Any]:
        """As part of an assistant's message."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def tool_request(dice: Dice, tool: Tool) -> tuple[str, Call]:
    """A request, with all that is required and some of what is not."""
    return _in_words(dice, tool) if tool.action else _by_name(dice, tool)


def _in_words(dice: Dice, tool: Tool) -> tuple[str, Call]:
    properties = tool.parameters["properties"]
    required = tool.parameters.get("required", [])
    arguments: dict[str, Any] = {}
    said: list[str] = []
    for name, field in tool.kinds.items():
        assert field is not None, "an action's parameters have kinds"
        if name not in required and not dice.chance(0.6):
            continue
        value = field.value(dice, properties[name])
        arguments[name] = value.content
        said.append(value.said)
    if dice.chance(0.5):
        dice.shuffle(said)
    # A quoted sentence stands last, where it can't be taken for more of the request.
    said.sort(key=lambda text: text.startswith("saying"))
    asked = " ".join([tool.action, *said])
    is_question = tool.action.startswith(("what", "how"))
    text = question(dice, asked) if is_question else request(dice, asked)
    if text[-1] in ".?!":
        text += dice.pick(_SUFFIXES).format(tool.name)
    return text, Call(tool.name, arguments)


def _by_name(dice: Dice, tool: Tool) -> tuple[str, Call]:
    properties = tool.parameters["properties"]
    required = tool.parameters.get("required", [])
    arguments: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, schema in properties.items():
        if name in required or dice.chance(0.6):
            arguments[name], written[name] = plain_value(dice, schema)
    names = list(written)
    if dice.chance(0.3):
        dice.shuffle(names)
    form = dice.pick(("{} = {}", "{} set to {}", "{} {}", "{}: {}", "the {} {}"))
    listed = in_words([form.format(name, written[name]) for name in names]) if names else ""
    verb = dice.pick(
        ("call {}", "use {}", "run {}", "call the function {}", "use the tool {}", "invoke {}")
    )
    asked = verb.format(tool.name) + (f" with {listed}" if listed else "")
    return request(dice, asked), Call(tool.name, arguments)
