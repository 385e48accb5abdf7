"""A real server process on the bundled model: depths, prefixes, enforced calls, reasoning.

tests/test_soak.py compares many requests at the same time with one at a time.
"""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.process import CHAT, MODEL, STORY, Server, running

DATA = Path(__file__).parent / "data" / "demo_prompts.json"
WEATHER = json.loads(DATA.read_text())["weather_tool"]


def chat(server: Server, text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    fields = {"max_tokens": 200, "temperature": 0} | fields
    return server.client.chat.completions.create(model=MODEL, messages=messages, **fields)


def test_a_request_chooses_its_own_depth(mtp_server: Server) -> None:
    def timings(**fields: Any) -> dict[str, float]:
        messages = [{"role": "user", "content": STORY}]
        return ask(mtp_server, messages=messages, temperature=0, max_tokens=40, **fields)["timings"]

    timings()
    assert 'mlx_mtp:spec_decode_depth{batch_size="1",' in mtp_server.http.get("/metrics").text
    assert timings(mtp={"num_draft_tokens": 0})["draft_n"] == 0
    for depth in (1, 5):
        some = timings(mtp={"num_draft_tokens": depth})
        assert some["draft_n"] > 0
        # Each window has `depth` drafts, except the last, which the answer's end can cut.
        assert some["draft_n"] % depth == 0
        assert some["draft_n_accepted"] > 0


def test_an_echoed_answer_has_the_logprobs_that_it_was_drawn_with(mtp_server: Server) -> None:
    """The second prompt is the whole first answer with its prompt, and no token is generated."""

    def found(prompt: str, **fields: Any) -> tuple[str, list[str], list[float | None]]:
        fields = {"prompt": prompt, "echo": True, "logprobs": 2, "seed": 1} | fields
        answer = mtp_server.post("/v1/completions", **fields)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]

    for depth in (0, 3):
        fields = {"max_tokens": 24, "mtp": {"num_draft_tokens": depth}, "ignore_eos": True}
        text, tokens, drawn = found(STORY, **fields)
        assert text.startswith(STORY)
        again = found(text, max_tokens=0)
        assert again[:2] == (text, tokens)
        assert again[2][0] is drawn[0] is None
        assert again[2][1:] == pytest.approx(drawn[1:], abs=1e-4)


def test_a_call_is_enforced_where_the_model_would_make_none(mtp_server: Server) -> None:
    text = "What is the capital of France?"
    assert chat(mtp_server, text, tools=[WEATHER]).choices[0].message.tool_calls is None
    named = {"type": "function", "function": {"name": "get_weather"}}

    def forced(choice: Any, parallel: bool) -> Any:
        fields = {"tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 400}
        return chat(mtp_server, text, tools=[WEATHER], **fields).choices[0]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(forced, ["required", named] * 2, [True, True, False, False]))
    assert all(len(answer.message.tool_calls) == 1 for answer in answers[2:])
    for answer in answers:
        assert answer.finish_reason == "tool_calls"
        for call in answer.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert isinstance(arguments["city"], str)
            assert arguments.get("unit") in (None, "celsius", "fahrenheit")


def test_reasoning_and_its_budget(mtp_server: Server) -> None:
    def think(**kwargs: Any) -> tuple[Any, int]:
        extra = {"chat_template_kwargs": {"enable_thinking": True, **kwargs}}
        answer = chat(mtp_server, "Is 498 even or odd?", extra_body=extra)
        details = answer.usage.completion_tokens_details
        return answer.choices[0].message, details.reasoning_tokens

    message, spent = think()
    assert message.content == "498 is even."
    assert message.reasoning_content == "The last digit of 498 is 8. 8 is even, so 498 is even."
    assert spent > 10
    assert think(thinking_budget=spent)[0] == message
    for budget in (0, 5):
        short, spent = think(thinking_budget=budget)
        assert spent == budget + 1  # the forced tag counts as well
        assert message.reasoning_content.startswith(getattr(short, "reasoning_content", ""))
        assert short.content


# The prefix cache as clients see it. Each test has salts of its own.
SYSTEM = "You are an agent. " + " ".join(f"Rule {i}: be kind to the fox." for i in range(20))


