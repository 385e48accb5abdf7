"""Requests to a served application, and parsing of its streams."""

import json
from collections.abc import Iterable
from typing import Any

import httpx

from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL
from tests.support.fake_engine import FakeEngine, answer

CHAT = "/v1/chat/completions"
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "d", "parameters": WEATHER_SCHEMA},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ARGUMENTS = '{"city": "Rome"}'


def saying(tokenizer: Tokenizer, text: str, sizes: Iterable[int] = (1, 2, 3)) -> FakeEngine:
    """Returns an engine that always answers `text`, in steps of `sizes` tokens in turn."""
    return FakeEngine(answer(tokenizer.encode(text), sizes))


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def ask(client: httpx.Client, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    """Returns a whole answer; a chat needs only the fields that differ from saying hi."""
    body = chat_body(**fields) if path == CHAT else {"model": MODEL, **fields}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    """Returns a stream's events, as the JSON of their data, without comments and [DONE]."""
    body = chat_body(**fields) if path == CHAT else {"model": MODEL, **fields}
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n"):
        fields_of = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        data = fields_of.get("data")
        if data is not None and data != "[DONE]":
            value = json.loads(data)
            assert fields_of.get("event", value.get("type")) == value.get("type")
            found.append(value)
    return found


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Returns a chat stream's message, assembled as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"].startswith("call_")
                    assert call["type"] == "function"
                    message["tool_calls"].append({"id": call["id"], **call["function"]})
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    whole = message["tool_calls"][call["index"]]
                    whole["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"]:
                assert delta == {}
                message["finish_reason"] = choice["finish_reason"]
    return message


def prompt_of(engine: FakeEngine, tokenizer: Tokenizer) -> str:
    """Returns the latest request's prompt as text, with special tokens."""
    return tokenizer.text_of(engine.submitted[-1].prompt_token_ids)
