"""Requests as Open WebUI sends them, and answers as it reads them; it is too large to install."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.clients.asking import CITIES, SENTENCE, WEATHER, called, weather_question
from tests.clients.shapes import CHAT, check_stream
from tests.support.process import MODEL, Server

HEADERS = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "A%20User"}


def chat(content: str, **fields: Any) -> dict[str, Any]:
    """Returns a chat request with the parameters of Open WebUI's advanced settings."""
    messages = [{"role": "user", "content": [{"type": "text", "text": content}]}]
    messages.insert(0, {"role": "system", "content": "Answer clearly and briefly."})
    options = {"stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": 100}
    body = {"stream": True, "model": MODEL, "messages": messages, **options}
    return body | {"top_p": 1, "top_k": 40, "min_p": 0, "frequency_penalty": 0} | fields


def read(answer: httpx.Response) -> dict[str, Any]:
    """Returns the message as Open WebUI assembles it from the chunks."""
    assert answer.status_code == 200, answer.text
    check_stream(CHAT, answer)
    message: dict[str, Any] = {"content": "", "calls": {}, "usage": {}}
    for line in answer.text.split("\n"):
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        message["usage"].update(chunk.get("usage", {}) or {})
        # With a null here, Open WebUI drops the whole chunk.
        message["usage"].update(chunk.get("timings", {}))
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                whole = message["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                for key in whole:
                    whole[key] += call["function"].get(key) or ""
    return message


def test_four_chats_and_their_counts(server: Server) -> None:
    def one(body: dict[str, Any]) -> dict[str, Any]:
        return read(httpx.post(f"{server.url}{CHAT}", json=body, headers=HEADERS, timeout=60))

    # Open WebUI's slider of max_tokens goes from -2 to 131,072, beyond the context length.
    asked = [chat(SENTENCE.question, max_tokens=limit) for limit in (-2, 100, 131_072)]
    with_tool = chat(weather_question(CITIES[0]), tools=[WEATHER])
    with_tool["messages"].pop(0)
    with ThreadPoolExecutor(4) as pool:
        *messages, calling = pool.map(one, [*asked, with_tool])
    for message in messages:
        assert message["content"] == SENTENCE.answer
        usage = message["usage"]
        assert usage["completion_tokens"] == usage["predicted_n"] > 0
        assert usage["prompt_tokens"] == usage["prompt_n"] + usage["cache_n"] > 0
        assert usage["predicted_per_second"] > 0
    (call,) = calling["calls"].values()
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == called(CITIES[0])
