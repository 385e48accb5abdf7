"""Replays of real clients' requests, to a scripted engine and to the bundled model."""

import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mlx_mtp.text.tokenizer import Tokenizer
from tests.clients import captures
from tests.clients.agents import AGENTS
from tests.clients.shapes import (
    CHAT,
    MESSAGES,
    RESPONSES,
    api_of,
    calls_in,
    check_stream,
    check_whole,
    streamed_calls_in,
)
from tests.server import conftest as scripted
from tests.server.conftest import Serve
from tests.support.fake_engine import FakeEngine, FakeInfo, answer
from tests.support.in_process import GOOD, in_process
from tests.support.process import MODEL, Server

CAPTURES = captures.load()
LONG = FakeInfo(max_model_len=262_144)
ANSWER_TOKENS = 12

Sent = Mapping[str, Any]


def bodies(sent: Sent, model: str, *, stream: bool) -> dict[str, Any]:
    body = {**sent["body"], "model": model, "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    return body


def post(client: httpx.Client, sent: Sent, body: dict[str, Any]) -> httpx.Response:
    return client.post(sent["path"], json=body, headers=sent["headers"])


def test_every_agent_has_one_of_its_version() -> None:
    kept = {capture.client: capture.version for capture in CAPTURES}
    assert kept == {agent.name: agent.version for agent in AGENTS}
    for capture in CAPTURES:
        # A question with tools, and the turn with the tool's result.
        assert len(capture.requests) >= 2
        assert capture.requests[-1]["body"]["tools"]
        assert "sum-42" in json.dumps(capture.requests[-1]["body"])
        text = json.dumps([sent["body"] for sent in capture.requests])
        assert not re.search(r"(?<![\w/:])/(root|tmp|work|Users|var)/", text)


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda c: c.client)
def test_on_a_scripted_engine(
    capture: captures.Capture, serve: Serve, tokenizer: Tokenizer
) -> None:
    """Requests with tools get a call of the client's shell tool; those without get plain text."""
    (agent,) = [agent for agent in AGENTS if agent.name == capture.client]
    text = f"I run it.\n<tool_call>\n{json.dumps(agent.call('ls'))}\n</tool_call>"
    engine = FakeEngine(answer(tokenizer.encode(text), sizes=(5, 1, 3)), LONG)
    with serve(engine) as client:
        for sent in capture.requests:
            expected = [agent.tool] if "tools" in sent["body"] else []
            path = sent["path"]
            whole = post(client, sent, bodies(sent, scripted.MODEL, stream=False))
            assert calls_in(path, check_whole(path, whole)) == expected
            streamed = post(client, sent, bodies(sent, scripted.MODEL, stream=True))
            assert streamed_calls_in(path, check_stream(path, streamed)) == expected


def all_ways(server: Server, requests: Iterable[Sent], most_tools: int) -> None:
    """Send each request streamed and not streamed, four at a time."""

    def one(job: tuple[Sent, bool]) -> None:
        sent, stream = job
        path, body = sent["path"], bodies(sent, MODEL, stream=stream)
        if "tools" in body:
            body["tools"] = body["tools"][:most_tools]
        limit = "max_output_tokens" if api_of(path) == RESPONSES else "max_tokens"
        answered = post(client, sent, body | {limit: ANSWER_TOKENS})
        if stream:
            assert len(check_stream(path, answered)) > 2
        else:
            usage = check_whole(path, answered).usage
            tokens = usage.completion_tokens if api_of(path) == CHAT else usage.output_tokens
            assert 0 < tokens <= ANSWER_TOKENS

    jobs = [(sent, stream) for sent in requests for stream in (True, False)]
    with httpx.Client(base_url=server.url, timeout=300) as client, ThreadPoolExecutor(4) as pool:
        list(pool.map(one, jobs))
    server.wait_until_empty()


def test_last_turns_on_the_bundled_model(server: Server) -> None:
    # Two tools suffice, as reading them takes most of the time; the scripted engine gets all.
    all_ways(server, [capture.requests[-1] for capture in CAPTURES], most_tools=2)


@pytest.mark.full
def test_all_turns_on_the_bundled_model(server: Server) -> None:
    all_ways(server, [sent for capture in CAPTURES for sent in capture.requests], most_tools=99)


# Patterns by which Claude Code, opencode, Continue and LiteLLM recognize a prompt that is too long.
SHOULD_MATCH = (
    r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
    r"This model's maximum context length is \d+ tokens",
)


@pytest.mark.parametrize("times", [1_100, 100_000], ids=["by its tokens", "by its bytes"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_prompt_that_is_too_long_makes_clients_shorten_the_chat(path: str, times: int) -> None:
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
