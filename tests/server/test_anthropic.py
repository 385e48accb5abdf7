"""Anthropic's messages, beyond the recorded exchanges."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import Serve, Served
from tests.server.fake_engine import FakeEngine
from tests.server.wire_help import WEATHER_SCHEMA, ask, events, saying

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "get_weather", "description": "d", "input_schema": WEATHER_SCHEMA}


def message(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    return ask(client, PATH, **{"messages": HI, "max_tokens": 100} | fields)


def stream(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return events(client, PATH, **{"messages": HI, "max_tokens": 100} | fields)


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return saying(tokenizer, "Hm, so so.\n</think>\n\nYes.")


@pytest.fixture(scope="module")
def client(serve: Serve, engine: FakeEngine) -> Iterator[Served]:
    with serve(engine) as client:
        yield client


def test_thinking_that_is_left_out_goes_round_all_the_same(
    client: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    blocks = message(client, thinking=thinking)["content"]
    assert blocks[0]["thinking"] == ""
    message(client, messages=[*HI, {"role": "assistant", "content": blocks}])
    prompt = b"".join(map(tokenizer.token_bytes, engine.submitted[-1].prompt_token_ids)).decode()
    assert "<think>\nHm, so so.\n</think>\n\nYes." in prompt


def test_the_seed_is_told_and_taken(client: Served, engine: FakeEngine) -> None:
    chosen = message(client)["seed"]
    assert engine.submitted[-1].sampling.seed == chosen
    assert message(client)["seed"] != chosen
    found = stream(client, seed=-9)
    assert engine.submitted[-1].sampling.seed == -9
    assert found[0]["message"]["seed"] == found[-2]["seed"] == -9


def test_counting_counts_more_than_fits(client: Served) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    assert ask(client, f"{PATH}/count_tokens", messages=long)["input_tokens"] > 1024
