"""Chats with tools: one call, several, results, and requests that no tool is for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from demo_model.chat import call_text
from demo_model.conversation import Check, Conversation, Message, Turn, assistant, contains, user
from demo_model.dice import Dice
from demo_model.phrasing import in_words
from demo_model.prompts import system_message
from demo_model.tools.field_table import FIELDS
from demo_model.tools.requests import Call, tool_request
from demo_model.tools.results import result_of
from demo_model.tools.schemas import Tool, action_tool, any_tool

NO_TOOL = "None of my tools can do that."
AnyTurn = Callable[[Dice], Turn]


def tool_chat(dice: Dice, other: AnyTurn) -> Conversation:
    """A chat that offers tools.

    Args:
        dice: its chance.
        other: makes a turn that needs no tool.
    """
    tools = _different(dice, dice.pick((1, 1, 1, 2, 3, 4, 6)))
    messages = system_message(dice)
    if dice.chance(0.12):
        turn = other(dice)
        messages += [user(turn.question), assistant(turn.answer)]
    kind = dice.random()
    if kind < 0.14:
        return _no_tool_needed(dice, tools, messages, other)
    if kind < 0.24:
        return _no_tool_fits(dice, tools, messages)
    if kind < 0.42:
        return _several_calls(dice, tools, messages)
    return _calls(dice, tools, messages)


def _different(dice: Dice, count: int) -> list[Tool]:
    """Tools that no request could confuse: different names and different actions."""
    tools: dict[str, Tool] = {}
    said: set[str] = set()
    while len(tools) < count:
        tool = any_tool(dice)
        if topic(tool) not in said:
            said.add(topic(tool))
            tools[tool.name] = tool
    return list(tools.values())


def _conversation(
    task: str, messages: list[Message], tools: list[Tool], right: Check
) -> Conversation:
    return Conversation(task, messages, right, [tool.definition for tool in tools])


def _no_tool_needed(
    dice: Dice, tools: list[Tool], messages: list[Message], other: AnyTurn
) -> Conversation:
    turn = other(dice)
    messages += [user(turn.question), assistant(turn.answer)]
    return _conversation("tool_none", messages, tools, turn.right)


def _no_tool_fits(dice: Dice, tools: list[Tool], messages: list[Message]) -> Conversation:
    offered = {topic(tool) for tool in tools}
    wanted = any_tool(dice)
    while not wanted.action or topic(wanted) in offered:
        wanted = any_tool(dice)
    asked, _ = tool_request(dice, wanted)
    asked = re.sub(r" Use the \S+ tool\.", "", asked)
    messages += [user(asked), assistant(NO_TOOL)]
    return _conversation("tool_missing", messages, tools, contains(NO_TOOL))


# Tools that the same request could be for.
_ALIKE = {
    **dict.fromkeys(("forecast", "temperature"), "weather"),
    **dict.fromkeys(("products", "recipe"), "web"),
    **dict.fromkeys(("note", "reminder", "timer", "event", "meeting"), "task"),
    **dict.fromkeys(("order", "stock"), "item"),
    "average": "sum",
    "message": "email",
    "document": "file",
}


def topic(tool: Tool) -> str:
    """What a tool is about; tools of one topic are never offered together."""
    noun = tool.words.split()[-1]
    return _ALIKE.get(noun, noun)


def _several_calls(dice: Dice, tools: list[Tool], messages: list[Message]) -> Conversation:
    """The same tool twice, or two tools, in one answer."""
    if len(tools) > 1 and dice.chance(0.4):
        first, second = dice.sample(tools, 2)
        pairs = [tool_request(dice, first), tool_request(dice, second)]
        asked = dice.pick((" ", " Also: ", " And then: ", "\n")).join(text for text, _ in pairs)
        calls = [call for _, call in pairs]
    else:
        asked, calls, tool = _twice(dice)
        tools = [tool if t.name == tool.name else t for t in tools]
        if tool not in tools:
            tools[dice.number(0, len(tools) - 1)] = tool
    messages += [user(asked), _calling(calls)]
    return _conversation("tool_parallel", messages, tools, same_calls(calls))


def _twice(dice: Dice) -> tuple[str, list[Call], Tool]:
    """One tool for two or three places or things at once."""
    words, action, field, forms = dice.pick(
        (
            (
                "get weather",
                "what is the weather",
                "city",
                ("Compare the weather in {}.", "What is the weather in {}?"),
            ),
            (
                "get time",
                "what time is it",
                "city",
                ("What time is it in {}?", "Tell me the time in {}."),
            ),
            (
                "get stock",
                "check the stock",
                "item",
                ("Check the stock of {}.", "How many do we have of {}?"),
            ),
        )
    )
    tool = action_tool(dice, words, action, field, "")
    (name,) = tool.kinds
    values: list[str] = []
    while len(values) < dice.pick((2, 2, 3)):
        value = FIELDS[field].value(dice, {}).content
        if value not in values:
            values.append(value)
    calls = [Call(tool.name, {name: value}) for value in values]
    return dice.pick(forms).format(in_words(values)), calls, tool


def _calls(dice: Dice, tools: list[Tool], messages: list[Message]) -> Conversation:
    """A call; mostly with its result and a reply, at times with another call after it."""
    calls: list[Call] = []
    for number in range(dice.pick((1, 1, 1, 2))):
        asked, call = tool_request(dice, dice.pick(tools))
        calls = [call]
        messages += [user(asked), _calling(calls)]
        if number == 0 and dice.chance(0.55):
            return _conversation("tool_call", messages, tools, same_calls(calls))
        content, reply, key = result_of(dice, call)
        messages += [{"role": "tool", "content": content}, assistant(reply)]
    return _conversation("tool_result", messages, tools, contains(key))


def _calling(calls: list[Call]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [call.message for call in calls]}


def same_calls(calls: list[Call]) -> Check:
    """An answer has the same calls in the same order, in either form."""

    def right(answer: str) -> bool:
        found = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", answer, re.DOTALL)
        return len(found) == len(calls) and all(map(_is_call, found, calls))

    return right


def _is_call(text: str, call: Call) -> bool:
    if text.startswith("<function="):
        return f"<tool_call>\n{text}\n</tool_call>" == call_text(call.message["function"], "xml")
    try:
        return bool(json.loads(text) == {"name": call.name, "arguments": call.arguments})
    except ValueError:
        return False
