"""OpenAI's Python SDK: every way to ask, sync and async, four at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.asking import CITIES, FUNCTION, SENTENCE, WEATHER, called, weather_question
from tests.clients.conftest import MODEL
from tests.process import Server

RESPONSES_TOOL = {"type": "function", **FUNCTION}
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": SENTENCE.question}]}
GREEDY = {"temperature": 0}


class Reading(BaseModel):
    """What structured answers look like."""

    city: Literal["Rome", "Oslo"]
    degrees: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client as client:
        yield client


@asynccontextmanager
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def four(ask: Callable[[str], Any]) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, CITIES)) == [called(city) for city in CITIES]


def weather(city: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": weather_question(city)}]
    return {"model": MODEL, "messages": messages, "tools": [WEATHER], **GREEDY}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such model")


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**ASKED, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == SENTENCE.answer


def test_completions(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": ["Once upon", "Once upon a time"], "max_tokens": 12}
    whole = client.completions.create(**fields, **GREEDY)
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**fields, **GREEDY, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == list(texts.values())
    assert all(texts.values())


def test_parse_with_pydantic(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(**ASKED, response_format=Reading, **GREEDY)
    assert isinstance(parsed.choices[0].message.parsed, Reading)
    with client.chat.completions.stream(**ASKED, response_format=Reading, **GREEDY) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == parsed.choices[0].message.parsed
    response = client.responses.parse(
        model=MODEL, input=SENTENCE.question, text_format=Reading, **GREEDY
    )
    assert isinstance(response.output_parsed, Reading)


def test_parse_a_tools_arguments(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Reading, name="report")
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = client.chat.completions.parse(**ASKED, **fields, **GREEDY).choices
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Reading)


def test_four_chats_with_a_tool(client: openai.OpenAI) -> None:
    def helper(city: str) -> Any:
        with client.chat.completions.stream(**weather(city)) as stream:
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        return json.loads(call.function.arguments)

    four(helper)


def test_four_responses_with_a_tool(client: openai.OpenAI) -> None:
    def helper(city: str) -> Any:
        fields = {"model": MODEL, "input": weather_question(city), "tools": [RESPONSES_TOOL]}
        with client.responses.stream(**fields, **GREEDY) as stream:
            kinds = [event.type for event in stream]
            (item,) = stream.get_final_response().output
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        return json.loads(item.arguments)

    four(helper)


def test_a_responses_tool_result_goes_back(client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": weather_question(CITIES[0])}]
    fields = {"model": MODEL, "tools": [RESPONSES_TOOL], **GREEDY}
    first = client.responses.create(input=asked, **fields)
    (call,) = first.output
    told = json.dumps({**called(CITIES[0]), "temperature": 21, "sky": "sunny"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": told}
    second = client.responses.create(input=[*asked, call, result], **fields)
    assert "sunny" in second.output_text


def test_async_all_apis_at_once(server: Server) -> None:
    async def chat(client: openai.AsyncOpenAI) -> str:
        answer = await client.chat.completions.create(**ASKED, **GREEDY)
        return answer.choices[0].message.content

    async def stream(client: openai.AsyncOpenAI) -> str:
        chunks = await client.chat.completions.create(**ASKED, **GREEDY, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])

    async def response(client: openai.AsyncOpenAI) -> str:
        answer = await client.responses.create(model=MODEL, input=SENTENCE.question, **GREEDY)
        return answer.output_text

    async def helper(client: openai.AsyncOpenAI) -> str:
        async with client.chat.completions.stream(**ASKED, **GREEDY) as stream:
            final = await stream.get_final_completion()
        return final.choices[0].message.content

    async def completion(client: openai.AsyncOpenAI) -> str:
        text = f"<|im_start|>user\n{SENTENCE.question}<|im_end|>\n<|im_start|>assistant\n"
        fields = {"model": MODEL, "prompt": text, "max_tokens": 40, **GREEDY}
        return (await client.completions.create(**fields)).choices[0].text

    async def all_of_them() -> list[str]:
        async with async_client(server) as client:
            ways = (chat, stream, response, helper, completion)
            return await asyncio.gather(*(way(client) for way in ways * 2))

    assert set(asyncio.run(all_of_them())) == {SENTENCE.answer}
