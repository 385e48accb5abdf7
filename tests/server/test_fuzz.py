"""Random changes to good requests: the answer is 200 or 4xx, an error has the API's shape."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.server.body import parse_json
from tests.server.conftest import MODEL
from tests.server.in_process import (
    CHAT,
    COUNT,
    DETOKENIZE,
    MESSAGES,
    RESPONSES,
    TEXT,
    TOKENIZE,
    in_process,
)
from tests.server.raw_http import error_of
from tests.server.wire_help import WEATHER, WEATHER_SCHEMA

SCHEMA_FORMAT = {"name": "w", "schema": WEATHER_SCHEMA, "strict": True}
FUNCTION = {"type": "function", **WEATHER["function"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
SAMPLING = json.loads("""{
    "temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "stop": ["x"], "top_k": 3, "min_p": 0.1,
    "n": 2, "seed": 7, "logit_bias": {"5": 1}, "stop_token_ids": [4], "stream": false,
    "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "user": "u", "metadata": {"a": "b"}, "mtp": {"num_draft_tokens": 1}
}""")
TOOL_CHAT = json.loads("""{
    "tool_choice": "auto", "logprobs": true, "top_logprobs": 2, "reasoning_effort": "low",
    "chat_template_kwargs": {"thinking_budget": 3}, "parallel_tool_calls": false
}""")
RESPONSE = json.loads("""{
    "instructions": "Be brief.", "top_logprobs": 1, "max_output_tokens": 5,
    "reasoning": {"effort": "low", "summary": "auto"}, "metadata": {"a": "b"},
    "text": {"format": {"type": "text"}}, "include": ["reasoning.encrypted_content"]
}""")
STREAM = {"include_usage": True, "continuous_usage_stats": True}
CHATS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
USE = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "h", "signature": "s"}, USE],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "x"}]},
]
COUNTED = {
    "model": MODEL,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": BLOCKS,
    "tools": [{"name": "get_weather", "description": "d", "input_schema": WEATHER_SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 3},
}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
]
GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**SAMPLING, **TOOL_CHAT, "model": MODEL, "messages": CHATS, "tools": [WEATHER]}),
    (
        CHAT,
        {
            "model": MODEL,
            "messages": CHATS[:2],
            "stream": True,
            "stream_options": STREAM,
            "response_format": {"type": "json_schema", "json_schema": SCHEMA_FORMAT},
        },
    ),
    (TEXT, {**SAMPLING, "model": MODEL, "prompt": ["hi", "you"], "logprobs": 1}),
    (TEXT, {"model": MODEL, "prompt": [[5, 6], [7]], "guided_choice": ["a", "b"]}),
    (MESSAGES, {**COUNTED, "max_tokens": 5, "stop_sequences": ["x"], "top_k": 3, "top_p": 0.5}),
    (COUNT, COUNTED),
    (RESPONSES, {**RESPONSE, "model": MODEL, "input": ITEMS, "tools": [FUNCTION]}),
    (TOKENIZE, {"messages": CHATS, "tools": [WEATHER], "return_token_strs": True}),
    (TOKENIZE, {"prompt": "hi", "add_special_tokens": False}),
    (DETOKENIZE, {"tokens": [5, 6, 7]}),
]
SEEDS = [(path, json.dumps(body).encode()) for path, body in GOOD]
TOKENS = [
    *(b"[", b"]", b"{", b"}", b'"', b",", b":", b"\\", b"\\u", b"\\ud800", b"\xff", b"\x00"),
    *(b"NaN", b"1e999", b"-", b"0" * 400, b"[" * 300, b'{"a":' * 300, b"null", b"\xef\xbb\xbf"),
]

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "<|im_end|>", "</think>", "<tool_call>", "{{ 1 }}", "\x00", "a" * 600]),
)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([-1, 0, 1, 1 << 31, 1 << 63, 1 << 64, 10**30, -(1 << 63), 1e308, 5e-324, -0.0]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something could be changed."""
    yield path
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(each, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A good body with one to three changes, and the route that it is for (mostly)."""
    path, good = draw(st.sampled_from(GOOD))
    body = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from(list(places(body))))
        if not where:
            continue
        holder, key, old = at(body, where[:-1]), where[-1], at(body, where)
        change = draw(st.sampled_from(["replace", "remove", "repeat", "graft", "rename", "wrap"]))
        if change == "replace":
            holder[key] = draw(VALUES)
        elif change == "remove":
            del holder[key]
        elif change == "repeat" and isinstance(old, list | str):
            holder[key] = old * draw(st.integers(0, 40))
        elif change == "graft":
            other = draw(st.sampled_from(GOOD))[1]
            holder[key] = copy.deepcopy(at(other, draw(st.sampled_from(list(places(other))))))
        elif change == "rename" and isinstance(key, str):
            holder[draw(TEXTS)] = holder.pop(key)
        elif change == "wrap":
            holder[key] = draw(st.sampled_from([[old], {"type": old}, [old] * 3]))
    other_path = st.sampled_from([path] * 9 + [other for other, _ in GOOD])
    return draw(other_path), json.dumps(body).encode()


def spoilt(content: bytes, tokens: list[bytes], chance: random.Random) -> bytes:
    """Some bytes replaced, cut out, repeated or put in."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(content) + 1)
        end = min(len(content), start + chance.choice([0, 0, 1, 1, 2, 10, 100]))
        middle = chance.choice([b"", content[start:end] * 2, chance.choice(tokens)])
        content = content[:start] + middle + content[end:]
    return content


@st.composite
def spoilt_bytes(draw: st.DrawFn) -> tuple[str, bytes]:
    path, content = draw(st.sampled_from(SEEDS))
    return path, spoilt(content, TOKENS, draw(st.randoms(use_true_random=False)))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with in_process() as client:
        yield client


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_what_is_changed_was_good(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("strategy", [mutated(), spoilt_bytes()], ids=["values", "bytes"])
@pytest.mark.parametrize("examples", [250, pytest.param(20_000, marks=pytest.mark.full)])
def test_changes_to_good_bodies(client: httpx.Client, strategy: Any, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(strategy)
    def run(case: tuple[str, bytes]) -> None:
        path, content = case
        response = client.post(path, content=content)
        assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
        if response.status_code != 200:
            error_of(response, path)

    run()
    assert client.get("/health").status_code == 200


@settings(max_examples=300)
@given(st.one_of(VALUES.map(lambda v: json.dumps(v).encode()), st.binary(max_size=60)))
def test_the_parser_agrees_with_the_librarys(content: bytes) -> None:
    """What is an object without names given twice comes out as json.loads reads it."""
    try:
        expected = json.loads(content.decode(), parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError):
        expected = None
    try:
        assert parse_json(content) == expected
    except InvalidRequestError:
        repeated = isinstance(expected, dict) and b'"' in content and "\\u" not in repr(content)
        assert not isinstance(expected, dict) or not repeated or has_name_twice(content)


def has_name_twice(content: bytes) -> bool:
    found = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        found.append(len(dict(pairs)) < len(pairs))

    json.loads(content, object_pairs_hook=note)
    return any(found)
