"""Tools in chat completions: what the model is told, what clients get, and what is enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import Serve
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


def prompt_of(engine: FakeEngine, tokenizer: Tokenizer, number: int = -1) -> str:
    ids = engine.submitted[number].prompt_token_ids
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_a_call(serve: Serve, tokenizer: Tokenizer) -> None:
    with serve(saying(tokenizer, f"I look.\n{CALL}")) as client:
        (choice,) = ask(client, tools=[WEATHER])["choices"]
        (call,) = choice["message"].pop("tool_calls")
        assert call["id"].startswith("call_")
        assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
        assert choice["message"] == {"role": "assistant", "content": "I look.", "refusal": None}
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 4, 2), (99,)])
def test_a_streamed_call(serve: Serve, tokenizer: Tokenizer, sizes: tuple[int, ...]) -> None:
    with serve(saying(tokenizer, f"I look.\n{CALL}\n{CALL}", sizes)) as client:
        chunks = events(client, tools=[WEATHER])
    deltas = [c["choices"][0]["delta"] for c in chunks]
    message = joined(chunks)
    assert message["content"] == "I look."
    assert message["finish_reason"] == "tool_calls"
    assert [call["name"] for call in message["tool_calls"]] == ["get_weather"] * 2
    assert [call["arguments"] for call in message["tool_calls"]] == [ARGUMENTS] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    if sizes == (1,):
        assert sum("tool_calls" in delta for delta in deltas) > 6


def test_calls_alone_have_no_content(serve: Serve, tokenizer: Tokenizer) -> None:
    with serve(saying(tokenizer, CALL)) as client:
        message = ask(client, tools=[WEATHER])["choices"][0]["message"]
        assert message["content"] is None


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_a_call_is_text(
    serve: Serve, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    engine = saying(tokenizer, CALL)
    with serve(engine) as client:
        (choice,) = ask(client, **fields)["choices"]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
        assert joined(events(client, **fields))["content"] == CALL
    assert "get_weather" not in prompt_of(engine, tokenizer)


def test_broken_calls_are_content(serve: Serve, tokenizer: Tokenizer) -> None:
    broken = CALL.replace('"Rome"', "Rome")
    with serve(saying(tokenizer, broken)) as client:
        (choice,) = ask(client, tools=[WEATHER])["choices"]
        assert choice["message"]["content"] == broken
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        message = joined(events(client, tools=[WEATHER]))
        assert message["content"] == broken
        assert message["finish_reason"] == "stop"


def test_only_one_call_where_only_one_is_wanted(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, f"{CALL}\n{CALL}")
    with serve(engine) as client:
        for fields in ({"parallel_tool_calls": False}, {"tool_choice": NAMED}):
            (choice,) = ask(client, tools=[WEATHER], **fields)["choices"]
            assert len(choice["message"]["tool_calls"]) == 1
            assert choice["finish_reason"] == "tool_calls"
            assert len(joined(events(client, tools=[WEATHER], **fields))["tool_calls"]) == 1
        assert engine.wait_for(lambda: not engine.running)


def test_required_calls_are_a_grammar(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, CALL)
    with serve(engine) as client:

        def grammar(**fields: Any) -> Any:
            ask(client, tools=[WEATHER, OTHER], **fields)
            return engine.submitted[-1].sampling.grammar

        assert grammar() is None
        assert grammar(tool_choice="auto") is None
        required = grammar(tool_choice="required")
        assert required.kind == "lark"
        assert required.free_until is None
        assert "get_weather" in required.value
        assert "other" in required.value
        assert "other" not in grammar(tool_choice=NAMED).value
        allowed = {"mode": "required", "tools": [NAMED]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        assert "other" not in grammar(tool_choice=choice).value
        assert "other" not in prompt_of(engine, tokenizer)
        thinking = {"enable_thinking": True}
        assert grammar(tool_choice=NAMED, chat_template_kwargs=thinking).free_until == "</think>"


def test_strict_tools_are_a_grammar(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "No.")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with serve(engine) as client:
        ask(client, tools=[strict])
        assert "<tool_call>" in engine.submitted[-1].sampling.grammar.value


def test_a_strict_tool_that_cannot_be_enforced_is_refused(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "b"}}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    tool = {"type": "function", "function": function}
    with serve(saying(tokenizer, "No."), tool_call_parser="qwen3_coder") as client:
        response = client.post(CHAT, json=chat_body(tools=[tool]))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "tools"
        assert all(word in error["message"] for word in ('"f"', '"a"', '"not"'))
        lax = {**tool, "function": {**function, "strict": False}}
        assert ask(client, tools=[lax], tool_choice="required")


def test_history_is_rendered(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "It is sunny.")
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "22 degrees"},
    ]
    with serve(engine) as client:
        ask(client, messages=messages, tools=[WEATHER])
    text = prompt_of(engine, tokenizer)
    assert '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>' in text
    assert "<tool_response>\n22 degrees\n</tool_response>" in text
    assert json.dumps(WEATHER) in text


def test_litellms_notes_on_an_answer_may_come_back(serve: Serve, tokenizer: Tokenizer) -> None:
    notes = {"provider_specific_fields": {"refusal": None}}
    call = {"id": "c", "function": {"name": "get_weather", "arguments": ARGUMENTS}, **notes}
    asked = {"role": "user", "content": "hi"}
    told = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    engine = saying(tokenizer, "Sunny.")
    with serve(engine) as client:
        for more in ({}, notes):
            answer_before = {"role": "assistant", "tool_calls": [call], **more}
            ask(client, tools=[WEATHER], messages=[asked, answer_before, told])
        assert prompt_of(engine, tokenizer, 0) == prompt_of(engine, tokenizer, 1)
        refused = client.post(CHAT, json=chat_body(messages=[asked | notes]))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages[0].provider_specific_fields"


def test_a_call_after_reasoning(serve: Serve, tokenizer: Tokenizer) -> None:
    with serve(saying(tokenizer, f"I need Rome.\n</think>\n\n{CALL}")) as client:
        fields = {"tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": True}}
        message = ask(client, **fields)["choices"][0]["message"]
        assert message["reasoning_content"] == "I need Rome."
        assert message["content"] is None
        assert len(message["tool_calls"]) == 1
        streamed = joined(events(client, **fields))
        assert streamed["reasoning_content"] == "I need Rome."
        assert streamed["content"] == ""
        assert len(streamed["tool_calls"]) == 1


def test_choices_call_each_for_themselves(serve: Serve, tokenizer: Tokenizer) -> None:
    def script(request: Any) -> Any:
        said = CALL if request.sampling.choice else "No."
        return answer(tokenizer.encode(said))(request)

    with serve(FakeEngine(script)) as client:
        chunks = events(client, tools=[WEATHER], n=2)
        assert joined(chunks, 0)["finish_reason"] == "stop"
        assert joined(chunks, 0)["content"] == "No."
        assert joined(chunks, 1)["finish_reason"] == "tool_calls"


def test_logprobs_belong_to_the_content(serve: Serve, tokenizer: Tokenizer) -> None:
    text = f"hm\n</think>\n\nI look, é!\n{CALL}"
    with serve(saying(tokenizer, text)) as client:
        fields = {
            "tools": [WEATHER],
            "logprobs": True,
            "chat_template_kwargs": {"enable_thinking": True},
        }
        (choice,) = ask(client, **fields)["choices"]
        assert choice["message"]["content"] == "I look, é!"
        entries = choice["logprobs"]["content"]
        assert b"".join(bytes(e["bytes"]) for e in entries).decode().strip() == "I look, é!"
        chunks = [c["choices"][0] for c in events(client, **fields)]
        streamed = [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]]
        assert streamed == entries


def test_the_other_format(serve: Serve, tokenizer: Tokenizer) -> None:
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    with serve(saying(tokenizer, text), tool_call_parser="qwen3_coder") as client:
        (call,) = ask(client, tools=[WEATHER])["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 3}


def test_without_a_parser_tools_are_refused(serve: Serve, tokenizer: Tokenizer) -> None:
    with serve(saying(tokenizer, "x"), tool_call_parser="none") as client:
        response = client.post(CHAT, json=chat_body(tools=[WEATHER]))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert ask(client, tools=[WEATHER], tool_choice="none")
    with serve(saying(tokenizer, "x"), reasoning_parser="gpt_oss") as client:
        response = client.post(CHAT, json=chat_body(tools=[WEATHER], tool_choice="required"))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tool_choice"
