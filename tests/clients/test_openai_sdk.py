"""OpenAI's Python SDK on the bundled model: parsed answers, and tools four at a time."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
from pydantic import BaseModel

from tests.clients.asking import CITIES, FUNCTION, SENTENCE, called, weather_question
from tests.support.process import MODEL, Server

RESPONSES_TOOL = {"type": "function", **FUNCTION}
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": SENTENCE.question}]}
GREEDY = {"temperature": 0}


class Reading(BaseModel):
    """The schema of the structured answers."""

    city: Literal["Rome", "Oslo"]
    degrees: Literal[1, 2, 3]


def test_parse_with_pydantic(server: Server) -> None:
    client = server.client
    parsed = client.chat.completions.parse(**ASKED, response_format=Reading, **GREEDY)
    assert isinstance(parsed.choices[0].message.parsed, Reading)
    with client.chat.completions.stream(**ASKED, response_format=Reading, **GREEDY) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == parsed.choices[0].message.parsed
    response = client.responses.parse(
        model=MODEL, input=SENTENCE.question, text_format=Reading, **GREEDY
    )
    assert isinstance(response.output_parsed, Reading)
    tool = openai.pydantic_function_tool(Reading, name="report")
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = client.chat.completions.parse(**ASKED, **fields, **GREEDY).choices
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Reading)


def test_four_responses_with_a_tool_and_its_result_goes_back(server: Server) -> None:
    fields = {"model": MODEL, "tools": [RESPONSES_TOOL], **GREEDY}

    def one(city: str) -> Any:
        asked = [{"role": "user", "content": weather_question(city)}]
        with server.client.responses.stream(input=asked, **fields) as stream:
            kinds = [event.type for event in stream]
            (call,) = stream.get_final_response().output
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        told = json.dumps({**called(city), "temperature": 21, "sky": "sunny"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": told}
        second = server.client.responses.create(input=[*asked, call, result], **fields)
        assert "sunny" in second.output_text
        return json.loads(call.arguments)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, CITIES)) == [called(city) for city in CITIES]
