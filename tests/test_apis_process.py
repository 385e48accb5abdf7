"""Every API against a real server process with MTP, several requests at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.process import Server, running

MODEL = "mlx-mtp-demo"
DATA = json.loads((Path(__file__).parent / "data" / "demo_prompts.json").read_text())
CITIES = DATA["cities"][:4]
WEATHER = DATA["weather_tool"]
SCHEMA = WEATHER["function"]["parameters"]
THOUGHT = "Is 498 even or odd?"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--enable-mtp", "--mtp-num-draft-tokens", "3", "--dtype", "float32") as server:
        yield server


def question(city: str) -> str:
    return f"What is the weather in {city} in celsius?"


def expected(city: str) -> dict[str, str]:
    return {"city": city, "unit": "celsius"}


def chat(server: Server, text: str, **fields: Any) -> Any:
    body = {"max_tokens": 200, "temperature": 0} | fields
    messages = [{"role": "user", "content": text}]
    return server.client.chat.completions.create(model=MODEL, messages=messages, **body)


def all_cities(ask: Any) -> None:
    """Four at a time."""
    with ThreadPoolExecutor(4) as pool:
        for city, arguments in zip(CITIES, pool.map(ask, CITIES)):
            assert arguments == expected(city)


def test_calls_in_chats(server: Server) -> None:
    def whole(city: str) -> Any:
        (choice,) = chat(server, question(city), tools=[WEATHER]).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        return json.loads(call.function.arguments)

    def streamed(city: str) -> Any:
        pieces, names = "", []
        for chunk in chat(server, question(city), tools=[WEATHER], stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                names += [call.function.name] if call.function.name else []
                pieces += call.function.arguments or ""
        assert names == ["get_weather"]
        return json.loads(pieces)

    all_cities(whole)
    all_cities(streamed)


def test_calls_in_messages(server: Server) -> None:
    tool = {"name": "get_weather", "description": "d", "input_schema": SCHEMA}
    tool["description"] = WEATHER["function"]["description"]

    def fields(city: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": question(city)}]
        # The SDK has no name for it any more, and the API takes it all the same.
        more = {"tools": [tool], "extra_body": {"temperature": 0}}
        return {"model": MODEL, "max_tokens": 200, "messages": messages, **more}

    def whole(client: anthropic.Anthropic, city: str) -> Any:
        message = client.messages.create(**fields(city))
        assert message.stop_reason == "tool_use"
        (block,) = message.content
        return block.input

    def streamed(client: anthropic.Anthropic, city: str) -> Any:
        with client.messages.stream(**fields(city)) as stream:
            (block,) = stream.get_final_message().content
        return block.input

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        all_cities(partial(whole, client))
        all_cities(partial(streamed, client))


def test_calls_in_responses(server: Server) -> None:
    function = WEATHER["function"]
    tool = {"type": "function", **function}

    def whole(city: str) -> Any:
        response = server.client.responses.create(
            model=MODEL, input=question(city), tools=[tool], temperature=0
        )
        (item,) = response.output
        return json.loads(item.arguments)

    def streamed(city: str) -> Any:
        with server.client.responses.stream(
            model=MODEL, input=question(city), tools=[tool], temperature=0
        ) as stream:
            (item,) = stream.get_final_response().output
        return json.loads(item.arguments)

    all_cities(whole)
    all_cities(streamed)


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_is_enforced_where_the_model_would_make_none(server: Server, parallel: bool) -> None:
    text = "What is the capital of France?"
    assert chat(server, text, tools=[WEATHER]).choices[0].message.tool_calls is None
    named = {"type": "function", "function": {"name": "get_weather"}}

    def forced(choice: Any) -> list[Any]:
        fields = {"tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 400}
        (answer,) = chat(server, text, tools=[WEATHER], **fields).choices
        assert answer.finish_reason == "tool_calls"
        return answer.message.tool_calls

    with ThreadPoolExecutor(4) as pool:
        for calls in pool.map(forced, ["required", named] * 2):
            if not parallel:
                assert len(calls) == 1
            for call in calls:
                arguments = json.loads(call.function.arguments)
                assert isinstance(arguments["city"], str)
                assert arguments.get("unit") in (None, "celsius", "fahrenheit")


def test_reasoning_and_its_budget(server: Server) -> None:
    def think(**kwargs: Any) -> Any:
        extra = {"chat_template_kwargs": {"enable_thinking": True, **kwargs}}
        return chat(server, THOUGHT, extra_body=extra)

    free = think()
    message = free.choices[0].message
    assert message.content == "498 is even."
    assert message.reasoning_content == "The last digit of 498 is 8. 8 is even, so 498 is even."
    spent = free.usage.completion_tokens_details.reasoning_tokens
    assert 10 < spent < free.usage.completion_tokens
    assert think(thinking_budget=spent).choices[0].message == message
    for budget in (0, 5):
        short = think(thinking_budget=budget)
        # The tag that is forced counts as well.
        assert short.usage.completion_tokens_details.reasoning_tokens == budget + 1
        thought = getattr(short.choices[0].message, "reasoning_content", "")
        assert message.reasoning_content.startswith(thought)
        assert short.choices[0].message.content


def test_a_conversation_with_a_tools_result(server: Server) -> None:
    first = chat(server, question("Oslo"), tools=[WEATHER]).choices[0].message
    messages = [
        {"role": "user", "content": question("Oslo")},
        first.model_dump(exclude_none=True),
        {
            "role": "tool",
            "tool_call_id": first.tool_calls[0].id,
            "content": '{"city": "Oslo", "temperature": 21, "unit": "celsius", "sky": "sunny"}',
        },
    ]
    answer = server.client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], temperature=0, max_tokens=60
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_who_sends_json_as_what_it_accepts_gets_a_stream_all_the_same(server: Server) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"Accept": "application/json"}
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
