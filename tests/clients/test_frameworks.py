"""Python frameworks: each asks a question, then lets the model call a tool and use its result."""

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.clients.asking import CITIES, FUNCTION, SENTENCE, called, weather_question
from tests.support.process import MODEL, Server

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]

NAME, DESCRIPTION, SCHEMA = FUNCTION["name"], FUNCTION["description"], FUNCTION["parameters"]
LIMITS: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 100}
QUESTION = weather_question(CITIES[0])


class Reading(BaseModel):
    """The schema of the structured answers."""

    city: Literal["Rome", "Oslo"]
    degrees: Literal[1, 2, 3]


class Weather:
    """The tool in the forms that frameworks accept; records the arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, str]] = []

    def get_weather(self, city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
        self.calls.append({"city": city, "unit": unit})
        return json.dumps({**self.calls[-1], "temperature": 21, "sky": "sunny"})

    async def of_json(self, _: Any, arguments: str) -> str:
        return self.get_weather(**json.loads(arguments))


async def llama_index(url: str, weather: Weather) -> tuple[str, str, Any]:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    where = {"model": MODEL, "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
    llm = OpenAILike(**where, **LIMITS, is_chat_model=True, is_function_calling_model=True)
    chunks = await llm.astream_chat([ChatMessage(role="user", content=SENTENCE.question)])
    streamed = "".join([chunk.delta or "" async for chunk in chunks])
    tool = FunctionTool.from_defaults(weather.get_weather, description=DESCRIPTION)
    told = await FunctionAgent(tools=[tool], llm=llm).run(QUESTION)
    formed = await llm.as_structured_llm(Reading).acomplete(QUESTION)
    return streamed, str(told), formed.raw


async def pydantic_ai(url: str, weather: Weather) -> tuple[str, str, Any]:
    from pydantic_ai import Agent, Tool
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    async with Agent(model, model_settings=LIMITS).run_stream(SENTENCE.question) as result:
        streamed = await result.get_output()
    tool = Tool.from_schema(weather.get_weather, NAME, DESCRIPTION, SCHEMA)
    told = await Agent(model, model_settings=LIMITS, tools=[tool]).run(QUESTION)
    formed = await Agent(model, model_settings=LIMITS, output_type=Reading).run(QUESTION)
    return streamed, told.output, formed.output


async def openai_agents(url: str, weather: Weather) -> tuple[str, str, Any]:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    tool = agents.FunctionTool(NAME, DESCRIPTION, SCHEMA, weather.of_json, strict_json_schema=False)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        # The Responses API is this framework's default.
        fields = {"model": agents.OpenAIResponsesModel(MODEL, client)}
        fields["model_settings"] = agents.ModelSettings(**LIMITS)
        streamed = agents.Runner.run_streamed(agents.Agent("A", **fields), SENTENCE.question)
        async for _ in streamed.stream_events():
            pass
        told = await agents.Runner.run(agents.Agent("A", **fields, tools=[tool]), QUESTION)
        formed = await agents.Runner.run(agents.Agent("A", **fields, output_type=Reading), QUESTION)
    return streamed.final_output, told.final_output, formed.final_output


async def inspect_ai(url: str, weather: Weather) -> tuple[str, str, Any]:
    from inspect_ai import Task, eval_async
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import ToolDef

    # inspect-ai sets attributes on the function, which a bound method does not allow.
    async def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
        return weather.get_weather(city, unit)

    # The OpenAI provider needs a newer `openai` than LiteLLM allows; the Anthropic provider sends
    # no temperature of its own.
    options = {"api_key": "none", "extra_body": {"temperature": 0}}
    fields = {"model_base_url": url, "model_args": options, "max_tokens": 100, "max_retries": 0}
    described = {"city": "City name", "unit": "Unit"}
    tool = ToolDef(get_weather, NAME, DESCRIPTION, described).as_tool()
    texts = []
    for question, target, solver in (
        (SENTENCE.question, SENTENCE.answer, [generate()]),
        (QUESTION, "21", [use_tools(tool), generate()]),
    ):
        task = Task([Sample(question, target=target)], solver=solver, scorer=includes())
        (log,) = await eval_async(task, f"anthropic/{MODEL}", **fields)
        assert log.status == "success", log.error
        (sample,) = log.samples
        assert sample.scores["includes"].value == "C"
        texts.append(sample.output.completion)
    return texts[0], texts[1], None


# The module that each framework is imported from, and the function that uses the framework.
FRAMEWORKS: Mapping[str, Callable[[str, Weather], Awaitable[tuple[str, str, Any]]]] = {
    "llama_index.llms.openai_like": llama_index,
    "pydantic_ai": pydantic_ai,
    "agents": openai_agents,
    "inspect_ai": inspect_ai,
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_answer_and_a_tool(
    name: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name, reason=f"{name} is in the extra `clients`")
    monkeypatch.chdir(tmp_path)  # where inspect-ai writes its logs
    weather = Weather()
    answer, told, formed = asyncio.run(FRAMEWORKS[name](server.url, weather))
    assert answer == SENTENCE.answer
    assert weather.calls == [called(CITIES[0])]
    assert "21" in told
    assert formed is None or isinstance(formed, Reading)
    server.wait_until_empty()
    gc.collect()  # Objects left open warn here instead of failing a later test.
