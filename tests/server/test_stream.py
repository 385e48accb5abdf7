"""Streams and whole answers: counts, places, stops, keep-alive, errors, and clients that leave."""

import itertools
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_mtp.engine.request import PrefillProgress, Request
from mlx_mtp.errors import StepError
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve
from tests.server.test_reliability import Valve
from tests.support.fake_engine import EOS, FakeEngine, FakeInfo, Output, answer, endless, out
from tests.support.in_process import GOOD, MESSAGES, TEXT, in_process
from tests.support.wire_help import CHAT, ask, chat_body, events, saying


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


def test_several_prompts_and_choices_keep_their_places(tokenizer: Tokenizer) -> None:
    def echo(request: Request) -> Iterator[Output]:
        said = f"{list(request.prompt_token_ids)} {request.sampling.choice}"
        return answer(tokenizer.encode(said))(request)

    engine = FakeEngine(echo)
    with in_process(engine) as client:
        fields = {"prompt": [[5], [6, 7]], "n": 2, "logprobs": 0}
        body = ask(client, TEXT, **fields)
        expected = ["[5] 0", "[5] 1", "[6, 7] 0", "[6, 7] 1"]
        assert [choice["text"] for choice in body["choices"]] == expected
        assert ["".join(c["logprobs"]["tokens"]) for c in body["choices"]] == expected
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == 3
        assert {request.sampling.seed for request in engine.submitted} == {body["seed"]}
        assert ask(client)["seed"] != body["seed"]
        chunks = events(client, TEXT, **fields)
        assert [text_of(chunks, index) for index in range(4)] == expected
        chats = events(client, n=2)
        assert [c["choices"][0]["index"] for c in chats[:2]] == [0, 1]
        assert all(c["choices"][0]["delta"]["role"] == "assistant" for c in chats[:2])


@pytest.mark.parametrize("sizes", [(1,), (2,), (9,), (1, 4, 2)])
def test_what_a_step_brings_changes_neither_text_nor_counts(
    tokenizer: Tokenizer, sizes: tuple[int, ...]
) -> None:
    with in_process(saying(tokenizer, "one, two, three, four, five", sizes)) as client:
        fields = {"stop": ["four", "three,"], "logprobs": True}
        body = ask(client, **fields)
        assert body["choices"][0]["message"]["content"] == "one, two, "
        assert body["choices"][0]["finish_reason"] == "stop"
        expected = len(tokenizer.encode("one, two, three,"))
        assert body["usage"]["completion_tokens"] == expected
        tokens = [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]]
        # Of " three" only the space is shown, of the comma that completes the stop string nothing.
        assert "".join(tokens) == "one, two, three"
        assert text_of(events(client, **fields)) == "one, two, "


def test_no_more_drafts_are_accepted_than_tokens_are_used(tokenizer: Tokenizer) -> None:
    # One step of nine tokens; the stop string leaves only the first, an accepted draft.
    counts = {"num_draft_tokens": 8, "num_accepted_tokens": 8, "optimistic": (0, 2, 7)}
    step = out(*[tokenizer.encode("a")[0]] * 9, **counts)
    engine = FakeEngine(lambda _: itertools.chain([step], itertools.repeat(None)))
    with in_process(engine) as client:
        timings = ask(client, stop="a", mtp={"optimistic": 0.1})["timings"]
    names = ("predicted_n", "draft_n_optimistic", "draft_n_accepted", "draft_n")
    assert [timings[name] for name in names] == [1, 1, 1, 8]


def test_a_stop_string_cancels_the_sequence_and_its_end_does_not(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(endless(tokenizer.encode("a")[0]))
    with in_process(engine) as client:
        body = ask(client, stop="aaa")
        assert body["choices"][0]["message"]["content"] == ""
        assert body["usage"]["completion_tokens"] == 3
        assert engine.wait_for(lambda: not engine.running)
        assert engine.cancelled == {engine.submitted[0].request_id}
        engine.script = answer([300])
        ask(client)
        events(client)
    assert len(engine.cancelled) == 1


def test_where_nothing_is_drafted_no_drafts_can_be_asked_for() -> None:
    info = FakeInfo(num_draft_tokens=0, mtp_enabled=False, draft_sources=())
    engine = FakeEngine(answer([300]), info)
    with in_process(engine) as client:
        for mtp in ({"num_draft_tokens": 0}, {}, None, {"optimistic": 0}):
            ask(client, mtp=mtp)
        for name, value, words in (
            ("num_draft_tokens", 2, "without MTP"),
            ("optimistic", 0.5, "drafts nothing"),
        ):
            refused = client.post(CHAT, json=chat_body(mtp={name: value}))
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, f"mtp.{name}")
            assert words in error["message"]
    assert [request.options.num_draft_tokens for request in engine.submitted] == [
        0,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("path", "error", "silence", "first", "last"),
    [
        (TEXT, None, ": keep-alive", "", "[DONE]"),
        (TEXT, StepError("late"), ": keep-alive", "late", "[DONE]"),
        (MESSAGES, None, "event: ping", '"ping"', "message_stop"),
        (MESSAGES, StepError("late"), "event: ping", '"ping"', "late"),
    ],
)
def test_silence_is_broken_and_errors_after_that_are_events(
    serve: Serve, path: str, error: StepError | None, silence: str, first: str, last: str
) -> None:
    script = Valve(out(finish="error", error=error) if error else out(40, finish="length"))
    with (
        serve(FakeEngine(script), keep_alive_seconds=0.02) as client,
        client.stream("POST", path, json=GOOD[path] | {"stream": True}) as response,
    ):
        lines = response.iter_lines()
        assert next(line for line in itertools.islice(lines, 3, None) if line) == silence
        script.is_open = True
        data = [line for line in lines if line.startswith("data")]
        assert first in data[0]
        assert last in data[-1]


