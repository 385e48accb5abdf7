"""The demo models' tokenizer and templates: what the trainer reads is what the server sends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo_model.chat import prompt_text, segments, template
from demo_model.dice import Dice
from demo_model.mixture import Settings, training_chat
from demo_model.packing import encode
from demo_model.tokenizer import load, write_files
from mlx_mtp.server.parsing.formats import OutputFormat
from mlx_mtp.server.tokenizer import Tokenizer

FORMATS = {"hermes": "hermes", "xml": "qwen3_coder"}


@pytest.fixture(scope="module")
def chats():
    dice = Dice("chat test")
    return [training_chat(dice, Settings(max_tokens=1024)) for _ in range(400)]


@pytest.fixture(scope="module", params=FORMATS)
def served(request, tmp_path_factory):
    """A format, and the tokenizer that a server would load for it."""
    directory = tmp_path_factory.mktemp(request.param)
    write_files(directory, request.param)
    return request.param, Tokenizer.load(directory)


def test_the_server_finds_the_format_in_the_template(served):
    tool_format, tokenizer = served
    chosen = OutputFormat.choose(tokenizer.template)
    assert (chosen.reasoning, chosen.tools) == ("qwen3", FORMATS[tool_format])
    assert tokenizer.template == template(tool_format)


def test_the_template_writes_what_the_trainer_reads(served, chats):
    tool_format, tokenizer = served
    for chat in chats:
        kwargs = {"enable_thinking": True} if chat.thinks else {}
        rendered = tokenizer.render_chat(chat.messages[:-1], chat.tools, kwargs)
        assert rendered == prompt_text(chat, tool_format)


def test_pieces_encoded_apart_are_those_of_the_whole(served, chats):
    tool_format, tokenizer = served
    for chat, document in zip(chats, encode(load(), chats, tool_format)):
        text = "".join(piece for piece, _ in segments(chat, tool_format))
        assert tuple(document.ids) == tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, document.ids)).decode() == text


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_comes_back(text):
    tokenizer = load()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_arguments_may_be_text_or_an_object(served):
    tool_format, tokenizer = served
    call = {"function": {"name": "f", "arguments": {"city": "Rome", "days": 3, "x": [True, None]}}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
    ]
    text = tokenizer.render_chat(messages)
    if tool_format == "hermes":
        assert '{"name": "f", "arguments": {"city": "Rome", "days": 3, "x": [true, null]}}' in text
    else:
        assert "<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>" in text
