"""What the demo models learn: answers are right, text is whole, and equal seeds are equal."""

import json
import re
from collections import Counter
from itertools import pairwise

import pytest
from jsonschema import Draft202012Validator

from demo_model.chat import prompt_text, segments
from demo_model.dice import Dice
from demo_model.mixture import (
    OPEN,
    OPEN_TASKS,
    SMALL_TASKS,
    Settings,
    closed_turn,
    conversation,
    is_held_out,
    training_chat,
    weak_tasks_first,
)
from demo_model.tasks import arithmetic
from demo_model.tools.chats import tool_chat
from demo_model.tools.requests import tool_request
from demo_model.tools.schemas import any_tool
from mlx_mtp.server.parsing.events import ToolArguments, ToolBroken, ToolStart
from mlx_mtp.server.parsing.formats import OutputFormat

SETTINGS = Settings()
FORMATS = ("hermes", "xml")


@pytest.fixture(scope="module")
def chats():
    dice = Dice("test")
    return [training_chat(dice, SETTINGS) for _ in range(1500)]


def answer_of(chat, tool_format: str) -> str:
    text = segments(chat, tool_format)[-1][0].removesuffix("<|im_end|>")
    return text.split("\n</think>\n\n")[-1]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_every_answer_is_right_by_its_own_check(chats, tool_format):
    wrong = [c.task for c in chats if not c.right(answer_of(c, tool_format))]
    assert wrong == []


def test_checks_refuse_other_answers(chats):
    """An answer of another chat of the same task is mostly wrong, and nonsense always is."""
    for chat in chats:
        assert not chat.right("nonsense"), chat.task
    by_task: dict[str, list] = {}
    for chat in chats:
        by_task.setdefault(chat.task, []).append(chat)
    loose = OPEN_TASKS | {"refusal", "tool_missing", "needle_missing", "tool_none"}
    for task, group in by_task.items():
        if task in loose or len(group) < 10:
            continue
        others = [
            a.right(answer_of(b, "hermes")) for a, b in pairwise(group) if a.messages != b.messages
        ]
        assert sum(others) < 0.5 * len(others), task


def test_all_kinds_of_tasks_come_up(chats):
    found = Counter(chat.task for chat in chats)
    assert len(found) > 50
    assert found.keys() >= OPEN_TASKS
    assert {"tool_call", "tool_missing", "agent_call", "needle_long", "refusal"} <= found.keys()


def test_training_never_asks_what_is_held_out(chats):
    assert not any(is_held_out(chat) for chat in chats)
    dice = Dice("any")
    some = [conversation(dice, SETTINGS) for _ in range(1500)]
    large = [chat for chat in some if chat.task not in SMALL_TASKS]
    assert 0.2 < sum(map(is_held_out, large)) / len(large) < 0.3


def test_what_a_model_does_badly_comes_more_often():
    figures = {"story": 1.0, "add": 1.0, "sort_num": 0.92, "compare": 0.4, "edit": 0.955}
    keep = weak_tasks_first({task: {"exact": exact} for task, exact in figures.items()})
    assert keep == {"story": 1.0, "add": 0.3, "sort_num": 1.0, "compare": 1.0, "edit": 0.65}
    dice = Dice("kept")
    found = Counter(training_chat(dice, SETTINGS, {"add": 0.0}).task for _ in range(400))
    assert found["sort_num"] and found["story"]
    assert not found["add"]


def test_arithmetic_by_python():
    dice = Dice("sums")
    for _ in range(400):
        turn = dice.pick((arithmetic.addition, arithmetic.product))(dice)
        for left, right in re.findall(
            r"([\d +*/-]*[+*/-] \d+) = (-?\d+)(?=[.,]| =|$)", turn.answer
        ):
            assert eval(left) == int(right), turn.answer
        asked = [int(n) for n in re.findall(r"\d+", turn.question)]
        result = int(re.findall(r"-?\d+", turn.answer)[-1])
        a, b = asked[:2]
        assert result in {a + b, a - b, a * b, a / b}, (turn.question, turn.answer)


# Tools.


def called(text: str, tools: list, tool_format: str) -> list[tuple[str, dict]]:
    """The calls in an answer, as the server's own parser reads them."""
    schemas = {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}
    form = OutputFormat("qwen3", {"hermes": "hermes", "xml": "qwen3_coder"}[tool_format])
    parser = form.parser(thinking=False, schemas=schemas)
    names: list[str] = []
    arguments: dict[int, str] = {}
    for event in [*parser.feed(text), *parser.finish()]:
        assert not isinstance(event, ToolBroken), text
        if isinstance(event, ToolStart):
            names.append(event.name)
        if isinstance(event, ToolArguments):
            arguments[event.call] = arguments.get(event.call, "") + event.text
    return [(name, json.loads(arguments[i])) for i, name in enumerate(names)]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_are_read_by_the_server_and_fit_their_schemas(tool_format):
    dice = Dice("tools")
    seen = 0
    for _ in range(400):
        chat = tool_chat(dice, closed_turn)
        wanted = chat.messages[-1].get("tool_calls", [])
        found = called(answer_of(chat, tool_format), chat.tools, tool_format)
        expected = [(c["function"]["name"], c["function"]["arguments"]) for c in wanted]
        assert found == expected
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in chat.tools}
        for name, arguments in found:
            seen += 1
            Draft202012Validator(schemas[name]).validate(arguments)
    assert seen > 150


def test_arguments_stand_in_the_request():
    """Strings are copied from what was asked, so that nothing has to be guessed."""
    dice = Dice("copied")
    for _ in range(400):
        tool = any_tool(dice)
        asked, call = tool_request(dice, tool)
        for value in call.arguments.values():
            if isinstance(value, str):
                assert value.lower() in asked.lower(), (asked, call)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                assert str(value) in asked, (asked, call)


# Open text.


def test_lean_turns_how_much_text_branches():
    """Bits of surprise per character of open text fall as text leans more."""

    def surprise(lean: float) -> float:
        dice = Dice("lean", lean)
        makers = [make for make, _ in OPEN]
        size = sum(len(dice.pick(makers)(dice).answer) for _ in range(150))
        return dice.bits / size

    fair, usual, leaning = surprise(0.0), surprise(1.6), surprise(5.0)
    assert fair > usual > leaning > 0
    assert usual > 0.05


def test_prompts_of_thousands_of_tokens_come_up(chats):
    sizes = sorted(len(prompt_text(chat, "hermes")) for chat in chats)
    assert sizes[len(sizes) // 2] < 1500
    assert sizes[-5] > 11000
