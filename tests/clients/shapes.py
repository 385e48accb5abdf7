"""Checks of answers against the SDKs' types of fields and events."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TYPES: Mapping[str, tuple[Any, Any]] = {
    CHAT: (TypeAdapter(ChatCompletion), TypeAdapter(ChatCompletionChunk)),
    MESSAGES: (TypeAdapter(Message), TypeAdapter(RawMessageStreamEvent)),
    RESPONSES: (TypeAdapter(Response), TypeAdapter(ResponseStreamEvent)),
}
_FIRST = {MESSAGES: "message_start", RESPONSES: "response.created"}
_LAST = {MESSAGES: ("message_stop",), RESPONSES: ("response.completed", "response.incomplete")}


def api_of(path: str) -> str:
    """Returns the route of a path, without the query."""
    return path.split("?")[0]


def check_whole(path: str, answer: httpx.Response) -> Any:
    """Returns the answer as its SDK's type."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    return TYPES[api_of(path)][0].validate_python(answer.json())


def check_stream(path: str, answer: httpx.Response) -> list[Any]:
    """Returns the stream's events as their SDK's types; the stream must be complete."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    api = api_of(path)
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if api == CHAT:
        assert data.pop() == "[DONE]"
    # Pings can come anywhere, even before the first event while a prompt waits.
    values = [value for value in map(json.loads, data) if value.get("type") != "ping"]
    if api == CHAT:
        reasons = [choice["finish_reason"] for v in values for choice in v["choices"]]
        assert [reason for reason in reasons if reason is not None] == [reasons[-1]]
    else:
        assert values[0]["type"] == _FIRST[api] and values[-1]["type"] in _LAST[api]
    return [TYPES[api][1].validate_python(v) for v in values]


def calls_in(path: str, answer: Any) -> list[str]:
    """Returns the names of the tools that a whole answer calls."""
    api = api_of(path)
    if api == CHAT:
        return [call.function.name for call in answer.choices[0].message.tool_calls or []]
    items = answer.content if api == MESSAGES else answer.output
    return [item.name for item in items if item.type in ("tool_use", "function_call")]


def streamed_calls_in(path: str, events: list[Any]) -> list[str]:
    """Returns the names of the tools that a stream calls."""
    api = api_of(path)
    if api == CHAT:
        deltas = [choice.delta for event in events for choice in event.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        return [call.function.name for call in calls if call.function.name]
    if api == MESSAGES:
        blocks = [e.content_block for e in events if e.type == "content_block_start"]
        return [block.name for block in blocks if block.type == "tool_use"]
    items = [event.item for event in events if event.type == "response.output_item.done"]
    return [item.name for item in items if item.type == "function_call"]
