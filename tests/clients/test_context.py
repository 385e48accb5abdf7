"""A prompt that is too long is told in words that make clients shorten the chat, not give up."""

from __future__ import annotations

import re
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
CHAT = ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]})
MESSAGES = ("/v1/messages", lambda text: {**CHAT[1](text), "max_tokens": 8})
RESPONSES = ("/v1/responses", lambda text: {"input": text})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("times", [1_100, 100_000], ids=["by its tokens", "by its bytes"])
@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES], ids=lambda api: api[0])
def test_words(serve: Serve, tokenizer: Tokenizer, api: Any, times: int, stream: bool) -> None:
    path, body = api
    with serve(saying(tokenizer, "hi")) as client:
        message, code = told(client, path, {**body("word " * times), "stream": stream})
    for pattern in SHOULD_MATCH:
        assert re.search(pattern, message, re.IGNORECASE), message
    prompt, most = map(int, re.search(SHOULD_MATCH[0], message, re.IGNORECASE).groups())
    assert prompt > most == 1023
    assert code in (None, "context_length_exceeded")
    assert (code is None) == (path == MESSAGES[0])


def told(client: Served, path: str, body: dict[str, Any]) -> tuple[str, str | None]:
    answer = client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    return error["message"], error.get("code")


def test_an_answer_that_is_too_long(serve: Serve, tokenizer: Tokenizer) -> None:
    path, body = CHAT
    with serve(saying(tokenizer, "hi")) as client:
        message, code = told(client, path, {**body("hi"), "max_tokens": 2000})
        assert re.search(SHOULD_MATCH[1], message), message
        assert code == "context_length_exceeded"
        # Agents ask for far more than they need: Anthropic's field is only a limit.
        fields = {"model": MODEL, **body("hi"), "max_tokens": 2000}
        assert client.post(MESSAGES[0], json=fields).status_code == 200
