"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import FakeEngine, answer
from tests.server.wire_help import WEATHER

TEXT = "Once upon a time, é 🎉 <|im_start|>"


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[Served]:
    with serve(FakeEngine(answer([300]))) as client:
        yield client


def test_text_there_and_back(client: Served, tokenizer: Tokenizer) -> None:
    for name in ("prompt", "content"):
        body = client.post("/tokenize", json={name: TEXT, "return_token_strs": True}).json()
        assert body["tokens"] == list(tokenizer.encode(TEXT))
        assert body["count"] == len(body["tokens"])
        assert body["max_model_len"] == 1024
        assert body["token_strs"][0] == "Once"
    tokens = {"model": MODEL, "tokens": body["tokens"]}
    assert client.post("/detokenize", json=tokens).json() == {"prompt": TEXT, "content": TEXT}
    empty = client.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()
    assert empty["tokens"] == []
    assert empty["token_strs"] is None


def test_a_chat(client: Served, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    kwargs = {"enable_thinking": True}
    body = {"messages": messages, "tools": [WEATHER], "chat_template_kwargs": kwargs}
    expected = tokenizer.encode_chat(messages, [WEATHER], kwargs)
    assert client.post("/tokenize", json=body).json()["tokens"] == list(expected)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [WEATHER]}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"model": "x", "prompt": "a"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_bad_requests(client: Served, path: str, body: dict[str, Any], param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
