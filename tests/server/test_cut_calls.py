"""Answers that end within a tool call: streams and whole answers say the same, and it once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server import templates
from tests.server import test_anthropic as messages
from tests.server import test_responses as responses
from tests.server.conftest import Serve, Served, tokenizer_with
from tests.server.test_chat_tools import prompt_of
from tests.server.wire_help import CALL, WEATHER, ask, events, joined, saying

HERMES = (
    '<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Rome,\\n \\u00e9", "days": 31}}\n</tool_call>'
)
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome, é\n</parameter>\n"
    "<parameter=days>\n31\n</parameter>\n</function>\n</tool_call>"
)
CALLS = {"hermes": HERMES, "qwen3_coder": XML}
TEXT = "I look."
Said = tuple[Served, str, list[int]]


@pytest.fixture(scope="module", params=CALLS)
def said(request: Any, serve: Serve, tokenizer: Tokenizer) -> Iterator[Said]:
    """A served model that says some text and two calls, in one step, as far as it may; what it
    says, and the lengths that are tried: each of the first call, and some of the second."""
    call = CALLS[request.param]
    text, begun = f"{TEXT}\n{call}\n{call}", len(tokenizer.encode(f"{TEXT}\n{call}"))
    lengths = [*range(1, begun), *range(begun, len(tokenizer.encode(text)) + 1, 4)]
    with serve(saying(tokenizer, text, sizes=(99,)), tool_call_parser=request.param) as client:
        yield client, text, lengths


def is_whole(arguments: str) -> bool:
    """No client can take half a call's arguments for all of them."""
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def test_chats(said: Said) -> None:
    client, text, lengths = said
    found = set()
    for most in lengths:
        fields = {"tools": [WEATHER], "max_tokens": most}
        (choice,) = ask(client, **fields)["choices"]
        whole, streamed = choice["message"], joined(events(client, **fields))
        calls = [call["function"] for call in whole.get("tool_calls", [])]
        assert [{k: c[k] for k in ("name", "arguments")} for c in streamed["tool_calls"]] == calls
        assert streamed["content"] == (whole["content"] or "")
        assert streamed["finish_reason"] == choice["finish_reason"] == "length"
        assert all(is_whole(call["arguments"]) for call in calls[:-1])
        if not calls:
            assert text.startswith(whole["content"].rstrip("\ufffd"))
        else:
            assert whole["content"] is None or whole["content"].startswith(TEXT)
            if not is_whole(calls[-1]["arguments"]):
                # It is in the call, and nowhere else.
                assert "<tool_call>" not in streamed["content"]
                found.add(calls[-1]["arguments"])
    assert len(found) > 8
    full = '{"city": "Rome'
    assert all(full.startswith(part) or part.startswith(full) for part in found)


def items_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A response's items, put together from the deltas alone."""
    items: list[dict[str, Any]] = []
    for event in found:
        if event["type"] == "response.output_item.added":
            items.append({"item": event["item"], "text": ""})
        elif event["type"].endswith(".delta"):
            items[event["output_index"]]["text"] += event["delta"]
        elif event["type"] == "response.output_item.done":
            items[event["output_index"]]["item"] = event["item"]
    return items


def test_responses(said: Said) -> None:
    client, _, lengths = said
    num_cut = 0
    for most in lengths:
        fields = {"tools": [responses.TOOL], "max_output_tokens": most}
        whole, found = responses.response(client, **fields), responses.stream(client, **fields)
        last, output = found[-1]["response"], responses.without_ids(whole["output"])
        assert responses.without_ids(last["output"]) == output
        assert last["status"] == whole["status"] == "incomplete"
        for item, expected in zip(items_of(found), output, strict=True):
            assert responses.without_ids([item["item"]]) == [expected]
            assert item["text"] == (expected.get("arguments") or expected["content"][0]["text"])
        done = [is_whole(item["arguments"]) for item in output if item["type"] == "function_call"]
        statuses = [item["status"] for item in output if item["type"] == "function_call"]
        assert statuses == ["completed" if each else "incomplete" for each in done]
        assert sum("arguments.done" in event["type"] for event in found) == sum(done)
        num_cut += not all(done)
    assert num_cut > 8


def test_messages(said: Said) -> None:
    client, text, lengths = said
    num_cut = 0
    for most in lengths:
        fields = {"tools": [messages.TOOL], "max_tokens": most}
        whole, found = messages.message(client, **fields), messages.stream(client, **fields)
        (reason,) = [e["delta"]["stop_reason"] for e in found if e["type"] == "message_delta"]
        assert reason == whole["stop_reason"] == "max_tokens"
        blocks = [dict(e["content_block"], said="") for e in found if e["type"].endswith("k_start")]
        for event in found:
            if event["type"] == "content_block_delta":
                (part,) = [v for k, v in event["delta"].items() if k != "type"]
                blocks[event["index"]]["said"] += part
        if blocks and blocks[-1]["type"] == "tool_use" and not is_whole(blocks[-1]["said"]):
            # An object can't be half there: whole answers have the call as the model wrote it.
            blocks.pop()
            cut = whole["content"].pop()["text"]
            before = blocks.pop()["said"] if blocks and blocks[-1]["type"] == "text" else ""
            assert cut.startswith(before + "\n<tool_call>")
            assert cut.rstrip("\ufffd") in text
            num_cut += 1
        for block, other in zip(blocks, whole["content"], strict=True):
            assert block["type"] == other["type"]
            if block["type"] == "text":
                assert block["said"] == other["text"]
            else:
                assert json.loads(block["said"]) == other["input"]
    assert num_cut > 8


def test_half_a_call_is_no_reason_to_call(serve: Serve, tokenizer: Tokenizer) -> None:
    """Not even after a whole one: clients would act on both."""
    second = CALL.replace("Rome", "Oslo")
    with serve(saying(tokenizer, f"{CALL}\n{second}")) as client:
        fields: dict[str, Any] = {"tools": [WEATHER], "stop": ["slo"]}
        (choice,) = ask(client, **fields)["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["tool_calls"][1]["function"]["arguments"] == '{"city": "O'
        assert joined(events(client, **fields))["finish_reason"] == "stop"
        whole = messages.message(client, tools=[messages.TOOL], stop_sequences=["slo"])
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "slo")
        assert [block["type"] for block in whole["content"]] == ["tool_use", "text"]


@pytest.mark.parametrize("template", [templates.NEXT_INSTRUCT, templates.CODER])
def test_half_a_call_may_come_back(serve: Serve, tokenizer: Tokenizer, template: str) -> None:
    engine = saying(tokenizer, "I see.")
    with serve(engine, tokenizer=tokenizer_with(template)) as client:
        for arguments in ('{"city": "Ro', "{", '{"city": "x\\ud83c'):
            function = {"name": "get_weather", "arguments": arguments}
            chat = [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "type": "function", "function": function}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "The arguments are no JSON."},
            ]
            assert ask(client, tools=[WEATHER], messages=chat)["choices"]
            # As it is, or as a JSON string.
            prompt = prompt_of(engine, tokenizer)
            assert arguments in prompt or json.dumps(arguments)[1:-1] in prompt
