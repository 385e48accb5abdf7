"""The names that the model is served under, and routes under the names that clients use."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL
from tests.support.in_process import CHAT, COUNT, GENERATING, GOOD, in_process
from tests.support.raw_http import error_of
from tests.support.wire_help import saying

SECOND = "second"


@pytest.fixture(scope="module")
def client(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with in_process(saying(tokenizer, "Hi."), other_names=(SECOND,)) as client:
        yield client


@pytest.fixture(scope="module")
def easy(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with in_process(saying(tokenizer, "Hi."), any_model_name=True) as client:
        yield client


def body(path: str, model: Any, **fields: Any) -> dict[str, Any]:
    given = {key: value for key, value in GOOD[path].items() if key != "model"}
    return given | fields | ({} if model is ... else {"model": model})


# The model in the request, and in the answer (None: the request is refused).
ASKED = [(MODEL, MODEL), (SECOND, SECOND), (..., MODEL), ("", MODEL), (None, MODEL)]
ASKED += [(f"{SECOND}:latest", f"{SECOND}:latest"), ("third", None), ("/etc/passwd", None)]


@pytest.mark.parametrize(("model", "shown"), ASKED)
@pytest.mark.parametrize("path", [*GENERATING, COUNT])
def test_a_name_is_answered_with_itself(
    client: httpx.Client, easy: httpx.Client, path: str, model: Any, shown: str | None
) -> None:
    refused = client.post(path, json=body(path, model))
    if shown is None:
        assert f"'{MODEL}', '{SECOND}'" in error_of(refused, path, 404)
    for server, name in ((client, shown), (easy, shown or model)):
        if name is None or path == COUNT:
            continue
        answer = server.post(path, json=body(path, model)).json()
        assert answer["model"] == name
        stream = server.post(path, json=body(path, model, stream=True)).text
        assert f'"model":"{name}"' in stream


def test_models_are_listed_and_found_by_each_name(client: httpx.Client, easy: httpx.Client) -> None:
    page = client.get("/v1/models").json()
    assert [card["id"] for card in page["data"]] == [MODEL, SECOND]
    assert (page["first_id"], page["last_id"]) == (MODEL, SECOND)
    for name in (MODEL, SECOND):
        assert client.get(f"/v1/models/{name}").json()["id"] == name
    assert client.get("/v1/models/claude-opus-4-5").status_code == 404
    assert easy.get("/v1/models/claude-opus-4-5").json()["id"] == "claude-opus-4-5"
    long = easy.post(CHAT, json=body(CHAT, "x" * 257))
    assert "256" in error_of(long, CHAT, 400)
