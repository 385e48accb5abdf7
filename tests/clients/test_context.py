"""A prompt that is too long is answered in words that make clients shorten the chat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve, Served
from tests.server.wire_help import saying

# As the clients' own code looks for them: Claude Code, opencode, Continue, LiteLLM.
SHOULD_MATCH = (
    r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
    r"This model's maximum context length is \d+ tokens",
)


def body(path: str, text: str) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"model": MODEL, "input": text}
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8}


@pytest.fixture(scope="module")
def client(serve: Serve, tokenizer: Tokenizer) -> Iterator[Served]:
    with serve(saying(tokenizer, "hi")) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("times", [1_100, 100_000], ids=["by its tokens", "by its bytes"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_words(client: Served, path: str, times: int, stream: bool) -> None:
    answer = client.post(path, json={**body(path, "word " * times), "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    for pattern in SHOULD_MATCH:
        assert re.search(pattern, error["message"], re.IGNORECASE), error
    prompt, most = map(int, re.search(SHOULD_MATCH[0], error["message"], re.I).groups())
    assert prompt > most == 1023
    code = None if path == "/v1/messages" else "context_length_exceeded"
    assert error.get("code") == code
