"""Streams and whole answers: order and shape of the chunks, usage, timings, keep-alive, leaving."""

from __future__ import annotations

import itertools
import json
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_mtp.engine.request import Request
from mlx_mtp.errors import StepError
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import EOS, FakeEngine, Output, answer, endless, out

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
STORY = "Once upon a time, 🎉 and then: the end."
TIMINGS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_second",
    "draft_n",
    "draft_n_accepted",
}


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def post(client: httpx.Client, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = chat_body(**fields) if path == CHAT else {"model": MODEL, "prompt": "hi", **fields}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    """A stream's events, [DONE] checked and left out, comments left out."""
    body = chat_body(**fields) if path == CHAT else {"model": MODEL, "prompt": "hi", **fields}
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


@pytest.fixture(scope="module")
def story(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tokenizer.encode(STORY)


@pytest.fixture(scope="module")
def client(serve: Serve, story: tuple[int, ...]) -> Iterator[Served]:
    with serve(FakeEngine(answer(story))) as client:
        yield client


def test_a_whole_chat_answer(client: Served, story: tuple[int, ...]) -> None:
    body = post(client, seed=5)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["seed"] == 5
    assert body["system_fingerprint"].startswith("mlx-mtp-")
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": STORY, "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    usage = body["usage"]
    assert usage["completion_tokens"] == len(story) + 1  # The stop token counts.
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    timings = body["timings"]
    assert set(timings) == TIMINGS
    assert timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"]
    # The script gives 1, 2 and 3 tokens a step in turn, two drafts each time.
    steps = timings["draft_n"] // 2
    assert timings["draft_n_accepted"] == usage["completion_tokens"] - steps
    assert all(value >= 0 for value in timings.values())


def test_a_chat_stream_in_its_order(client: Served) -> None:
    chunks = stream(client, stream_options={"include_usage": True}, seed=9)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["seed"] for chunk in chunks} == {9}
    first, *middle, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *middle])
    assert all(list(chunk["choices"][0]["delta"]) == ["content"] for chunk in middle)
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert set(last["timings"]) == TIMINGS
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert set(usage["timings"]) == TIMINGS
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert text_of(chunks) == STORY


def test_continuous_usage_counts_in_every_chunk(client: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    first, *middle, last, end = stream(client, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in [first, *middle, last, end]]
    assert counts == sorted(counts)
    assert len(set(counts)) > 3
    assert last["usage"] == end["usage"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in [first, *middle]} == {
        end["usage"]["prompt_tokens"]
    }


def test_without_being_asked_there_is_no_usage_chunk(client: Served) -> None:
    chunks = stream(client)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    assert "timings" in chunks[-1]
    assert not any("timings" in chunk for chunk in chunks[:-1])


def test_a_stream_and_a_whole_answer_say_the_same(client: Served) -> None:
    whole, chunks = post(client), stream(client, stream_options={"include_usage": True})
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]


def test_completions(client: Served, tokenizer: Tokenizer) -> None:
    body = post(client, TEXT)
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": STORY, "logprobs": None, "finish_reason": "stop"}
    ]
    chunks = stream(client, TEXT)
    assert text_of(chunks) == STORY
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [c["choices"][0]["finish_reason"] for c in chunks[-2:]] == [None, "stop"]


def test_several_prompts_and_choices_keep_their_places(serve: Serve, tokenizer: Tokenizer) -> None:
    def echo(request: Request) -> Iterator[Output]:
        said = f"{list(request.prompt_token_ids)} {request.sampling.choice}"
        return answer(tokenizer.encode(said))(request)

    with serve(FakeEngine(echo)) as client:
        body = post(client, TEXT, prompt=[[5], [6, 7]], n=2)
        expected = ["[5] 0", "[5] 1", "[6, 7] 0", "[6, 7] 1"]
        assert [choice["text"] for choice in body["choices"]] == expected
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == 3
        chunks = stream(client, TEXT, prompt=[[5], [6, 7]], n=2)
        assert [text_of(chunks, index) for index in range(4)] == expected
        chats = stream(client, CHAT, n=2)
        assert [c["choices"][0]["index"] for c in chats[:2]] == [0, 1]
        assert all(c["choices"][0]["delta"]["role"] == "assistant" for c in chats[:2])


def test_max_tokens_ends_with_length(client: Served, story: tuple[int, ...]) -> None:
    body = post(client, max_tokens=3)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


