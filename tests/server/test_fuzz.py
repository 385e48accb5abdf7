"""Random changes to good requests: the answer is 200 or 4xx, an error has the API's shape."""

from __future__ import annotations

import copy
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import h11
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.server.json_text import parse_json
from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import FakeEngine, answer
from tests.server.raw_http import Answer, error_of, incoming, request_bytes
from tests.server.wire_help import WEATHER, WEATHER_SCHEMA

SCHEMA_FORMAT = {"name": "w", "schema": WEATHER_SCHEMA, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "stop": ["x"]}
OPENAI = {
    **SAMPLING,
    "top_k": 3,
    "min_p": 0.1,
    "n": 2,
    "seed": 7,
    "logit_bias": {"5": 1},
    "stop_token_ids": [4],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "user": "u",
    "stream": False,
    "metadata": {"a": "b"},
    "mtp": {"num_draft_tokens": 1},
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "x"}]},
]
ANTHROPIC_TOOL = {"name": "get_weather", "description": "d", "input_schema": WEATHER_SCHEMA}
COUNT = {
    "model": MODEL,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": BLOCKS,
    "tools": [ANTHROPIC_TOOL],
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
    (
        "/v1/chat/completions",
        {
            **OPENAI,
            "model": MODEL,
            "messages": CHAT,
            "tools": [WEATHER],
            "tool_choice": "auto",
            "logprobs": True,
            "top_logprobs": 2,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"thinking_budget": 3},
            "parallel_tool_calls": False,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": CHAT[:2],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "response_format": {"type": "json_schema", "json_schema": SCHEMA_FORMAT},
        },
    ),
    ("/v1/completions", {**OPENAI, "model": MODEL, "prompt": ["hi", "you"], "logprobs": 1}),
    ("/v1/completions", {"model": MODEL, "prompt": [[5, 6], [7]], "guided_choice": ["a", "b"]}),
    ("/v1/messages", {**COUNT, "max_tokens": 5, "stop_sequences": ["x"], "top_k": 3, "top_p": 0.5}),
    ("/v1/messages/count_tokens", COUNT),
    (
        "/v1/responses",
        {
            "model": MODEL,
            "input": ITEMS,
            "instructions": "Be brief.",
            "top_logprobs": 1,
            "tools": [{"type": "function", **WEATHER["function"]}],
            "max_output_tokens": 5,
            "reasoning": {"effort": "low", "summary": "auto"},
            "metadata": {"a": "b"},
            "text": {"format": {"type": "text"}},
            "include": ["reasoning.encrypted_content"],
        },
    ),
    ("/tokenize", {"messages": CHAT, "tools": [WEATHER], "return_token_strs": True}),
    ("/tokenize", {"prompt": "hi", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
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
def mutated(draw: st.DrawFn) -> tuple[str, Any]:
    """A good body with one to three changes, and the route that it is for (mostly)."""
    path, good = draw(st.sampled_from(GOOD))
    body = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from(list(places(body))))
        old = at(body, where)
        change = draw(st.sampled_from(["replace", "remove", "repeat", "graft", "rename", "wrap"]))
        if change == "replace" or not where:
            if not where:
                continue
            at(body, where[:-1])[where[-1]] = draw(VALUES)
        elif change == "remove":
            del at(body, where[:-1])[where[-1]]
        elif change == "repeat" and isinstance(old, list | str):
            at(body, where[:-1])[where[-1]] = old * draw(st.integers(0, 40))
        elif change == "graft":
            other = draw(st.sampled_from(GOOD))[1]
            graft = at(other, draw(st.sampled_from(list(places(other)))))
            at(body, where[:-1])[where[-1]] = copy.deepcopy(graft)
        elif change == "rename" and isinstance(where[-1], str):
            at(body, where[:-1])[draw(TEXTS)] = at(body, where[:-1]).pop(where[-1])
        elif change == "wrap":
            at(body, where[:-1])[where[-1]] = draw(
                st.sampled_from([[old], {"type": old}, [old] * 3])
            )
    return draw(st.sampled_from([path] * 9 + [other for other, _ in GOOD])), body


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[Served]:
    with serve(FakeEngine(answer([300]))) as client:
        yield client


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_what_is_changed_was_good(client: Served, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text


def check(client: Served, path: str, content: bytes) -> None:
    response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 200 or 400 <= response.status_code < 500, (
        response.status_code,
        response.text[:500],
    )
    if response.status_code != 200:
        error_of(response, path)


def check_mutations(client: Served, examples: int) -> None:
    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(mutated())
    def run(case: tuple[str, Any]) -> None:
        path, body = case
        check(client, path, json.dumps(body).encode())

    run()
    assert client.get("/health").status_code == 200


def test_mutations_of_good_bodies(client: Served) -> None:
    check_mutations(client, 300)


@pytest.mark.full
def test_many_mutations_of_good_bodies(client: Served) -> None:
    check_mutations(client, 20_000)


def check_bytes(client: Served, examples: int) -> None:
    seeds = [(path, json.dumps(body).encode()) for path, body in GOOD]
    tokens = [
        *(b"[", b"]", b"{", b"}", b'"', b",", b":", b"\\", b"\\u", b"\\ud800", b"\xff", b"\x00"),
        *(b"NaN", b"1e999", b"-", b"0" * 400, b"[" * 300, b'{"a":' * 300, b"null", b"\xef\xbb\xbf"),
    ]

    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.sampled_from(seeds), st.randoms(use_true_random=False))
    def run(seed: tuple[str, bytes], chance: random.Random) -> None:
        path, content = seed
        check(client, path, spoilt(content, tokens, chance))

    run()


def spoilt(content: bytes, tokens: list[bytes], chance: random.Random) -> bytes:
    """Some bytes replaced, cut out, repeated or put in."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(content) + 1)
        end = min(len(content), start + chance.choice([0, 0, 1, 1, 2, 10, 100]))
        middle = chance.choice([b"", content[start:end] * 2, chance.choice(tokens)])
        content = content[:start] + middle + content[end:]
    return content


def test_bytes_of_good_bodies(client: Served) -> None:
    check_bytes(client, 300)


@pytest.mark.full
def test_many_bytes_of_good_bodies(client: Served) -> None:
    check_bytes(client, 20_000)


@settings(max_examples=500, deadline=None)
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


def is_whole(sent: bytes) -> bool:
    """There is a request to be answered; otherwise the server has to be told that it ends here.

    To end what is whole would say that nobody waits for its answer.
    """
    parser = h11.Connection(h11.SERVER)
    try:
        parser.receive_data(sent)
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return False
            if event is h11.PAUSED or isinstance(event, h11.EndOfMessage):
                return True
    except h11.RemoteProtocolError:
        return True


def check_sockets(client: Served, rounds: int, seed: int) -> None:
    """Spoilt requests, in pieces, on one connection after the other: each gets an answer."""
    chance = random.Random(seed)
    tokens = [
        *(
            b"\r\n",
            b"\n",
            b"\r",
            b" ",
            b":",
            b"\x00",
            b"\xff",
            b"Host: a\r\n",
            b"GET ",
            b"HTTP/1.1",
        ),
        *(
            b"Content-Length: 5\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"0\r\n\r\n",
            b"ffffffff\r\n",
        ),
        *(
            b"Expect: 100-continue\r\n",
            b"Connection: close\r\n",
            b"Upgrade: h2c\r\n",
            b"X" * 20_000,
        ),
    ]
    body = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
    chunked = b"5\r\n" + body[:5] + b"\r\n%x\r\n" % len(body[5:]) + body[5:] + b"\r\n0\r\n\r\n"
    seeds = [
        request_bytes("GET", "/v1/models"),
        request_bytes("HEAD", "/"),
        request_bytes("POST", "/v1/completions", body=body),
        request_bytes("POST", "/v1/completions", {"Transfer-Encoding": "chunked"}, chunked),
    ]
    for number in range(rounds):
        sent = spoilt(chance.choice(seeds), tokens, chance)
        with socket.create_connection(client.address, timeout=30) as sock:
            cut = chance.randrange(len(sent) + 1)
            try:
                sock.sendall(sent[:cut])
                sock.sendall(sent[cut:])
                if not is_whole(sent):
                    sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # It was refused before it was all sent; the answer is there all the same.
            if not sent.strip(b"\r\n"):
                continue
            method = "HEAD" if sent.lstrip().startswith(b"HEAD ") else "POST"
            answer = Answer(incoming(sock), method)
            assert answer.status == 200 or 400 <= answer.status < 500, (number, sent)
            if answer.status != 200 and method != "HEAD":
                error_of(answer, "/")
    assert client.get("/health").status_code == 200


def test_spoilt_requests_on_sockets(client: Served) -> None:
    check_sockets(client, 400, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_spoilt_requests_on_sockets(client: Served, seed: int) -> None:
    check_sockets(client, 2000, seed)
