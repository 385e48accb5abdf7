"""What the demo models learn: answers are right, and text is as the server writes and reads it."""

import json

import pytest
from jsonschema import Draft202012Validator

from demo_model.chat import prompt_text, segments
from demo_model.dice import Dice
from demo_model.mixture import (
    OPEN_TASKS,
    SMALL_TASKS,
    Settings,
    closed_turn,
    conversation,
    is_held_out,
    training_chat,
)
from demo_model.packing import encode
from demo_model.tokenizer import load, write_files
from demo_model.tools.chats import tool_chat
from mlx_mtp.text.parsing.events import ToolArguments, ToolBroken, ToolStart
from mlx_mtp.text.parsing.formats import OutputFormat
from mlx_mtp.text.tokenizer import Tokenizer

FORMATS = {"hermes": "hermes", "xml": "qwen3_coder"}


@pytest.fixture(scope="module")
def chats():
    dice = Dice("test")
    return [training_chat(dice, Settings()) for _ in range(1000)]


@pytest.fixture(scope="module", params=FORMATS)
def served(request, tmp_path_factory):
    """A format, and the tokenizer that a server would load for it."""
    directory = tmp_path_factory.mktemp(request.param)
    write_files(directory, request.param)
    return request.param, Tokenizer.load(directory)


def answer_of(chat, tool_format: str) -> str:
    text = segments(chat, tool_format)[-1][0].removesuffix("<|im_end|>")
    return text.split("\n</think>\n\n")[-1]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_every_answer_is_right_by_its_own_check_and_nonsense_is_not(chats, tool_format):
    assert [c.task for c in chats if not c.right(answer_of(c, tool_format))] == []
    assert [c.task for c in chats if c.right("nonsense")] == []
    found = {chat.task for chat in chats}
    wanted = {"tool_call", "tool_missing", "agent_call", "needle_long", "refusal"}
    assert len(found) > 50 and found >= OPEN_TASKS | wanted


def test_training_never_asks_what_is_held_out(chats):
    assert not any(is_held_out(chat) for chat in chats)
    dice = Dice("any")
    some = [conversation(dice, Settings()) for _ in range(1000)]
    large = [chat for chat in some if chat.task not in SMALL_TASKS]
    assert 0.2 < sum(map(is_held_out, large)) / len(large) < 0.3


def test_the_servers_template_and_tokens_are_those_of_the_trainer(served, chats):
    tool_format, tokenizer = served
    chosen = OutputFormat.choose(tokenizer.template)
    assert (chosen.reasoning, chosen.tools) == ("qwen3", FORMATS[tool_format])
    for chat, document in zip(chats[:300], encode(load(), chats[:300], tool_format)):
        kwargs = {"enable_thinking": True} if chat.thinks else {}
        rendered = tokenizer.render_chat(chat.messages[:-1], chat.tools, kwargs)
        assert rendered == prompt_text(chat, tool_format)
        text = "".join(piece for piece, _ in segments(chat, tool_format))
        assert tuple(document.ids) == tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, document.ids)).decode() == text


def called(text: str, tools: list, tool_format: str) -> list[tuple[str, dict]]:
    """The calls in an answer, as the server's own parser reads them."""
    schemas = {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}
    parser = OutputFormat("qwen3", FORMATS[tool_format]).parser(thinking=False, schemas=schemas)
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
