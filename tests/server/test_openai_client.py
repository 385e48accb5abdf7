"""OpenAI's own Python client against the server: what it parses is what most people will see."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve
from tests.server.fake_engine import FakeEngine, answer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(serve: Serve, tokenizer: Tokenizer) -> Iterator[openai.OpenAI]:
    engine = FakeEngine(answer(tokenizer.encode("Hello there, 🎉!")))
    with (
        serve(engine, api_keys=("k",)) as served,
        openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, seed=3, logprobs=True)
    assert answer.choices[0].message.content == "Hello there, 🎉!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].token == "Hello"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.seed == 3


def test_chat_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    ) as chunks:
        *parts, usage = list(chunks)
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "Hello there, 🎉!"
    assert parts[-1].choices[0].finish_reason == "stop"
    assert usage.usage.completion_tokens > 0


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello there, 🎉!"] * 2
    assert len(answer.choices[0].logprobs.text_offset) == len(answer.choices[0].logprobs.tokens)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
