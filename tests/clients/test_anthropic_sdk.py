"""Anthropic's Python SDK on the bundled model: messages, tools, counting; four at a time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import pytest

from tests.clients.asking import CITIES, FUNCTION, SENTENCE, called, weather_question
from tests.support.process import MODEL, Server

TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"]}
TOOL |= {"input_schema": FUNCTION["parameters"]}
# Newer SDKs have no `temperature` parameter, but the API accepts it.
GREEDY = {"extra_body": {"temperature": 0}}
HI = {"model": MODEL, "messages": [{"role": "user", "content": SENTENCE.question}]}
ASKED = {**HI, "max_tokens": 60}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, auth_token="none", max_retries=0) as client:
        yield client


def test_messages_streams_and_counts(client: anthropic.Anthropic) -> None:
    def prompt_tokens(message: anthropic.types.Message) -> int:
        return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)

    message = client.messages.create(**ASKED, **GREEDY)
    assert message.stop_reason == "end_turn"
    assert [block.text for block in message.content] == [SENTENCE.answer]
    with client.messages.stream(**ASKED, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == SENTENCE.answer
    assert final.usage.output_tokens == message.usage.output_tokens
    counted = client.messages.count_tokens(**HI).input_tokens
    assert counted == prompt_tokens(final) == prompt_tokens(message)
    more = client.messages.count_tokens(**HI, tools=[TOOL], system="Be brief.").input_tokens
    assert more > counted


def test_four_tool_calls_and_the_way_back(client: anthropic.Anthropic) -> None:
    def one(city: str) -> str:
        messages: list[Any] = [{"role": "user", "content": weather_question(city)}]
        fields = {"model": MODEL, "max_tokens": 100, "tools": [TOOL], **GREEDY}
        with client.messages.stream(messages=messages, **fields) as stream:
            first = stream.get_final_message()
        (call,) = first.content
        assert (call.name, call.input) == ("get_weather", called(city))
        assert first.stop_reason == "tool_use"
        told = f'{{"city": "{city}", "temperature": 21, "unit": "celsius", "sky": "sunny"}}'
        result = {"type": "tool_result", "tool_use_id": call.id, "content": told}
        messages.append({"role": "assistant", "content": first.content})
        messages.append({"role": "user", "content": [result]})
        (block,) = client.messages.create(messages=messages, **fields).content
        return block.text

    with ThreadPoolExecutor(4) as pool:
        assert all("21" in text for text in pool.map(one, CITIES))
