"""OpenAI's responses, beyond the recorded exchanges: what holds between several of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import Serve, Served
from tests.server.fake_engine import FakeEngine
from tests.server.wire_help import CALL, WEATHER_SCHEMA, ask, events, saying

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA}


def response(client: Any, **fields: Any) -> dict[str, Any]:
    return ask(client, PATH, **{"input": "hi"} | fields)


def stream(client: Any, **fields: Any) -> list[dict[str, Any]]:
    found = events(client, PATH, **{"input": "hi"} | fields)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return saying(tokenizer, f"I need Rome.\n</think>\n\nI look.\n{CALL}")


@pytest.fixture(scope="module")
def client(serve: Serve, engine: FakeEngine) -> Iterator[Served]:
    with serve(engine) as client:
        yield client


def test_the_seed_is_told_and_taken(client: Served, engine: FakeEngine) -> None:
    chosen = response(client)["seed"]
    assert engine.submitted[-1].sampling.seed == chosen
    assert response(client)["seed"] != chosen
    assert response(client, seed=chosen)["seed"] == chosen
    found = stream(client, seed=-9)
    assert engine.submitted[-1].sampling.seed == -9
    assert [found[0]["response"]["seed"], found[-1]["response"]["seed"]] == [-9, -9]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]},
        {"reasoning": {"effort": "high", "summary": "auto"}},
        {"max_output_tokens": 25},
    ],
)
def test_a_streams_parts_make_up_the_whole(client: Served, fields: dict[str, Any]) -> None:
    fields = {"reasoning": {"effort": "high"}, "tools": [TOOL]} | fields
    body, found = response(client, **fields), stream(client, **fields)
    last = found[-1]["response"]
    assert found[-1]["type"] == f"response.{body['status']}"
    assert without_ids(last["output"]) == without_ids(body["output"])
    assert last["usage"] == body["usage"]
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert items == last["output"]
    added = [event["item"]["id"] for event in found if event["type"].endswith("item.added")]
    assert added == [item["id"] for item in items]
    for event in found:
        kind, _, is_done = event["type"].partition(".done")
        text = event.get("text", event.get("arguments"))
        if is_done == "" and event["type"].endswith(".done") and text is not None:
            pieces = [e["delta"] for e in found if e["type"] == f"{kind}.delta"]
            assert "".join(pieces) == text
