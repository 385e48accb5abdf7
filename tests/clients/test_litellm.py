"""LiteLLM, through its OpenAI and its Anthropic provider."""

import asyncio
import contextlib
import gc
import json
import os
import re
import secrets
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.asking import CITIES, SENTENCE, WEATHER, called, weather_question
from tests.support.process import MODEL, Server

litellm = pytest.importorskip("litellm", reason="litellm is in the extra `clients`")

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def _left_open() -> Iterator[None]:
    """Hide the warning about the event loop that LiteLLM leaves open."""
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


@pytest.fixture(params=["openai", "anthropic"])
def target(request: pytest.FixtureRequest, server: Server) -> dict[str, Any]:
    """The arguments that point a provider at the server."""
    base = f"{server.url}/v1" if request.param == "openai" else server.url
    where = {"model": f"{request.param}/{MODEL}", "api_base": base, "api_key": "none"}
    return {**where, "temperature": 0, "max_tokens": 100, "num_retries": 0}


def asked(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_completions_and_streams(target: dict[str, Any]) -> None:
    answer = litellm.completion(**target, **asked(SENTENCE.question))
    assert answer.choices[0].message.content == SENTENCE.answer
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**target, **asked(SENTENCE.question), **options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == SENTENCE.answer
    assert [c.usage for c in chunks if getattr(c, "usage", None)][-1].completion_tokens > 0
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**target, **asked("one two three four five " * 20_000))


def test_four_async_calls_of_a_tool_and_its_result_goes_back(target: dict[str, Any]) -> None:
    async def one(city: str, *, stream: bool) -> None:
        messages = asked(weather_question(city))["messages"]
        fields = {**target, "tools": [WEATHER]}
        answer = await litellm.acompletion(**fields, messages=messages, stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder([chunk async for chunk in answer])
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == called(city)
        told = json.dumps({**called(city), "temperature": 21, "sky": "sunny"})
        result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": told}
        messages = [*messages, message.model_dump(exclude_none=True), result]
        answer = await litellm.acompletion(**fields, messages=messages)
        assert "21" in answer.choices[0].message.content

    async def all_cities(*, stream: bool) -> None:
        await asyncio.gather(*(one(city, stream=stream) for city in CITIES))

    asyncio.run(all_cities(stream=False))
    asyncio.run(all_cities(stream=True))


@pytest.fixture
def proxy(server: Server, tmp_path: Path) -> Iterator[openai.OpenAI]:
    """LiteLLM's proxy with two entries for the server, as it never disables the only entry."""
    pytest.importorskip("fastapi_sso", reason="what the proxy imports is in the extra `clients`")
    where = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none"}
    models = [{"model_name": "m", "litellm_params": where | {"timeout": t}} for t in (60, 61)]
    config = {"model_list": models, "router_settings": {"num_retries": 0, "cooldown_time": 600}}
    (tmp_path / "config.yaml").write_text(json.dumps(config), "utf-8")
    key = f"sk-{secrets.token_hex(24)}"
    environment = {"CONFIG_FILE_PATH": str(tmp_path / "config.yaml"), "LITELLM_MASTER_KEY": key}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [sys.executable, "-m", "uvicorn", "litellm.proxy.proxy_server:app", "--port", "0"]
    log = tmp_path / "log"
    with log.open("w") as file, contextlib.ExitStack() as stack:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environment)
        stack.callback(process.wait)
        stack.callback(process.kill)
        while (running := re.search(r"running on (http://\S+)", log.read_text("utf-8"))) is None:
            assert process.poll() is None, log.read_text("utf-8")[-4000:]
            time.sleep(0.1)
        with openai.OpenAI(base_url=f"{running[1]}/v1", api_key=key, max_retries=0) as client:
            yield client


def test_what_is_not_offered_takes_no_server_out_of_service(proxy: openai.OpenAI) -> None:
    """Unsupported requests get a 400; after a 404 the proxy stops using the server for a while."""
    for _ in range(4):
        for ask in (
            lambda: proxy.embeddings.create(model="m", input=["hi"]),
            lambda: proxy.images.generate(model="m", prompt="a fox"),
            lambda: proxy.chat.completions.create(model="m", messages=[]),
        ):
            with pytest.raises(openai.BadRequestError):
                ask()
    fields = {"model": "m", **asked(SENTENCE.question), "temperature": 0, "max_tokens": 100}
    answer = proxy.chat.completions.create(**fields)
    assert answer.choices[0].message.content == SENTENCE.answer
    chunks = proxy.chat.completions.create(**fields, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == SENTENCE.answer