def test_half_a_character_at_the_end_is_told_as_such(serve: Serve, tokenizer: Tokenizer) -> None:
    with serve(FakeEngine(answer(tokenizer.encode("a🎉")))) as client:
        body = post(client, max_tokens=2)
        assert body["choices"][0]["message"]["content"] == "a\ufffd"


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (9,), (1, 4, 2)])
def test_what_a_step_brings_changes_neither_text_nor_counts(
    serve: Serve, tokenizer: Tokenizer, sizes: tuple[int, ...]
) -> None:
    engine = FakeEngine(answer(tokenizer.encode("one, two, three, four, five"), sizes))
    with serve(engine) as client:
        fields = {"stop": ["four", "three,"], "logprobs": True}
        body = post(client, **fields)
        assert body["choices"][0]["message"]["content"] == "one, two, "
        assert body["choices"][0]["finish_reason"] == "stop"
        expected = len(tokenizer.encode("one, two, three,"))
        assert body["usage"]["completion_tokens"] == expected
        tokens = [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]]
        # " three" is shown by its space, the comma that completes the stop not at all.
        assert "".join(tokens) == "one, two, three"
        chunks = stream(client, **fields)
        assert text_of(chunks) == "one, two, "


def test_no_more_drafts_are_accepted_than_tokens_are_used(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    # One step of nine tokens, of which the stop string leaves the first: an accepted draft.
    step = out(*[tokenizer.encode("a")[0]] * 9, num_draft_tokens=8, num_accepted_tokens=8)
    with serve(FakeEngine(lambda _: itertools.chain([step], itertools.repeat(None)))) as client:
        timings = post(client, stop="a")["timings"]
    assert (timings["predicted_n"], timings["draft_n_accepted"]) == (1, 1)
    assert timings["draft_n"] == 8


def test_a_stop_string_cancels_the_sequence(serve: Serve, tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("a")
    engine = FakeEngine(endless(token))
    with serve(engine) as client:
        body = post(client, stop="aaa")
        assert body["choices"][0]["message"]["content"] == ""
        assert body["usage"]["completion_tokens"] == 3
        assert engine.wait_for(lambda: not engine.running)
        assert engine.cancelled == {engine.submitted[0].request_id}


def test_chat_logprobs(client: Served, tokenizer: Tokenizer, story: tuple[int, ...]) -> None:
    body = post(client, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == len(story)  # The end-of-sequence token is not shown.
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == STORY
    for entry, token in zip(content, story):
        assert entry["logprob"] == -0.25
        assert entry["token"] == tokenizer.token_text(token)
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.25, -0.5]
        assert entry["top_logprobs"][1]["token"] == tokenizer.token_text(token + 1)
    chunks = stream(client, logprobs=True, top_logprobs=2)
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for part in streamed for entry in part["content"]] == content


def test_a_streams_logprobs_belong_to_its_text(client: Served) -> None:
    for chunk in stream(client, logprobs=True):
        choice = chunk["choices"][0]
        if choice["logprobs"]:
            raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
            assert raw.decode() == choice["delta"]["content"]


def test_completion_logprobs(client: Served, tokenizer: Tokenizer, story: tuple[int, ...]) -> None:
    logprobs = post(client, TEXT, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [tokenizer.token_text(token) for token in story]
    assert logprobs["token_logprobs"] == [-0.25] * len(story)
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    for token, offset in zip(story, logprobs["text_offset"]):
        piece = tokenizer.token_bytes(token)
        if piece.isascii():
            assert STORY[offset:].startswith(piece.decode())
    none = post(client, TEXT, logprobs=0)["choices"][0]["logprobs"]
    assert none["top_logprobs"] == [{tokenizer.token_text(token): -0.25} for token in story]


def test_an_impossible_token_is_still_json(serve: Serve) -> None:
    from mlx_mtp.engine.request import TokenLogprobs

    least = TokenLogprobs(float("-inf"), ((5, float("-inf")),))
    engine = FakeEngine(lambda _: iter([out(40, logprobs=(least,), finish="length")]))
    with serve(engine) as client:
        (entry,) = post(client, logprobs=True)["choices"][0]["logprobs"]["content"]
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


def test_the_request_as_the_engine_gets_it(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = FakeEngine(answer([300]))
    defaults = {"temperature": 0.6, "top_k": 20}
    with serve(engine, defaults=defaults, seed=None) as client:
        body = post(client, top_k=7, n=2)
        first, second = engine.submitted
        prompt = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        assert first.prompt_token_ids == second.prompt_token_ids == prompt
        assert (first.sampling.temperature, first.sampling.top_k) == (0.6, 7)
        assert first.sampling.max_tokens == engine.info.max_model_len - len(prompt)
        assert [first.sampling.choice, second.sampling.choice] == [0, 1]
        assert first.sampling.seed == second.sampling.seed == body["seed"]
        assert post(client)["seed"] != body["seed"]


def test_tools_and_template_kwargs_change_the_prompt(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = FakeEngine(answer([300]))
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    with serve(engine) as client:
        post(client, tools=[tool], chat_template_kwargs={"enable_thinking": True})
        post(client, tools=[tool], tool_choice="none")
    with_tools, without = (
        b"".join(map(tokenizer.token_bytes, request.prompt_token_ids)).decode()
        for request in engine.submitted
    )
    assert "get_weather" in with_tools
    assert with_tools.endswith("<think>\n")
    assert "get_weather" not in without


def test_silence_is_broken_by_comments(serve: Serve) -> None:
    waiting = True

    def slow(_: Request) -> Iterator[Output]:
        while waiting:
            yield None
        yield out(40, finish="length")

    with (
        serve(FakeEngine(slow), keep_alive_seconds=0.02) as client,
        client.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        waiting = False
        rest = [line for line in lines if line and not line.startswith(":")]
        assert '"role":"assistant"' in rest[0]
        assert rest[-1] == "data: [DONE]"


def test_an_error_in_mid_stream_is_an_event(serve: Serve) -> None:
    failing = [out(40), out(40), out(finish="error", error=StepError("it broke"))]
    with serve(FakeEngine(lambda _: iter(failing))) as client:
        *chunks, error = stream(client, n=2)
        assert error["error"]["code"] == "step_failed"
        assert "it broke" in error["error"]["message"]
        assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)


def test_an_error_after_a_keep_alive_is_an_event(serve: Serve) -> None:
    waiting = True

    def slow(_: Request) -> Iterator[Output]:
        while waiting:
            yield None
        yield out(finish="error", error=StepError("late"))

    with (
        serve(FakeEngine(slow), keep_alive_seconds=0.02) as client,
        client.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        waiting = False
        error, done = [line for line in lines if line.startswith("data")]
        assert "late" in error
        assert done == "data: [DONE]"


def test_an_engine_that_dies_silently_ends_its_requests(serve: Serve) -> None:
    engine = FakeEngine(lambda _: iter([out(40), *[None] * 100_000]))
    with serve(engine, keep_alive_seconds=0.02) as client:
        with client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
            lines = response.iter_lines()
            # The first token may come later than a comment.
            first = next(line for line in lines if line.startswith("data"))
            assert '"role":"assistant"' in first
            engine.unhealthy_reason = "out of luck"
            rest = [line for line in lines if line.startswith("data")]
        assert "out of luck" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert client.get("/health").status_code == 503


def leave(client: Served, engine: FakeEngine, body: dict[str, Any], count: int) -> None:
    """Send a request, wait until the engine has it, and hang up."""
    payload = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n\r\n"
    with socket.create_connection(client.address) as raw:
        raw.sendall(head.encode() + payload)
        assert engine.wait_for(lambda: len(engine.submitted) == count)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("silent", [False, True])
def test_a_client_that_leaves_frees_its_rows(serve: Serve, streaming: bool, silent: bool) -> None:
    def silence(_: Request) -> Iterator[Output]:
        while True:
            yield None

    engine = FakeEngine(silence if silent else endless(40))
    with serve(engine) as client:
        leave(client, engine, chat_body(stream=streaming, n=3), count=3)
        assert engine.wait_for(lambda: not engine.running)
        assert engine.cancelled == {request.request_id for request in engine.submitted}


def test_a_reader_that_stops_reading_a_stream_frees_its_row(serve: Serve) -> None:
    engine = FakeEngine(endless(40))
    with serve(engine) as client:
        with client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
            next(response.iter_lines())
        assert engine.wait_for(lambda: not engine.running)
        assert len(engine.cancelled) == 1


def test_a_finished_request_is_not_cancelled(serve: Serve) -> None:
    engine = FakeEngine(answer([300]))
    with serve(engine) as client:
        post(client)
        stream(client)
    assert engine.cancelled == set()


def test_stopping_the_server_ends_its_streams_with_a_reason(serve: Serve) -> None:
    with (
        serve(FakeEngine(endless(40)), drain_timeout=0.2) as client,
        client.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        client.server.handle_exit(signal.SIGTERM, None)
        *_, error, done = [line for line in lines if line]
        assert "shutting down" in error
        assert done == "data: [DONE]"


def test_a_second_ctrl_c_does_not_wait_for_the_streams(serve: Serve) -> None:
    with (
        serve(FakeEngine(endless(40)), drain_timeout=1000.0) as client,
        client.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        client.server.handle_exit(signal.SIGINT, None)
        client.server.handle_exit(signal.SIGINT, None)
        *_, error, done = [line for line in lines if line]
        assert "shutting down" in error
        assert done == "data: [DONE]"
        assert not client.server.force_exit


def test_models(client: Served) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card["id"] == MODEL
    assert card["object"] == "model"
    assert card["max_model_len"] == 1024
    for path in (MODEL, "test%2Fmodel", MODEL + "/"):
        assert client.get(f"/v1/models/{path}").json() == card


def test_paths_may_end_in_a_slash(client: Served) -> None:
    assert client.get("/v1/models/").status_code == 200
    assert client.get("/health/").status_code == 200
    assert client.post(CHAT + "/", json=chat_body()).status_code == 200


def test_health(client: Served) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.head("/health").status_code == 200


def test_a_skipped_special_token_is_no_text(serve: Serve) -> None:
    engine = FakeEngine(lambda _: iter([out(40, EOS, 40, finish="length")]))
    with serve(engine) as client:
        body = post(client, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == 3
        assert len(body["choices"][0]["message"]["content"]) == 2