def test_an_engine_that_dies_silently_ends_its_requests(serve: Serve) -> None:
    engine = FakeEngine(lambda _: iter([out(40), *[None] * 100_000]))
    with serve(engine, keep_alive_seconds=0.02) as client:
        with client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
            lines = response.iter_lines()
            # A keep-alive comment can come before the first token.
            first = next(line for line in lines if line.startswith("data"))
            assert '"role":"assistant"' in first
            engine.unhealthy_reason = "out of luck"
            rest = [line for line in lines if line.startswith("data")]
        assert "out of luck" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert client.get("/health").status_code == 503


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("script", [Valve(), endless(40)])
def test_a_client_that_leaves_frees_its_rows(serve: Serve, streaming: bool, script: Any) -> None:
    engine = FakeEngine(script)
    with serve(engine) as client:
        payload = json.dumps(chat_body(stream=streaming, n=3)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n\r\n"
        with socket.create_connection(client.address) as raw:
            raw.sendall(head.encode() + payload)
            assert engine.wait_for(lambda: len(engine.submitted) == 3)
        assert engine.wait_for(lambda: not engine.running)
        assert engine.cancelled == {request.request_id for request in engine.submitted}


def test_models_and_paths_that_end_in_a_slash() -> None:
    with in_process() as client:
        (card,) = client.get("/v1/models/").json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 1024)
        for path in (MODEL, "test%2Fmodel", MODEL + "/"):
            assert client.get(f"/v1/models/{path}").json() == card


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_progress_of_the_prompt(path: str) -> None:
    """In llama.cpp's form: the last prompt token is processed when the answer's first one comes."""

    def script(request: Request) -> Iterator[Output]:
        began = time.perf_counter() - 2.0
        reused = 30 if request.sampling.choice == 0 else 50
        for done in (reused, 40):
            if request.options.progress:
                yield out(progress=PrefillProgress(50, reused, done, began))
        yield out(
            300,
            progress=PrefillProgress(50, reused, 50, began) if request.options.progress else None,
        )
        yield out(EOS, finish="stop")

    engine = FakeEngine(script)
    with in_process(engine) as client:
        fields = {"prompt": "hi"} if path == TEXT else {}
        fields |= {"n": 2, "return_token_ids": True}
        plain = events(client, path, **fields)
        assert not any(request.options.progress for request in engine.submitted)
        ask(client, path, **fields, return_progress=True)
        assert not any(request.options.progress for request in engine.submitted)
        options = {"include_usage": True, "include_progress": True}
        for more in ({"return_progress": True}, {"stream_options": options}):
            chunks = events(client, path, **fields, **more)
            told = [chunk for chunk in chunks if "prompt_progress" in chunk]
            assert {each["choices"][0]["index"] for each in told} == {0}
            choices = [each["choices"][0] for each in told]
            assert all(c.get("delta", {}) == {} and c.get("text", "") == "" for c in choices)
            assert not any("prompt_token_ids" in each for each in (*told, *choices))
            told = [each["prompt_progress"] for each in told]
            assert [each["processed"] for each in told] == [30, 40, 50]
            assert {(each["total"], each["cache"]) for each in told} == {(50, 30)}
            assert all(2000 <= each["time_ms"] < 60_000 for each in told)
            rest = [chunk for chunk in chunks if "prompt_progress" not in chunk]
            assert [_answer(rest, index) for index in range(2)] == [
                _answer(plain, index) for index in range(2)
            ]


def _answer(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Returns all fields of a choice in one: on a busy machine chunks can be merged."""
    whole: dict[str, Any] = {}
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        for name, value in (choice | choice.get("delta", {})).items():
            if name in ("content", "text", "token_ids") and name in whole:
                whole[name] = whole[name] + value
            elif name != "delta" and (value is not None or name not in whole):
                whole[name] = value
    assert whole["token_ids"] and whole["finish_reason"]
    return whole
