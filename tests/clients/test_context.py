"""A prompt that is too long is answered in words that make clients shorten the chat."""

import re

import pytest

from tests.server.in_process import CHAT, GOOD, MESSAGES, RESPONSES, in_process

# As the clients' own code looks for them: Claude Code, opencode, Continue, LiteLLM.
SHOULD_MATCH = (
    r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
    r"This model's maximum context length is \d+ tokens",
)


@pytest.mark.parametrize("times", [1_100, 100_000], ids=["by its tokens", "by its bytes"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_words(path: str, times: int) -> None:
    text = "word " * times
    asked = {"input": text, "messages": [{"role": "user", "content": text}]}
    with in_process() as client:
        body = {key: asked.get(key, value) for key, value in GOOD[path].items()}
        answer = client.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    for pattern in SHOULD_MATCH:
        assert re.search(pattern, error["message"], re.IGNORECASE), error
    prompt, most = map(int, re.search(SHOULD_MATCH[0], error["message"], re.I).groups())
    assert prompt > most == 1023
    assert error.get("code") == (None if path == MESSAGES else "context_length_exceeded")
