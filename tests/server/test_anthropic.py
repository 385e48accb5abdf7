"""Anthropic's messages, beyond the recorded exchanges: what holds between several of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_mtp.engine.request import Request
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import FakeEngine, Output, out
from tests.server.wire_help import WEATHER_SCHEMA, ask, events, saying

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
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
    assert message(client, seed=chosen)["seed"] == chosen
    found = stream(client, seed=-9)
    assert engine.submitted[-1].sampling.seed == -9
    assert found[0]["message"]["seed"] == found[-2]["seed"] == -9


def test_counting_counts_what_an_answer_would_and_more_than_fits(client: Served) -> None:
    counted = ask(client, COUNT, messages=HI, system="Be kind.", tools=[TOOL])
    usage = message(client, system="Be kind.", tools=[TOOL])["usage"]
    assert counted == {"input_tokens": usage["input_tokens"]}
    # Counting is what one does with a chat that may be too long.
    long = [{"role": "user", "content": "word " * 3000}]
    assert ask(client, COUNT, messages=long)["input_tokens"] > 1024


def test_other_errors_in_anthropics_form(serve: Serve, tokenizer: Tokenizer) -> None:
    def error(response: httpx.Response, status: int) -> str:
        assert response.status_code == status
        body = response.json()
        assert (set(body), body["type"]) == ({"type", "error"}, "error")
        return body["error"]["type"]

    body = {"model": MODEL, "messages": HI, "max_tokens": 9}
    with serve(saying(tokenizer, "x"), api_keys=("k",)) as client:
        assert error(client.post(PATH, json=body), 401) == "authentication_error"
        keys = {"x-api-key": "k", "anthropic-version": "1999-01-01"}
        assert client.post(PATH, json=body, headers=keys).status_code == 200
        assert error(client.get(PATH, headers=keys), 405) == "invalid_request_error"
        assert error(client.post(PATH + "/x", headers=keys), 404) == "not_found_error"
        assert client.head("/").status_code == 200
        assert client.post(PATH, json=body, headers={"x-api-key": "wrong"}).status_code == 401


def test_silence_is_broken_by_pings(serve: Serve) -> None:
    waiting = True

    def slow(_: Request) -> Iterator[Output]:
        while waiting:
            yield None
        yield out(40, finish="length")

    body = {"model": MODEL, "messages": HI, "max_tokens": 100, "stream": True}
    with (
        serve(FakeEngine(slow), keep_alive_seconds=0.01) as client,
        client.stream("POST", PATH, json=body) as response,
    ):
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines).removeprefix("data: ")) == {"type": "ping"}
        waiting = False
        kinds = [json.loads(line.removeprefix("data: "))["type"] for line in lines]
    kinds = [kind for kind in kinds if kind != "ping"]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
