"""Ollama's API, mostly through Ollama's own Python package."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from mlx_mtp.errors import StepError
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve
from tests.support.fake_engine import FakeEngine, answer, out
from tests.support.in_process import CHAT, HI, OLLAMA_CHAT, OLLAMA_TEXT, TEXT, in_process
from tests.support.raw_http import error_of
from tests.support.wire_help import CALL, WEATHER, prompt_of, saying

TOLD = f"<think>\nI need Rome.\n</think>\n\nSee.\n{CALL}"
Fields = dict[str, Any]


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return saying(tokenizer, TOLD)


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with in_process(engine) as client:
        yield client


@pytest.fixture(scope="module")
def package(client: httpx.Client) -> ollama.Client:
    return ollama.Client(host="http://localhost", transport=client._transport)


def test_a_chat_whole_and_streamed(package: ollama.Client) -> None:
    asked: Fields = {"model": MODEL, "messages": HI, "tools": [WEATHER], "think": True}
    whole = package.chat(**asked)
    assert whole.message.thinking == "I need Rome."
    assert whole.message.content == "See."
    (call,) = whole.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Rome"})
    *chunks, last = package.chat(**asked, stream=True)
    assert not any(chunk.done for chunk in chunks)
    for field in ("thinking", "content"):
        pieces = [getattr(chunk.message, field) or "" for chunk in (*chunks, last)]
        assert "".join(pieces) == getattr(whole.message, field)
    assert [c.message.tool_calls for c in chunks if c.message.tool_calls] == [[call]]
    for end in (whole, last):
        assert (end.model, end.done, end.done_reason) == (MODEL, True, "stop")
        assert end.total_duration == (end.prompt_eval_duration or 0) + (end.eval_duration or 0) > 0
    assert last.eval_count == whole.eval_count and last.prompt_eval_count


def test_what_it_said_and_called_goes_back(
    client: httpx.Client, package: ollama.Client, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    answer = package.chat(MODEL, HI, tools=[WEATHER]).message
    result = {"role": "tool", "tool_name": "get_weather", "content": "Sunny."}
    package.chat(MODEL, [*HI, answer, result], tools=[WEATHER])
    prompt = prompt_of(engine, tokenizer)
    assert CALL in prompt and "Sunny." in prompt


SYSTEM = {"role": "system", "content": "Be brief."}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OPTIONS = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3}
OPTIONS |= {"presence_penalty": 0.5, "frequency_penalty": 0.25}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
# A route and fields of Ollama's API, and the equivalent ones of OpenAI's chats or completions.
SAME: list[tuple[str, Fields, str, Fields]] = [
    (OLLAMA_CHAT, {"options": OPTIONS}, CHAT, OPTIONS),
    (OLLAMA_CHAT, {"options": {"num_predict": 9}}, CHAT, {"max_tokens": 9}),
    *((OLLAMA_CHAT, {"options": {"num_predict": n}}, CHAT, {}) for n in (0, -1, -2)),
    (OLLAMA_CHAT, {"options": {"num_predict": 9999}}, CHAT, {}),  # cut to the rest of the context
    (OLLAMA_CHAT, {"options": {"repeat_penalty": 1.5}}, CHAT, {"repetition_penalty": 1.5}),
    (OLLAMA_CHAT, {"options": {"stop": ["a"]}}, CHAT, {"stop": ["a"]}),
    (OLLAMA_CHAT, {"options": {"num_ctx": 4096, "num_gpu": 1, "use_mmap": True}}, CHAT, {}),
    (OLLAMA_CHAT, {"keep_alive": "5m", "format": ""}, CHAT, {}),
    (OLLAMA_CHAT, {"keep_alive": -1, "think": False}, CHAT, {"reasoning_effort": "none"}),
    (OLLAMA_CHAT, {"think": "low"}, CHAT, {"reasoning_effort": "low"}),
    (OLLAMA_CHAT, {"format": "json"}, CHAT, {"response_format": {"type": "json_object"}}),
    (OLLAMA_CHAT, {"format": SCHEMA}, CHAT, {"guided_json": SCHEMA}),
    (OLLAMA_CHAT, {"tools": [WEATHER]}, CHAT, {"tools": [WEATHER]}),
    (OLLAMA_CHAT, {"logprobs": True}, CHAT, {"logprobs": True}),
    (OLLAMA_CHAT, LOGPROBS, CHAT, LOGPROBS),
    (OLLAMA_TEXT, {}, CHAT, {}),
    (OLLAMA_TEXT, {"system": "Be brief."}, CHAT, {"messages": [SYSTEM, *HI]}),
    (OLLAMA_TEXT, {"raw": True, "options": OPTIONS}, TEXT, OPTIONS),
    (OLLAMA_TEXT, {"raw": True, "format": SCHEMA}, TEXT, {"guided_json": SCHEMA}),
    (OLLAMA_TEXT, {"template": "", "context": [], "images": []}, CHAT, {}),
]  # fmt: skip
PROMPTS: dict[str, Fields] = {CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}}
PROMPTS |= {OLLAMA_CHAT: PROMPTS[CHAT], OLLAMA_TEXT: PROMPTS[TEXT]}


@pytest.mark.parametrize(("path", "fields", "other", "same"), SAME)
def test_options_are_the_parameters_of_the_other_apis(
    client: httpx.Client, engine: FakeEngine, path: str, fields: Fields, other: str, same: Fields
) -> None:
    options = {"seed": 5} | fields.get("options", {})
    given = {**PROMPTS[path], **fields, "options": options, "stream": False}
    for where, body in ((path, given), (other, {**PROMPTS[other], "seed": 5, **same})):
        response = client.post(where, json={"model": MODEL, **body})
        assert response.status_code == 200, response.text
    ours, theirs = engine.submitted[-2:]
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.sampling == theirs.sampling


REFUSED: list[tuple[str, Fields, str]] = [
    (OLLAMA_CHAT, {"options": {"temperature": -1}}, "temperature"),
    (OLLAMA_CHAT, {"options": {"seed": "x"}}, "seed"),
    (OLLAMA_CHAT, {"format": "yaml"}, "format: "),
    (OLLAMA_CHAT, {"format": [1]}, "format: "),
    (OLLAMA_CHAT, {"think": "x"}, "think: "),
    (OLLAMA_CHAT, {"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, "text only"),
    (OLLAMA_CHAT, {"messages": [{"role": "user", "thinking": "x"}]}, "role assistant"),
    (OLLAMA_TEXT, {"images": ["aGk="]}, "text only"),
    (OLLAMA_TEXT, {"template": "{{ .Prompt }}"}, "template: "),
    (OLLAMA_TEXT, {"context": [1]}, "context: "),
    (OLLAMA_TEXT, {"suffix": "x"}, "suffix: "),
    (OLLAMA_TEXT, {"raw": True, "system": "x"}, "system: "),
    (OLLAMA_TEXT, {"max_tokens": 3, "options": {"num_predict": 5}}, "max_tokens: differs"),
    (OLLAMA_TEXT, {"prompt": "hello " * 2000}, "too long"),
]


@pytest.mark.parametrize(("path", "fields", "word"), REFUSED)
def test_refusals(client: httpx.Client, path: str, fields: Fields, word: str) -> None:
    refused = client.post(path, json={"model": MODEL, **PROMPTS[path], **fields})
    assert word in error_of(refused, path, 400)


def test_errors_are_ollamas(package: ollama.Client, client: httpx.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="not served here") as caught:
        package.generate("other", "hi")
    assert caught.value.status_code == 404
    failing = FakeEngine(lambda _: iter([out(40), out(finish="error", error=StepError("broke"))]))
    with in_process(failing) as broken:
        stream = ollama.Client(host="http://localhost", transport=broken._transport)
        with pytest.raises(ollama.ResponseError, match="broke"):
            list(stream.generate(MODEL, "hi", raw=True, stream=True))


def test_texts(package: ollama.Client, tokenizer: Tokenizer) -> None:
    whole = package.generate(MODEL, "hi", logprobs=True)
    assert (whole.response.strip(), whole.thinking) == (f"See.\n{CALL}", "I need Rome.")
    assert whole.logprobs and whole.logprobs[0].logprob == -0.25
    chunks = list(package.generate(MODEL, "hi", stream=True))
    assert "".join(chunk.response for chunk in chunks) == whole.response
    assert package.generate(MODEL, "hi", raw=True).response == TOLD
    cut = package.generate(MODEL, "hi", options={"num_predict": 3})
    assert (cut.done_reason, cut.eval_count) == ("length", 3)
    for loaded in (package.generate(MODEL), package.chat(MODEL)):
        assert (loaded.done, loaded.done_reason) == (True, "load")


def test_a_cut_call_is_text(package: ollama.Client, client: httpx.Client) -> None:
    asked: Fields = {"model": MODEL, "messages": HI, "tools": [WEATHER]}
    size = package.chat(**asked).eval_count or 0
    asked["options"] = {"num_predict": size - 5}
    whole = package.chat(**asked)
    text = "".join(chunk.message.content or "" for chunk in package.chat(**asked, stream=True))
    assert text == whole.message.content
    assert "get_weather" in text and not whole.message.tool_calls
    assert whole.done_reason == "length"


def test_what_pickers_ask_for(package: ollama.Client, client: httpx.Client) -> None:
    for listed in (package.list(), package.ps()):
        (model,) = listed.models
        assert (model.model, model.details and model.details.family) == (MODEL, "qwen3_next")
    for name in (MODEL, f"{MODEL}:latest"):
        shown = package.show(name)
        info = shown.modelinfo or {}
        assert info[f"{info['general.architecture']}.context_length"] == 1024
        assert shown.capabilities == ["completion", "tools", "thinking"]
    assert client.post("/api/show", json={"name": MODEL}).status_code == 200
    assert error_of(client.post("/api/show", json={"model": "x"}), "/api/show", 404)
    # Some clients refuse versions before 0.6.4.
    assert [*map(int, client.get("/api/version").json()["version"].split("."))] > [0, 6, 4]


def test_silence_is_broken_within_a_line(serve: Serve, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("Hi.")

    def slow(request: Any) -> Iterator[Any]:
        for step in answer(tokens, (1,))(request):
            yield from [None] * 30
            yield step

    with serve(FakeEngine(slow), keep_alive_seconds=0.005) as client:
        body = {"model": MODEL, "prompt": "hi", "raw": True}
        response = client.post(OLLAMA_TEXT, json=body)
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = response.text.splitlines()
    assert any(line.startswith(" ") for line in lines)
    assert "".join(json.loads(line)["response"] for line in lines) == "Hi."
