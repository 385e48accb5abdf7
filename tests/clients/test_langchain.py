"""LangChain's standard tests of chat models, with its OpenAI client, on the bundled model."""

import asyncio
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("langchain_tests", reason="langchain-tests is in the extra `clients`")
pytest.importorskip("langchain_openai", reason="langchain-openai is in the extra `clients`")

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from mlx_mtp.engine.request import Request
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server import conftest as scripted
from tests.server.conftest import Serve
from tests.support.fake_engine import FakeEngine, Output, answer
from tests.support.process import MODEL, Server

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]

TOO_SMALL = {
    "test_json_mode": "must name two keys that only the question names; its object has others",
    "test_agent_loop": "must call a tool of its own accord; it answers in text",
    "test_unicode_tool_call_integration": "must copy a Chinese name, and never saw Chinese",
}
"""What the bundled model, of 12.6M parameters, can't do. A scripted engine does it below."""


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


SCRIPTS = (
    ("magic_function(3)", call("magic_function", input=3)),
    ("It's sunny.", "It is sunny in San Francisco."),
    ("San Francisco, CA?", call("get_weather", location="San Francisco, CA")),
    *(
        (name, call("unicode_customer", customer_name=name, description="a company"))
        for name in ("你好啊集团", "こんにちは株式会社")
    ),
    ("joke about cats", '{"setup": "Why do cats nap?", "punchline": "For the mews."}'),
)
"""What a prompt has in it, and what a clever model says to it."""

for _name, _function in inspect.getmembers(ChatModelIntegrationTests, inspect.isfunction):
    if inspect.iscoroutinefunction(_function):
        # All tests share one event loop: ChatOpenAI keeps connections between tests.
        pytest.mark.asyncio(loop_scope="module")(_function)
    if _name in TOO_SMALL:
        pytest.mark.xfail(reason=f"model too small: {TOO_SMALL[_name]}", strict=True)(_function)


def model_params(url: str, name: str) -> dict[str, Any]:
    fields = {"temperature": 0, "max_tokens": 120, "max_retries": 0, "stream_usage": True}
    return {"model": name, "base_url": f"{url}/v1", "api_key": "none", **fields}


class TestIntegration(ChatModelIntegrationTests):
    url = ""

    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        type(self).url = server.url

    @pytest.fixture
    def model(self, server: Server, request: pytest.FixtureRequest) -> BaseChatModel:
        more = getattr(request, "param", None) or {}
        return ChatOpenAI(**model_params(server.url, MODEL), **more)

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return model_params(self.url, MODEL)

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str | None:
        return MODEL


@pytest.mark.parametrize("more", [{}, {"output_version": "v1"}], ids=["v0", "v1"])
@pytest.mark.parametrize("name", TOO_SMALL)
def test_with_a_model_that_is_clever_enough(
    name: str, more: dict[str, Any], serve: Serve, tokenizer: Tokenizer
) -> None:
    """With scripted answers, the standard tests that the bundled model is too small for pass."""

    def script(request: Request) -> Iterator[Output]:
        prompt = tokenizer.text_of(request.prompt_token_ids)
        said = next(said for seen, said in SCRIPTS if seen in prompt)
        text = said if isinstance(said, str) else f"<tool_call>\n{json.dumps(said)}\n</tool_call>"
        return answer(tokenizer.encode(text), sizes=(2, 1, 3))(request)

    with serve(FakeEngine(script)) as client:
        url = str(client.base_url).rstrip("/")
        model = ChatOpenAI(**model_params(url, scripted.MODEL), **more)
        outcome = getattr(TestIntegration(), name)(model)
        if inspect.iscoroutine(outcome):
            asyncio.run(outcome)
