"""The prefix cache as clients see it: usage in every API, metrics, and salts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.process import Server, running

MODEL = "mlx-mtp-demo"
SYSTEM = "You are an agent. " + " ".join(f"Rule {i}: be kind to the fox." for i in range(40))
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(
        "--enable-mtp", "--mtp-num-draft-tokens", "2", "--prefix-cache-size", "200MB"
    ) as server:
        yield server


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/{path}", json={"model": MODEL, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(server: Server, messages: list[dict[str, str]], **body: Any) -> dict[str, Any]:
    return post(server, "chat/completions", messages=messages, max_tokens=8, **body)


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_second_turn_finds_the_first(server: Server) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi! [chat]"}]
    first = chat(server, messages, temperature=0)
    assert cached(first) == 0
    assert first["timings"]["cache_n"] == 0
    told = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": told}, {"role": "user", "content": "More."}]
    second = chat(server, messages, temperature=0)
    # At least up to the end of the question, most likely to that of the answer.
    assert cached(second) >= first["usage"]["prompt_tokens"] - 10
    assert second["timings"]["cache_n"] == cached(second)
    assert second["timings"]["prompt_n"] == second["usage"]["prompt_tokens"] - cached(second)
    cold = chat(server, messages, temperature=0, cache_salt="nobody")
    assert cached(cold) == 0
    assert second["choices"][0]["message"] == cold["choices"][0]["message"]
    # All of it; the last token counts as computed.
    assert cached(chat(server, messages, temperature=0)) == second["usage"]["prompt_tokens"] - 1


def test_vllm_cve_2025_46570_cache_timing(server: Server) -> None:
    """Without the salt nobody can find out, by time or by usage, what was asked under it."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "My secret."}]
    own = chat(server, messages, temperature=0, cache_salt="mine")
    assert cached(chat(server, messages, temperature=0, cache_salt="mine")) > 0
    for guess in ("", "MINE", "mine "):
        salt = {"cache_salt": guess} if guess else {}
        # Unsalted, the other tests' system prompt may be there.
        asked = chat(server, messages, temperature=0, **salt)
        assert cached(asked) < own["usage"]["prompt_tokens"] - 5
    assert cached(chat(server, messages, temperature=0, cache_salt="other")) == 0


def test_choices_share_their_prompt(server: Server) -> None:
    """It is computed once, so it counts as computed; asked again, it is not."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi! [n]"}]
    before = server.metric("prefix_cache_hits_total")
    first = chat(server, messages, n=4, seed=3, cache_salt="n")
    assert cached(first) == 0
    prompt = first["usage"]["prompt_tokens"]
    assert server.metric("prefix_cache_hits_total") - before == 3 * prompt
    again = chat(server, messages, n=4, seed=3, cache_salt="n")
    assert cached(again) == prompt - 1
    assert [c["message"] for c in again["choices"]] == [c["message"] for c in first["choices"]]


def test_prompts_of_one_request_count_each(server: Server) -> None:
    prompts = [f"{SYSTEM} [{i}]" for i in range(2)]
    body = {"prompt": prompts, "n": 2, "max_tokens": 4, "temperature": 0, "cache_salt": "p"}
    first = post(server, "completions", **body)
    # The second shares all but its end with the first.
    assert 0 < cached(first) < first["usage"]["prompt_tokens"] / 2
    assert cached(post(server, "completions", **body)) == first["usage"]["prompt_tokens"] - 2


def test_responses_tell_cached_tokens(server: Server) -> None:
    body = {"instructions": SYSTEM, "input": "Hi! [responses]", "max_output_tokens": 8}
    first = post(server, "responses", **body, cache_salt="r")
    assert first["usage"]["input_tokens_details"]["cached_tokens"] == 0
    second = post(server, "responses", **body, cache_salt="r")
    usage = second["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1


def agents_turn(server: Server, nonce: str, messages: list[Any], stream: bool) -> dict[str, Any]:
    """As Claude Code asks: its first system block has a nonce that changes with each turn."""
    header = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={nonce};"
    body = {
        "model": MODEL,
        "system": [
            {"type": "text", "text": header},
            {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [TOOL],
        "messages": messages,
        "max_tokens": 16,
        "stream": stream,
    }
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["usage"]
    lines = (line for line in answer.text.splitlines() if line.startswith("data: "))
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    return next(e["usage"] for e in events if e["type"] == "message_delta")


@pytest.mark.parametrize("stream", [False, True])
def test_a_billing_nonce_does_not_spoil_the_prefix(server: Server, stream: bool) -> None:
    """More than nine tenths of the second turn's prompt come from the first."""
    messages: list[Any] = [{"role": "user", "content": f"Look at the fox. [{stream}]"}]
    first = agents_turn(server, "1a2b3", messages, stream)
    messages += [
        {"role": "assistant", "content": "I see a fox."},
        {"role": "user", "content": "Look again."},
    ]
    second = agents_turn(server, "9f8e7", messages, stream)
    total = second["input_tokens"] + second["cache_read_input_tokens"]
    assert total > first["input_tokens"] + first["cache_read_input_tokens"]
    assert second["cache_read_input_tokens"] > 0.9 * total


def test_metrics_tell_what_is_kept(server: Server) -> None:
    before = server.metric("prefix_cache_queries_total")
    answer = chat(server, [{"role": "user", "content": "Hi! [metrics]"}])
    asked = answer["usage"]["prompt_tokens"]
    assert server.metric("prefix_cache_queries_total") - before == asked
    assert 0 < server.metric("prefix_cache_bytes") <= 200e6
    assert server.metric("prefix_cache_entries") >= 1


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize("salt", ["", "x" * 257, 5])
def test_bad_salts(server: Server, path: str, salt: object) -> None:
    prompts = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}
    messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    body = {"model": MODEL, "cache_salt": salt, **prompts.get(path, messages)}
    answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 400
    assert "cache_salt" in answer.text
