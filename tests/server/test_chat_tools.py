"""Tools in chat completions: what the model sees, what clients get, and what is enforced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import Serve, Served
from tests.server.fake_engine import FakeEngine, answer
from tests.server.wire_help import (
    ARGUMENTS,
    CALL,
    CHAT,
    WEATHER,
    ask,
    chat_body,
    events,
    joined,
    saying,
)

OTHER = {"type": "function", "function": {"name": "other"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
Says = Callable[..., tuple[dict[str, Any], str]]


def prompt_of(engine: FakeEngine, tokenizer: Tokenizer, number: int = -1) -> str:
    ids = engine.submitted[number].prompt_token_ids
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return saying(tokenizer, "No.")


@pytest.fixture(scope="module")
def client(serve: Serve, engine: FakeEngine) -> Iterator[Served]:
    with serve(engine) as client:
        yield client


@pytest.fixture
def says(client: Served, engine: FakeEngine, tokenizer: Tokenizer) -> Says:
    """Answers of a model that says a text: whole and streamed they have the same message."""

    def says(text: str, *, sizes: tuple[int, ...] = (1, 2, 3), **fields: Any) -> Any:
        engine.script = answer(tokenizer.encode(text), sizes)
        (choice,) = ask(client, **fields)["choices"]
        message, streamed = choice["message"], joined(events(client, **fields))
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert streamed["content"] == (message["content"] or "")
        assert streamed["reasoning_content"] == message.get("reasoning_content", "")
        if "broken" not in text:  # A stream has shown the beginning of such a call.
            assert [(each["name"], each["arguments"]) for each in streamed["tool_calls"]] == [
                (call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls", [])
            ]
        return message, choice["finish_reason"]

    return says


@pytest.mark.parametrize("sizes", [(1,), (1, 4, 2), (99,)])
def test_calls(says: Says, sizes: tuple[int, ...]) -> None:
    message, reason = says(f"I look.\n{CALL}\n{CALL}", sizes=sizes, tools=[WEATHER])
    calls = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "I look.", "refusal": None}
    assert reason == "tool_calls"
    assert len({call["id"] for call in calls if call["id"].startswith("call_")}) == 2
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    assert [call["function"] for call in calls] == [function] * 2
    assert says(CALL, sizes=sizes, tools=[WEATHER])[0]["content"] is None


def test_a_call_is_streamed_in_pieces(client: Served, engine: FakeEngine, says: Says) -> None:
    says(CALL, sizes=(1,), tools=[WEATHER])
    deltas = [chunk["choices"][0]["delta"] for chunk in events(client, tools=[WEATHER])]
    assert sum("tool_calls" in delta for delta in deltas) > 6


def test_what_is_no_call_is_text(
    client: Served, engine: FakeEngine, tokenizer: Tokenizer, says: Says
) -> None:
    broken = CALL.replace('"Rome"', "broken")
    nothing = {"tools": [WEATHER], "tool_choice": "none"}
    for text, fields in ((CALL, {}), (CALL, nothing), (broken, {"tools": [WEATHER]})):
        message, reason = says(text, **fields)
        assert message == {"role": "assistant", "content": text, "refusal": None}
        assert reason == "stop"
        assert ("get_weather" in prompt_of(engine, tokenizer)) == (text == broken)


def test_only_one_call_where_only_one_is_wanted(engine: FakeEngine, says: Says) -> None:
    for fields in ({"parallel_tool_calls": False}, {"tool_choice": NAMED}):
        message, reason = says(f"{CALL}\n{CALL}", tools=[WEATHER], **fields)
        assert len(message["tool_calls"]) == 1
        assert reason == "tool_calls"
    assert engine.wait_for(lambda: not engine.running)


def test_what_is_enforced_is_a_grammar(
    client: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = answer(tokenizer.encode("No."))
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}

    def grammar(*tools: Any, **fields: Any) -> Any:
        ask(client, tools=tools or [WEATHER, OTHER], **fields)
        return engine.submitted[-1].sampling.grammar

    assert grammar() is None
    assert grammar(tool_choice="auto") is None
    required = grammar(tool_choice="required")
    assert (required.kind, required.free_until) == ("lark", None)
    assert "get_weather" in required.value
    assert "other" in required.value
    assert "other" not in grammar(tool_choice=NAMED).value
    allowed = {"mode": "required", "tools": [NAMED]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert "other" not in grammar(tool_choice=choice).value
    assert "other" not in prompt_of(engine, tokenizer)
    assert grammar(tool_choice=NAMED, **THINKING).free_until == "</think>"
    assert "<tool_call>" in grammar(strict).value


def test_the_other_format(serve: Serve, tokenizer: Tokenizer) -> None:
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    with serve(saying(tokenizer, text), tool_call_parser="qwen3_coder") as client:
        (call,) = ask(client, tools=[WEATHER])["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 3}
        # What it can't enforce of a strict tool is refused by name.
        schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}}
        function = {"name": "f", "parameters": schema, "strict": True}
        tool = {"type": "function", "function": function}
        response = client.post(CHAT, json=chat_body(tools=[tool]))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "tools"
        assert all(word in error["message"] for word in ('"f"', '"a"', '"minLength"'))
        lax = {**tool, "function": {**function, "strict": False}}
        assert ask(client, tools=[lax], tool_choice="required")


def test_history_is_rendered(client: Served, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    asked = {"role": "user", "content": "hi"}
    notes = {"provider_specific_fields": {"refusal": None}}  # LiteLLM's, on answers
    for more in ({}, notes):
        messages = [
            {"role": "system", "content": "Be kind."},
            asked,
            {"role": "assistant", "content": None, "tool_calls": [{**call, **more}], **more},
            {"role": "tool", "tool_call_id": "c1", "content": "22 degrees"},
        ]
        ask(client, messages=messages, tools=[WEATHER])
        text = prompt_of(engine, tokenizer)
        assert '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>' in text
        assert "<tool_response>\n22 degrees\n</tool_response>" in text
        assert json.dumps(WEATHER) in text
    refused = client.post(CHAT, json=chat_body(messages=[asked | notes]))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].provider_specific_fields"


def test_a_call_after_reasoning(says: Says) -> None:
    message, _ = says(f"I need Rome.\n</think>\n\n{CALL}", tools=[WEATHER], **THINKING)
    assert message["reasoning_content"] == "I need Rome."
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


def test_choices_call_each_for_themselves(
    client: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    def script(request: Any) -> Any:
        return answer(tokenizer.encode(CALL if request.sampling.choice else "No."))(request)

    engine.script = script
    chunks = events(client, tools=[WEATHER], n=2)
    assert joined(chunks, 0)["finish_reason"] == "stop"
    assert joined(chunks, 0)["content"] == "No."
    assert joined(chunks, 1)["finish_reason"] == "tool_calls"


def test_logprobs_belong_to_the_content(client: Served, says: Says) -> None:
    fields = {"tools": [WEATHER], "logprobs": True, **THINKING}
    message, _ = says(f"hm\n</think>\n\nI look, é!\n{CALL}", **fields)
    assert message["content"] == "I look, é!"
    entries = ask(client, **fields)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode().strip() == "I look, é!"
    chunks = [c["choices"][0] for c in events(client, **fields)]
    assert [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]] == entries


def test_without_a_parser_tools_are_refused(serve: Serve, tokenizer: Tokenizer) -> None:
    for settings, fields, param in (
        ({"tool_call_parser": "none"}, {}, "tools"),
        ({"reasoning_parser": "gpt_oss"}, {"tool_choice": "required"}, "tool_choice"),
    ):
        with serve(saying(tokenizer, "x"), **settings) as client:
            response = client.post(CHAT, json=chat_body(tools=[WEATHER], **fields))
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
            assert ask(client, tools=[WEATHER], tool_choice="none")