def ask(server: Server, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    answer = server.post(path, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def turns(*texts: str) -> list[dict[str, str]]:
    roles = ["system", *["user", "assistant"] * len(texts)]
    return [{"role": role, "content": text} for role, text in zip(roles, (SYSTEM, *texts))]


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_second_turn_finds_the_first(mtp_server: Server) -> None:
    fields = {"max_tokens": 8, "temperature": 0, "cache_salt": "turns"}
    first = ask(mtp_server, messages=turns("Hi!"), **fields)
    assert cached(first) == first["timings"]["cache_n"] == 0
    messages = turns("Hi!", first["choices"][0]["message"]["content"], "More.")
    queries = mtp_server.metric("prefix_cache_queries_total")
    second = ask(mtp_server, messages=messages, **fields)
    tokens = second["usage"]["prompt_tokens"]
    # Cached at least to the end of the question, most likely to the end of the answer.
    assert cached(second) >= first["usage"]["prompt_tokens"] - 10
    assert second["timings"]["cache_n"] == cached(second)
    assert second["timings"]["prompt_n"] == tokens - cached(second)
    assert mtp_server.metric("prefix_cache_queries_total") - queries == tokens
    assert 0 < mtp_server.metric("prefix_cache_bytes") <= 200e6
    assert mtp_server.metric("prefix_cache_entries") >= 1
    cold = ask(mtp_server, messages=messages, **(fields | {"cache_salt": "nobody"}))
    assert cached(cold) == 0
    assert second["choices"][0]["message"] == cold["choices"][0]["message"]
    # The whole prompt is cached; the last token counts as computed.
    assert cached(ask(mtp_server, messages=messages, **fields)) == tokens - 1


def test_vllm_cve_2025_46570_cache_timing(mtp_server: Server) -> None:
    """Without the salt neither time nor usage reveals what was asked under it."""
    fields = {"messages": turns("My secret."), "max_tokens": 1, "temperature": 0}
    own = ask(mtp_server, cache_salt="mine", **fields)
    assert cached(ask(mtp_server, cache_salt="mine", **fields)) > 0
    for guess in ("MINE", "mine "):
        assert cached(ask(mtp_server, cache_salt=guess, **fields)) == 0
    # Without a salt, the system prompt of other tests can be cached.
    assert cached(ask(mtp_server, **fields)) < own["usage"]["prompt_tokens"] - 5


def test_choices_of_one_request(mtp_server: Server) -> None:
    """A prompt shared by choices counts as computed, once; when it is repeated, it is cached."""
    fields = {"messages": turns("Hi!"), "n": 4, "seed": 3, "max_tokens": 8, "cache_salt": "n"}
    before = mtp_server.metric("prefix_cache_hits_total")
    first = ask(mtp_server, **fields)
    prompt = first["usage"]["prompt_tokens"]
    assert cached(first) == 0
    assert mtp_server.metric("prefix_cache_hits_total") - before == 3 * prompt
    again = ask(mtp_server, **fields)
    assert cached(again) == prompt - 1
    assert [c["message"] for c in again["choices"]] == [c["message"] for c in first["choices"]]


def test_a_billing_nonce_does_not_spoil_the_prefix(mtp_server: Server) -> None:
    """Claude Code's first system block has a nonce that changes with each turn.

    Still, more than nine tenths of the second turn's prompt come from the first.
    """

    def usage(nonce: str, messages: list[Any], stream: bool) -> dict[str, int]:
        header = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={nonce};"
        system = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
        fields = {
            "system": [{"type": "text", "text": header}, system],
            "tools": [{"name": "look", "description": "d", "input_schema": {"type": "object"}}],
            "max_tokens": 8,
        }
        answer = mtp_server.post("/v1/messages", messages=messages, stream=stream, **fields)
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["usage"]
        *_, delta, _ = re.findall(r"^data: (.+)$", answer.text, re.MULTILINE)
        return json.loads(delta)["usage"]

    for stream in (False, True):
        messages = turns(f"Look at the fox. [{stream}]", "I see a fox.", "Look again.")[1:]
        first, second = usage("1a2b3", messages[:1], stream), usage("9f8e7", messages, stream)
        total = second["input_tokens"] + second["cache_read_input_tokens"]
        assert total > first["input_tokens"] + first["cache_read_input_tokens"]
        assert second["cache_read_input_tokens"] > 0.9 * total


@pytest.mark.full
def test_killed_and_started_again_it_is_warm(tmp_path: Path):
    """After SIGKILL each answer, greedy or sampled, is the same, and its prompt is cached."""

    def turn(server: Server, *texts: str, **fields: Any) -> dict[str, Any]:
        fields = {"max_tokens": 16, "temperature": 0} | fields
        return ask(server, messages=turns(*texts), **fields)

    folder = tmp_path / "prefixes"
    flags = ("--enable-mtp", "--prefix-cache-size", "100MB", "--prefix-cache-dir", str(folder))
    asked: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"cache_salt": "mine"}]
    with running(*flags) as server:
        before = [turn(server, "Hi!", **fields) for fields in asked]
        assert [cached(answer) > 0 for answer in before] == [False, True, False]
        seen, now = -1, 0
        while seen != now or not now:  # files are still being written
            time.sleep(0.5)
            seen, now = now, server.metric("prefix_cache_files")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with running(*flags) as server:
        assert server.metric("prefix_cache_bytes") == 0
        assert server.metric("prefix_cache_file_bytes") > 0
        after = [turn(server, "Hi!", **fields) for fields in asked]
        for old, new in zip(before, after, strict=True):
            assert cached(new) == new["usage"]["prompt_tokens"] - 1
            assert new["choices"][0]["message"] == old["choices"][0]["message"]
        assert cached(turn(server, "Hi!", cache_salt="other")) == 0
        more = turn(server, "Hi!", after[0]["choices"][0]["message"]["content"], "More.")
        assert cached(more) >= after[0]["usage"]["prompt_tokens"] - 10
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    # A drain writes pending prefixes; with other settings none is found, and none is left.
    with running(*flags, "--kv-cache-quantization", "8") as server:
        assert server.metric("prefix_cache_files") == 0
        assert cached(turn(server, "Hi!")) == 0
