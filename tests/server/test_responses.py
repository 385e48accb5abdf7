"""OpenAI's responses, beyond the recorded exchanges."""

from typing import Any

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import Serve
from tests.server.wire_help import WEATHER_SCHEMA, ask, events, saying

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


def test_the_seed_is_told_and_taken(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Yes.")
    with serve(engine) as client:
        chosen = response(client)["seed"]
        assert engine.submitted[-1].sampling.seed == chosen
        assert response(client)["seed"] != chosen
        found = stream(client, seed=-9)
    assert engine.submitted[-1].sampling.seed == -9
    assert [found[0]["response"]["seed"], found[-1]["response"]["seed"]] == [-9, -9]
