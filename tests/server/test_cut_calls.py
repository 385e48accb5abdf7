"""Answers that end within a tool call, or have a malformed one: its text is delivered once."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_mtp.text.tokenizer import Tokenizer
from tests.support.in_process import CHAT, GOOD, in_process
from tests.support.wire_help import WEATHER, WEATHER_SCHEMA, ask, events, joined, saying

HERMES = (
    '<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Rome,\\n \\u00e9", "days": 31}}\n</tool_call>'
)
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome, é\n</parameter>\n"
    "<parameter=days>\n31\n</parameter>\n</function>\n</tool_call>"
)
TEXT = "I look."
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TOOL = {"name": "get_weather", "description": "d", "input_schema": WEATHER_SCHEMA}
MESSAGE = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100, "tools": [TOOL]}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA}
Answer = tuple[str, list[str]]
"""The text, and the arguments of the calls, of which the last may be cut."""


def is_whole(arguments: str) -> bool:
    """True for a whole object; clients must not be able to take half a call's arguments for one."""
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def chat(client: httpx.Client, most: int) -> Answer:
    fields = {"tools": [WEATHER], "max_tokens": most}
    (choice,) = ask(client, **fields)["choices"]
    whole, streamed = choice["message"], joined(events(client, **fields))
    calls = [call["function"] for call in whole.get("tool_calls", [])]
    assert [{k: c[k] for k in ("name", "arguments")} for c in streamed["tool_calls"]] == calls
    assert streamed["content"] == (whole["content"] or "")
    assert streamed["finish_reason"] == choice["finish_reason"] == "length"
    return streamed["content"], [call["arguments"] for call in calls]


def response(client: httpx.Client, most: int) -> Answer:
    fields = {"input": "hi", "tools": [FUNCTION], "max_output_tokens": most}
    whole, found = ask(client, RESPONSES, **fields), events(client, RESPONSES, **fields)
    assert found[-1]["response"]["status"] == whole["status"] == "incomplete"
    texts = [""] * len(whole["output"])
    for event in found:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    ended = [e["item"]["status"] for e in found if e["type"] == "response.output_item.done"]
    assert ended == [item["status"] for item in whole["output"]]
    assert texts == [i.get("arguments") or i["content"][0]["text"] for i in whole["output"]]
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    done = [is_whole(call["arguments"]) for call in calls]
    assert [call["status"] == "completed" for call in calls] == done
    assert sum("arguments.done" in event["type"] for event in found) == sum(done)
    content = [i["content"][0]["text"] for i in whole["output"] if i["type"] == "message"]
    return "".join(content), [call["arguments"] for call in calls]


def message(client: httpx.Client, most: int) -> Answer:
    fields = {**MESSAGE, "max_tokens": most}
    whole, found = ask(client, MESSAGES, **fields), events(client, MESSAGES, **fields)
    (reason,) = [e["delta"]["stop_reason"] for e in found if e["type"] == "message_delta"]
    assert reason == whole["stop_reason"] == "max_tokens"
    blocks = [[e["content_block"]["type"], ""] for e in found if e["type"].endswith("k_start")]
    for event in found:
        if event["type"] == "content_block_delta":
            (part,) = [v for k, v in event["delta"].items() if k != "type"]
            blocks[event["index"]][1] += part
    texts = [said for kind, said in blocks if kind == "text"]
    calls = [said for kind, said in blocks if kind == "tool_use"]
    expected = [block.get("text", block.get("input")) for block in whole["content"]]
    if calls and not is_whole(calls[-1]):
        # An object can't be incomplete: whole answers have a cut call as the model's text.
        cut = expected.pop()
        before = texts[-1] if len(calls) == 1 else ""
        assert cut.startswith(before + "\n<tool_call>")
        assert cut.rstrip("\ufffd") in f"{TEXT}\n{HERMES}\n{HERMES} {TEXT}\n{XML}\n{XML}"
        blocks = blocks[: -2 if before else -1]
    assert expected == [said if kind == "text" else json.loads(said) for kind, said in blocks]
    return "".join(texts), calls


@pytest.fixture(scope="module", params=[("hermes", HERMES), ("qwen3_coder", XML)])
def said(request: Any, tokenizer: Tokenizer) -> Iterator[tuple[httpx.Client, str, range]]:
    """A served model that says some text and two calls, in one step, up to the token limit."""
    name, call = request.param
    text = f"{TEXT}\n{call}\n{call}"
    with in_process(saying(tokenizer, text, sizes=(99,)), tool_call_parser=name) as client:
        yield client, text, range(1, len(tokenizer.encode(text)) + 1)


@pytest.mark.parametrize("api", [chat, response, message])
def test_answers_of_every_length(said: tuple[httpx.Client, str, range], api: Any) -> None:
    client, text, lengths = said
    found = set()
    for most in lengths[: len(lengths) * 3 // 4]:
        content, calls = api(client, most)
        assert all(map(is_whole, calls[:-1]))
        if not calls:
            assert text.startswith(content.rstrip("\ufffd"))
        else:
            assert content.startswith(TEXT)
            if not is_whole(calls[-1]):
                # The model's text of the cut call is in the call, and nowhere else.
                assert content == TEXT
                found.add(calls[-1])
    assert len(found) > 8
    full = '{"city": "Rome'
    assert all(full.startswith(part) or part.startswith(full) for part in found)


BROKEN = 'See. <tool_call>\n{"name": "get_weather", "arguments": {"city": Rome}}\n</tool_call> So.'
TOOLS = {CHAT: {"tools": [WEATHER]}, RESPONSES: {"tools": [FUNCTION]}, MESSAGES: MESSAGE}


@pytest.mark.parametrize("path", TOOLS)
def test_a_malformed_call_is_told_once(path: str, tokenizer: Tokenizer) -> None:
    with in_process(saying(tokenizer, BROKEN)) as client:
        body = GOOD[path] | TOOLS[path] | {"temperature": 0}
        whole = client.post(path, json=body).text
        streamed = client.post(path, json=body | {"stream": True}).text
    begun = (
        r'"arguments":"{\"city\": "' if path != MESSAGES else r"\"arguments\": {\"city\": Rome}}"
    )
    assert whole.count("Rome") == whole.count(begun) == 1
    data = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    pieces: list[str] = []
    for each in data:
        if path == CHAT:
            delta = each["choices"][0]["delta"]
            pieces.append(delta.get("content") or "")
            pieces += [c["function"]["arguments"] for c in delta.get("tool_calls", [])]
        elif path == RESPONSES and each["type"].endswith(".delta"):
            pieces.append(each["delta"])
        elif each["type"] == "content_block_delta":
            pieces.append(each["delta"].get("text") or each["delta"].get("partial_json") or "")
    said = "".join(pieces)
    assert said.count("city") == said.count("Rome") == 1
    assert said.startswith("See.") and said.endswith(" So.")
    assert "get_weather" not in said and "get_weather" in streamed
