"""Anthropic's messages: the wire as Claude Code and others use it, and the SDK against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jiter
import pytest

from mlx_mtp.engine.request import Request
from mlx_mtp.errors import StepError
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import FakeEngine, Output, out
from tests.server.wire_help import CALL, WEATHER_SCHEMA, ask, events, saying

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "get_weather", "description": "d", "input_schema": WEATHER_SCHEMA}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
AGENT = f"I need Rome.\n</think>\n\nI look.\n{CALL}"


def message(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    return ask(client, PATH, **{"messages": HI, "max_tokens": 100} | fields)


def stream(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return events(client, PATH, **{"messages": HI, "max_tokens": 100} | fields)


def blocks_of(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A stream's blocks, put together as clients do; the order of the events is checked."""
    assert stream[0]["type"] == "message_start"
    assert [e["type"] for e in stream[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in stream[1:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if kind == "content_block_stop":
            is_open = False
            continue
        delta = dict(event["delta"])
        kind = delta.pop("type")
        ((key, value),) = delta.items()
        block = blocks[-1]
        block["json" if kind == "input_json_delta" else key] += value
    assert not is_open
    for block in blocks:
        text = block.pop("json")
        if text:
            # As the SDK does: a broken call's JSON is cut, but never wrong.
            block["input"] = jiter.from_json(text.encode(), partial_mode=True)
        block.pop("id", None)
    return blocks


def prompt_of(engine: FakeEngine, tokenizer: Tokenizer) -> str:
    return b"".join(map(tokenizer.token_bytes, engine.submitted[-1].prompt_token_ids)).decode()


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return saying(tokenizer, "Hello there, é!")


@pytest.fixture(scope="module")
def client(serve: Serve, engine: FakeEngine) -> Iterator[Served]:
    with serve(engine) as client:
        yield client


def test_a_message(client: Served) -> None:
    body = message(client)
    usage = body.pop("usage")
    assert body.pop("id").startswith("msg_")
    assert isinstance(body.pop("seed"), int)
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello there, é!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["input_tokens"] > 0
    assert usage["output_tokens"] > 3
    assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens_details"] == {"thinking_tokens": 0}


def test_a_streamed_message(client: Served) -> None:
    found = stream(client)
    assert blocks_of(found) == [{"type": "text", "text": "Hello there, é!"}]
    start = found[0]["message"]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"]["input_tokens"] > 0
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"] == message(client)["usage"]


def test_thinking_text_and_a_call(serve: Serve, tokenizer: Tokenizer) -> None:
    with serve(saying(tokenizer, AGENT)) as client:
        body = message(client, tools=[TOOL], **THINK)
        thinking, text, call = body["content"]
        assert thinking == {"type": "thinking", "thinking": "I need Rome.", "signature": "mlx-mtp"}
        assert text == {"type": "text", "text": "I look."}
        assert call.pop("id").startswith("toolu_")
        assert call == {"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}}
        assert body["stop_reason"] == "tool_use"
        assert body["usage"]["output_tokens_details"]["thinking_tokens"] > 3
        assert blocks_of(stream(client, tools=[TOOL], **THINK)) == [thinking, text, call]


def test_thinking_that_is_left_out_goes_round_all_the_same(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    engine = saying(tokenizer, "Hm, so so.\n</think>\n\nYes.")
    with serve(engine) as client:
        fields = {"thinking": {**THINK["thinking"], "display": "omitted"}}
        thinking, text = message(client, **fields)["content"]
        assert (thinking["type"], thinking["thinking"]) == ("thinking", "")
        assert blocks_of(stream(client, **fields)) == [thinking, text]
        message(client, messages=[*HI, {"role": "assistant", "content": [thinking, text]}])
    assert "<think>\nHm, so so.\n</think>\n\nYes." in prompt_of(engine, tokenizer)


@pytest.mark.parametrize("name", ['"city": Rome', '"city": 1e999', '"city": "\\ud800"'])
def test_a_broken_call_is_text(serve: Serve, tokenizer: Tokenizer, name: str) -> None:
    said = CALL.replace('"city": "Rome"', name)
    with serve(saying(tokenizer, said)) as client:
        body = message(client, tools=[TOOL])
        assert body["content"] == [{"type": "text", "text": said}]
        assert body["stop_reason"] == "end_turn"
        assert blocks_of(stream(client, tools=[TOOL]))[-1]["text"] == said


def test_why_it_ended(client: Served) -> None:
    assert message(client, max_tokens=2)["stop_reason"] == "max_tokens"
    body = message(client, stop_sequences=["xyz", "there"])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "there")
    found = stream(client, stop_sequences=["there"])
    assert found[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "there"}
    # More than the context has room for is as good as no limit.
    assert message(client, max_tokens=64_000)["stop_reason"] == "end_turn"


def test_system_blocks_without_the_billing_header(
    client: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=deadbeef;"},
        {"type": "text", "text": "You are kind.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "You are brief."},
    ]
    message(client, system=system)
    text = prompt_of(engine, tokenizer)
    assert "<|im_start|>system\nYou are kind.\n\nYou are brief.<|im_end|>" in text
    assert "billing" not in text
    message(client, system=system[:1])
    assert "system" not in prompt_of(engine, tokenizer)


def test_a_whole_agents_chat(client: Served, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """As Claude Code sends it, system messages within the chat and all."""
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}
    result = [{"type": "text", "text": "line 1"}, {"type": "text", "text": "line 2"}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Do it."}]},
        {"role": "system", "content": "Remember the rules."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I think.", "signature": "s"},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "I do."},
                call,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": result},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    message(
        client,
        messages=messages,
        tools=[TOOL],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "medium"},
        metadata={"user_id": "u"},
        cache_control={"type": "ephemeral", "ttl": "1h"},
    )
    text = prompt_of(engine, tokenizer)
    assert "<|im_start|>user\nDo it.\n\nRemember the rules.<|im_end|>" in text
    assert 'I do.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>' in text
    assert "<tool_response>\nline 1\nline 2\n</tool_response>" in text
    assert "<tool_response>\nError: no\n</tool_response>" in text
    assert text.endswith("<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")


def test_thinking_is_switched(client: Served, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    for thinking, thinks in (
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 2000}, True),
    ):
        message(client, thinking=thinking)
        assert prompt_of(engine, tokenizer).endswith("<think>\n") == thinks
    grammar = engine.submitted[-1].sampling.grammar
    assert grammar == GrammarSpec("free", free_until="</think>", free_tokens=2000)


def test_an_answer_that_has_begun_goes_on(
    client: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    message(client, messages=[*HI, {"role": "assistant", "content": "The answer is ("}])
    assert prompt_of(engine, tokenizer).endswith("<|im_start|>assistant\nThe answer is (")


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize("text", [[], [{"type": "text", "text": "Sure"}]])
def test_a_call_without_its_result_is_no_beginning_of_an_answer(
    client: Served, path: str, text: list[dict[str, Any]]
) -> None:
    call = {"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}
    chat = [*HI, {"role": "assistant", "content": [*text, call]}]
    body = {"model": MODEL, "messages": chat, "tools": [TOOL]}
    more = {"max_tokens": 9} if path == PATH else {}
    response = client.post(path, json=body | more)
    assert response.status_code == 400
    told = response.json()["error"]["message"]
    assert told.startswith("messages: the last message has a tool_use block")
    assert "tool_result" in told
    result = {"type": "tool_result", "tool_use_id": "t", "content": "Sunny."}
    chat.append({"role": "user", "content": [result]})
    assert client.post(path, json=body | more).status_code == 200


def test_the_seed_is_told_and_taken(client: Served, engine: FakeEngine) -> None:
    chosen = message(client)["seed"]
    assert engine.submitted[-1].sampling.seed == chosen
    assert message(client)["seed"] != chosen
    assert message(client, seed=chosen)["seed"] == chosen
    assert engine.submitted[-1].sampling.seed == chosen
    found = stream(client, seed=-9)
    assert engine.submitted[-1].sampling.seed == -9
    assert found[0]["message"]["seed"] == -9
    assert found[-2]["seed"] == -9
    refused = client.post(PATH, json={"model": MODEL, "messages": HI, "max_tokens": 9, "seed": "1"})
    assert refused.status_code == 400
    assert "seed" in refused.json()["error"]["message"]


def test_tool_choice(client: Served, engine: FakeEngine) -> None:
    def grammar(**choice: Any) -> Any:
        message(client, tools=[TOOL], tool_choice=choice)
        return engine.submitted[-1].sampling.grammar

    assert grammar(type="auto") is None
    assert "get_weather" in grammar(type="any").value
    assert "get_weather" in grammar(type="tool", name="get_weather").value
    assert grammar(type="none") is None


def test_a_form_for_the_answer(client: Served, engine: FakeEngine) -> None:
    form = {"type": "json_schema", "schema": WEATHER_SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        message(client, **fields)
        grammar = engine.submitted[-1].sampling.grammar
        assert grammar.kind == "json_schema"
        assert json.loads(grammar.value) == WEATHER_SCHEMA


def test_counting(client: Served) -> None:
    counted = ask(client, COUNT, messages=HI, system="Be kind.", tools=[TOOL])
    body = message(client, system="Be kind.", tools=[TOOL])
    assert counted == {"input_tokens": body["usage"]["input_tokens"]}
    # Counting is what one does with a chat that may be too long.
    long = [{"role": "user", "content": "word " * 3000}]
    assert ask(client, COUNT, messages=long)["input_tokens"] > 1024


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"temperature": 1.1}, "temperature"),
    ({"n": 2}, "n is not a parameter"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "messages[0].content",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
    ({"tool_choice": {"type": "any"}}, "no tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "'g'"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
]


@pytest.mark.parametrize(("fields", "word"), BAD)
def test_bad_requests_are_told_in_anthropics_form(
    client: Served, fields: dict[str, Any], word: str
) -> None:
    body = {"model": MODEL, "messages": HI, "max_tokens": 9} | fields
    response = client.post(PATH, json=body)
    assert response.status_code == 400
    error = response.json()
    assert set(error) == {"type", "error"}
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert word in error["error"]["message"]


def test_other_errors_in_anthropics_form(serve: Serve, tokenizer: Tokenizer) -> None:
    def error(response: httpx.Response, status: int) -> str:
        assert response.status_code == status
        return response.json()["error"]["type"]

    body = {"model": MODEL, "messages": HI, "max_tokens": 9}
    with serve(saying(tokenizer, "x"), api_keys=("k",)) as client:
        assert error(client.post(PATH, json=body), 401) == "authentication_error"
        keys = {"x-api-key": "k", "anthropic-version": "1999-01-01"}
        assert client.post(PATH, json=body, headers=keys).status_code == 200
        other = client.post(PATH, json=body | {"model": "claude"}, headers=keys)
        assert error(other, 404) == "not_found_error"
        assert error(client.get(PATH, headers=keys), 405) == "invalid_request_error"
        assert error(client.post(PATH + "/x", headers=keys), 404) == "not_found_error"
        assert client.head("/").status_code == 200
        assert client.post(PATH, json=body, headers={"x-api-key": "wrong"}).status_code == 401
    failing = [out(40), out(finish="error", error=StepError("it broke"))]
    with serve(FakeEngine(lambda _: iter(failing[1:]))) as client:
        assert error(client.post(PATH, json=body), 500) == "api_error"
    with serve(FakeEngine(lambda _: iter(failing))) as client:
        *_, last = events(client, PATH, **body)
        assert last["error"] == {"type": "api_error", "message": "it broke"}


def test_silence_is_broken_by_pings(serve: Serve) -> None:
    waiting = True

    def slow(_: Request) -> Iterator[Output]:
        while waiting:
            yield None
        yield out(40, finish="length")

    body = {"model": MODEL, "messages": HI, "max_tokens": 100, "stream": True}
    with (
        serve(FakeEngine(slow), keep_alive_seconds=0.01) as client,
        client.stream("POST", PATH, json=body) as response,
    ):
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines).removeprefix("data: ")) == {"type": "ping"}
        waiting = False
        found = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert blocks_of([event for event in found if event["type"] != "ping"])


def test_the_sdk(serve: Serve, tokenizer: Tokenizer) -> None:
    with (
        serve(saying(tokenizer, AGENT), api_keys=("k",)) as served,
        # The SDK sends only this one, as a bearer token.
        anthropic.Anthropic(base_url=str(served.base_url), auth_token="k", max_retries=0) as sdk,
    ):
        fields: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 2000,
            "messages": HI,
            "tools": [TOOL],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        whole = sdk.messages.create(**fields)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        assert whole.content[2].input == {"city": "Rome"}
        with sdk.messages.stream(**fields) as stream:
            seen = {event.type for event in stream}
            final = stream.get_final_message()
        assert "input_json" in seen
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.content[2].input == {"city": "Rome"}
        assert final.stop_reason == "tool_use"
        assert final.usage.output_tokens == whole.usage.output_tokens
        counted = sdk.messages.count_tokens(model=MODEL, messages=HI)
        assert counted.input_tokens > 0
        assert [model.id for model in sdk.models.list()] == [MODEL]
    with (
        serve(saying(tokenizer, "x"), api_keys=("k",)) as served,
        anthropic.Anthropic(base_url=str(served.base_url), api_key="wrong", max_retries=0) as sdk,
        pytest.raises(anthropic.AuthenticationError),
    ):
        sdk.messages.create(model=MODEL, max_tokens=9, messages=HI)
