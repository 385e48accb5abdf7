"""Open WebUI, which is too large to install here: what it sends, and what it reads of answers."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.clients.asking import CITIES, SENTENCE, WEATHER, called, weather_question
from tests.clients.shapes import CHAT, check_stream
from tests.support.process import MODEL, Server

HEADERS = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "A%20User"}


def chat(content: str, **fields: Any) -> dict[str, Any]:
    """A turn of a chat, with the parameters of its advanced settings."""
    messages = [{"role": "user", "content": [{"type": "text", "text": content}]}]
    messages.insert(0, {"role": "system", "content": "Answer clearly and briefly."})
    options = {"stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": 100}
    body = {"stream": True, "model": MODEL, "messages": messages, **options}
    return body | {"top_p": 1, "top_k": 40, "min_p": 0, "frequency_penalty": 0} | fields


def read(answer: httpx.Response) -> dict[str, Any]:
    """An answer as it puts it together, chunk by chunk."""
    assert answer.status_code == 200, answer.text
    check_stream(CHAT, answer)
    message: dict[str, Any] = {"content": "", "calls": {}, "usage": {}}
    for line in answer.text.split("\n"):
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        message["usage"].update(chunk.get("usage", {}) or {})
        # A null here makes it drop the whole chunk.
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

    # Its slider of max_tokens goes from -2 to 131,072, beyond the context.
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
