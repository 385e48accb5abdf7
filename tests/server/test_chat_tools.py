"""Reasoning and tools in chats: what the model sees, what clients get, and what is enforced."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_mtp.sampling.params import GrammarSpec
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
THOUGHT = "I add.\nIt is 4."
TEXT = f"{THOUGHT}\n</think>\n\nFour."
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Y"
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
Says = Callable[..., tuple[dict[str, Any], str]]


def prompt_of(engine: FakeEngine, tokenizer: Tokenizer) -> str:
    ids = engine.submitted[-1].prompt_token_ids
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
def test_calls(client: Served, says: Says, sizes: tuple[int, ...]) -> None:
    message, reason = says(f"I look.\n{CALL}\n{CALL}", sizes=sizes, tools=[WEATHER])
    calls = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "I look.", "refusal": None}
    assert reason == "tool_calls"
    assert len({call["id"] for call in calls if call["id"].startswith("call_")}) == 2
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    assert [call["function"] for call in calls] == [function] * 2
    text = f"I need Rome.\n</think>\n\n{CALL}"
    message, _ = says(text, sizes=sizes, tools=[WEATHER], **THINKING)
    assert (message["reasoning_content"], message["content"]) == ("I need Rome.", None)
    deltas = [c["choices"][0]["delta"] for c in events(client, tools=[WEATHER], **THINKING)]
    assert sizes != (1,) or sum("tool_calls" in delta for delta in deltas) > 6
    assert sizes != (1,) or sum("reasoning_content" in delta for delta in deltas) > 3


def test_what_is_no_call_is_text(engine: FakeEngine, tokenizer: Tokenizer, says: Says) -> None:
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


def test_history_is_rendered(client: Served, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    asked = {"role": "user", "content": "hi"}
    notes = {"provider_specific_fields": {"refusal": None}}  # LiteLLM's, on answers
    calling = {"role": "assistant", "content": None, "reasoning_content": "so so"}
    for more in ({}, notes):
        messages = [
            {"role": "system", "content": "Be kind."},
            asked,
            {**calling, "tool_calls": [{**call, **more}], **more},
            {"role": "tool", "tool_call_id": "c1", "content": "22 degrees"},
        ]
        ask(client, messages=messages, tools=[WEATHER])
        text = prompt_of(engine, tokenizer)
        assert '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>' in text
        assert "<tool_response>\n22 degrees\n</tool_response>" in text
        assert json.dumps(WEATHER) in text
        assert "so so" in text
    refused = client.post(CHAT, json=chat_body(messages=[asked | notes]))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].provider_specific_fields"


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


def test_reasoning(client: Served, tokenizer: Tokenizer, says: Says) -> None:
    message, _ = says(TEXT, **THINKING)
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, "Four.")
    usage = ask(client, **THINKING)["usage"]
    num_reasoning = len(tokenizer.encode(TEXT[: TEXT.index("\n\nFour")]))
    assert usage["completion_tokens_details"]["reasoning_tokens"] == num_reasoning
    chunks = events(client, **THINKING, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == usage
    message, reason = says(TEXT, **THINKING, max_tokens=3)
    assert (message["content"], reason) == ("", "length")
    assert THOUGHT.startswith(message["reasoning_content"])
    # Without a think block in the prompt the text is content, but for a block of its own.
    assert says(TEXT)[0]["content"] == TEXT
    assert says(f"<think>\n{TEXT}")[0]["reasoning_content"] == THOUGHT


def test_the_flags_for_formats(serve: Serve, tokenizer: Tokenizer) -> None:
    for settings, text, fields, expected in (
        ({"reasoning_parser": "none"}, f"<think>\n{TEXT}", {}, (None, f"<think>\n{TEXT}")),
        ({"reasoning_parser": "gpt_oss"}, HARMONY, {"tool_choice": "required"}, ("hm", "Y")),
        ({"tool_call_parser": "none"}, CALL, {}, (None, CALL)),
        ({"tool_call_parser": "qwen3_coder"}, XML, {}, '{"city": "Rome", "days": 3}'),
    ):
        with serve(saying(tokenizer, text), **settings) as client:
            if isinstance(expected, str):
                message = ask(client, tools=[WEATHER])["choices"][0]["message"]
                assert message["tool_calls"][0]["function"]["arguments"] == expected
                continue
            message = ask(client, tools=[WEATHER], tool_choice="none")["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == expected
            if settings != {"reasoning_parser": "none"}:
                response = client.post(CHAT, json=chat_body(tools=[WEATHER], **fields))
                assert response.status_code == 400
                param = next(iter(fields), "tools")
                assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("effort", "kwargs", "thinks", "budget"),
    [
        (None, {}, False, None),
        ("none", {}, False, None),
        ("high", {}, True, None),
        ("high", {"enable_thinking": False}, False, None),
        ("low", {}, True, 2048),
        ("low", {"thinking_budget": 7}, True, 7),
        (None, {"thinking_budget": 7}, False, None),
        (None, {"enable_thinking": True, "thinking_budget": 0}, True, 0),
    ],
)
def test_effort_and_budget_of_thinking(
    client: Served,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    effort: str | None,
    kwargs: dict[str, Any],
    thinks: bool,
    budget: int | None,
) -> None:
    ask(client, chat_template_kwargs=kwargs, **({"reasoning_effort": effort} if effort else {}))
    assert prompt_of(engine, tokenizer).endswith("<think>\n") == thinks
    expected = GrammarSpec("free", free_until="</think>", free_tokens=budget)
    grammar = engine.submitted[-1].sampling.grammar
    assert grammar == (None if budget is None else expected)


def test_budgets_that_are_none(client: Served) -> None:
    for budget in (-1, 1.5, "7", True):
        kwargs = {"thinking_budget": budget}
        response = client.post(CHAT, json=chat_body(chat_template_kwargs=kwargs))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template_kwargs.thinking_budget"
