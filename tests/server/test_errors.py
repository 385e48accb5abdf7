"""Whatever a client sends: the right status, OpenAI's shape, the field's name, and never a 500."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from mlx_mtp.engine.request import TokenLogprobs
from mlx_mtp.errors import EngineStoppedError, StepError
from mlx_mtp.server import body as body_module
from mlx_mtp.server.openai.wire import ChatRequest
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve, Served, tokenizer_with
from tests.server.fake_engine import FakeEngine, FakeInfo, answer, out

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
MAX_BODY = 200_000


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[Served]:
    with serve(FakeEngine(answer([300])), max_choices=4, max_body_bytes=MAX_BODY) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, whose shape is checked on the way."""
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert len(error["message"]) < 1000
    return error


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def function_tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    # fields over a good body, the param to name, a word of the message
    ({"model": None}, "model", "required"),
    ({"model": 3}, "model", "string"),
    ({"model": ""}, "model", "at least 1"),
    ({"messages": None}, "messages", "required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": ["hi"]}, "messages[0]", "dictionary"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": "bishop", "content": "hi"}]}, "messages[0].role", "'system'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "needs content"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "or tool_calls"),
    ({"messages": [{**HI[0], "mood": "x"}]}, "messages[0].mood", "not a parameter"),
    ({"messages": [{**HI[0], "tool_calls": []}]}, "messages[0].tool_calls", "assistant"),
    ({"messages": [{**HI[0], "tool_call_id": "x"}]}, "messages[0].tool_call_id", "tool"),
    (user(3), "messages[0].content", "string"),
    (user(["hi"]), "messages[0].content", "text only"),
    (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content", "text only"),
    (user([{"type": "input_audio", "input_audio": {}}]), "messages[0].content", "input_audio"),
    (user([{"type": "text", "text": 3}]), "messages[0].content", "form"),
    (user([{"type": "text", "text": "a", "x": 1}]), "messages[0].content", "form"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream": False, "stream_options": {}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not a parameter"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "include_usage: true",
    ),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differs"),
    ({"max_tokens": 1 << 63}, "max_tokens", "less than"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": 10**400}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "more than 0"),
    ({"top_p": 1.01}, "top_p", "at most 1"),
    (
        {"prompt_cache_retention": "1h"},
        "prompt_cache_retention",
        "'in_memory', 'in-memory' or '24h'",
    ),
    ({"top_k": -2}, "top_k", "at least 0"),
    ({"top_k": True}, "top_k", "integer"),
    ({"min_p": 2}, "min_p", "at most 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "at least 0.01"),
    ({"presence_penalty": 2.1}, "presence_penalty", "at most 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "at least -2"),
    ({"logit_bias": {"4096": 1}}, "logit_bias", "0 to 4095"),
    ({"logit_bias": {"99999999999999999999": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "at most 100"),
    ({"logit_bias": {"1": "2"}}, "logit_bias.1", "number"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
    ({"logit_bias": [1]}, "logit_bias", "dictionary"),
    ({"seed": 1 << 63}, "seed", "less than"),
    ({"seed": -(1 << 63) - 1}, "seed", "greater than"),
    ({"seed": 10**4000}, "seed", "less than"),
    ({"seed": "1"}, "seed", "integer"),
    ({"stop": ""}, "stop[0]", "at least 1"),
    ({"stop": "x" * 257}, "stop[0]", "at most 256"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": [3]}, "stop[0]", "string"),
    ({"stop_token_ids": [4096]}, "stop_token_ids", "0 to 4095"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "0 to 4095"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", "64"),
    ({"ignore_eos": 1}, "ignore_eos", "boolean"),
    ({"logprobs": 1}, "logprobs", "boolean"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"n": 0}, "n", "1 to 4"),
    ({"n": 5}, "n", "1 to 4"),
    ({"user": 3}, "user", "string"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"modalities": ["text", "audio"]}, "modalities", "at most 1"),
    ({"modalities": ["audio"]}, "modalities[0]", "'text'"),
    ({"verbosity": "low"}, "verbosity", 'only "medium"'),
    ({"service_tier": "flex"}, "service_tier", "'auto'"),
    ({"parallel_tool_calls": 0}, "parallel_tool_calls", "boolean"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'text'"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    (function_tool(), "tools[0].function.name", "required"),
    (function_tool(name="f", strict=1), "tools[0].function.strict", "boolean"),
    (
        function_tool(name="f", parameters=json.loads('{"a":' * 200 + "1" + "}" * 200)),
        "tools[0].function.parameters",
        "128 levels",
    ),
    (function_tool(name="f", parameters=[]), "tools[0].function.parameters", "dictionary"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": "any"}, "tool_choice", "'auto'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice", '"auto"'),
    ({"tool_choice": 3}, "tool_choice", "'auto'"),
    (
        {**function_tool(name="f"), "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "'g'",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
        "at least 1",
    ),
    ({"chat_template_kwargs": {"mood": "x"}}, "chat_template_kwargs.mood", "has no mood"),
    (
        {"chat_template_kwargs": {"thinking_budget": -1}},
        "chat_template_kwargs.thinking_budget",
        "0 or more",
    ),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "'none'"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "not a parameter"),
    ({"tokenize": True}, "tokenize", "not a parameter"),
    ({"chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs.tools", "may not set"),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs.x", "string"),
    (
        {"chat_template_kwargs": {"chat_template": "{{1}}"}},
        "chat_template_kwargs.chat_template",
        "",
    ),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self", "may not set self"),
    (
        {"chat_template_kwargs": {"conversations": 1}},
        "chat_template_kwargs.conversations",
        "may not set conversations",
    ),
    ({"functions": []}, "functions", "not a parameter"),
    ({"x" * 5000: 1}, "x" * 120 + "...", "not a parameter"),
    ({"max_tokens": 1024}, "max_tokens", "1024 tokens"),
]


@pytest.mark.parametrize(("fields", "param", "word"), BAD_CHATS)
def test_bad_chats(client: httpx.Client, fields: dict[str, Any], param: str, word: str) -> None:
    for stream in (False, True):
        body = {"model": MODEL, "messages": HI, "stream": stream} | fields
        response = client.post(CHAT, content=json.dumps(body))
        error = error_of(response)
        assert response.status_code == 400
        assert error["param"] == param
        assert word in error["message"]
        assert error["type"] == "invalid_request_error"


WRONG = "x"
TOO_MANY: list[tuple[dict[str, Any], str, str]] = [
    # Each item is wrong too, which would be told if one of them were looked at.
    ({"messages": [WRONG] * 4097}, "messages", "at most 4096"),
    (user([WRONG] * 4097), "messages[0].content", "at most 4096"),
    ({"stop": [3] * 17}, "stop", "at most 16"),
    ({"stop_token_ids": [WRONG] * 65}, "stop_token_ids", "at most 64"),
    ({"logit_bias": {str(i): WRONG for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"tools": [WRONG] * 1025}, "tools", "at most 1024"),
    ({"metadata": {str(i): 3 for i in range(65)}}, "metadata", "at most 64"),
    (
        {"chat_template_kwargs": {str(i): [] for i in range(65)}},
        "chat_template_kwargs",
        "at most 64",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [WRONG] * 1025}]},
        "messages[0].tool_calls",
        "at most 1024",
    ),
    (
        function_tool(name="f", parameters={"x": [[]] * (1 << 16)}),
        "tools[0].function.parameters",
        "65536",
    ),
    ({str(i): WRONG for i in range(101)}, None, "at most 100"),
]


@pytest.mark.parametrize(("fields", "param", "word"), TOO_MANY)
def test_items_are_counted_before_they_are_looked_at(
    client: httpx.Client, fields: dict[str, Any], param: str | None, word: str
) -> None:
    response = client.post(CHAT, json={"model": MODEL, "messages": HI} | fields)
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"] == param
    assert word in error["message"]


def test_only_the_first_wrong_item_is_reported() -> None:
    wrong = {"messages": [WRONG] * 9, "tools": [WRONG] * 9, "stop_token_ids": [WRONG] * 9}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"model": MODEL} | wrong)
    assert caught.value.error_count() == len(wrong)


def test_half_a_character_in_a_tool_calls_arguments(client: httpx.Client) -> None:
    # JSON within JSON: the body itself has no surrogate.
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    body = {"model": MODEL, "messages": [{"role": "assistant", "tool_calls": [call]}, *HI]}
    response = client.post(CHAT, json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "messages[0].tool_calls[0].function.arguments"
    assert "surrogate" in error["message"]
    # The connection is still good, and so is a whole pair.
    call["function"]["arguments"] = '{"a": "\\ud83c\\udf89"}'
    assert client.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "prompt"), [(TEXT, {"prompt": [10**4000]}), (CHAT, {"model": "x" * 4000})]
)
def test_a_clients_value_is_repeated_in_part(
    client: httpx.Client, path: str, prompt: dict[str, Any]
) -> None:
    whole = {TEXT: {"prompt": "hi"}, CHAT: {"messages": HI}}[path]
    response = client.post(path, json={"model": MODEL} | whole | prompt)
    assert len(error_of(response)["message"]) < 250


def test_a_text_that_can_not_fit_is_refused_before_it_is_encoded(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    most_bytes = max(len(tokenizer.token_bytes(t)) for t in range(tokenizer.vocab_size))
    text = "x" * (FakeInfo.max_model_len * most_bytes + 1)
    with serve(FakeEngine(answer([300]))) as client:
        for path, prompt in ((TEXT, {"prompt": text}), (CHAT, user(text))):
            response = client.post(path, json={"model": MODEL} | prompt)
            assert response.status_code == 400
            error = error_of(response)
            assert error["code"] == "context_length_exceeded"
            # Of a text that was encoded the number is known.
            assert "too long: at least 10" in error["message"]


def test_large_bodies_are_parsed_off_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, names = body_module.parse_json, []

    def noting(content: bytes) -> dict[str, Any]:
        names.append(threading.current_thread().name)
        return parse(content)

    monkeypatch.setattr(body_module, "parse_json", noting)
    with serve(FakeEngine(answer([300]))) as client:
        for padding in (0, body_module.LARGE_BODY):
            body = {"model": MODEL, "messages": HI, "user": "x" * padding}
            assert client.post(CHAT, json=body).status_code == 200
    assert not names[0].startswith("asyncio")
    assert names[1].startswith("asyncio")  # The name of asyncio.to_thread's workers.


def test_a_broken_template_is_not_the_clients_fault(serve: Serve) -> None:
    with serve(FakeEngine(answer([300])), tokenizer=tokenizer_with("{% if %}")) as client:
        response = client.post(CHAT, json={"model": MODEL, "messages": HI})
        assert response.status_code == 500
        assert error_of(response)["type"] == "server_error"
        assert "chat template is wrong" in error_of(response)["message"]


NO_NUMBERS = [TokenLogprobs(math.nan, ()), TokenLogprobs(-1.0, ((5, math.nan),))]


@pytest.mark.parametrize("logprobs", NO_NUMBERS)
@pytest.mark.parametrize("fields", [{"stream": False}, {"stream": True}])
def test_logprobs_that_are_no_numbers_are_told(
    serve: Serve, fields: dict[str, Any], logprobs: TokenLogprobs
) -> None:
    engine = FakeEngine(lambda _: iter([out(300, finish="length", logprobs=(logprobs,))]))
    with serve(engine) as client:
        for path, prompt in (
            (CHAT, {"messages": HI, "logprobs": True}),
            (TEXT, {"prompt": "hi", "logprobs": 1}),
        ):
            response = client.post(path, json={"model": MODEL} | prompt | fields)
            assert response.status_code == 500
            assert error_of(response)["code"] == "internal_error"
            assert "computed NaN" in error_of(response)["message"]


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "non-empty"),
    ({"prompt": ["a", ""]}, "prompt", "prompt 1 is empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": 3}, "prompt", "list"),
    ({"prompt": [True]}, "prompt", "neither"),
    ({"prompt": [1, "a"]}, "prompt", "neither"),
    ({"prompt": [4096]}, "prompt", "0 to 4095"),
    ({"prompt": [[1], [-1]]}, "prompt", "0 to 4095"),
    ({"prompt": [10**30]}, "prompt", "0 to 4095"),
    ({"prompt": [""] * 129}, "prompt", "128"),
    ({"prompt": ["a"] * 43, "n": 3}, "prompt", "128"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"best_of": 2}, "best_of", "equal to n"),
    ({"echo": True}, "echo", "only false"),
    ({"suffix": "x"}, "suffix", 'only ""'),
    ({"messages": HI}, "messages", "not a parameter"),
    ({"tools": []}, "tools", "not a parameter"),
]


@pytest.mark.parametrize(("fields", "param", "word"), BAD_COMPLETIONS)
def test_bad_completions(
    client: httpx.Client, fields: dict[str, Any], param: str, word: str
) -> None:
    response = client.post(TEXT, json={"model": MODEL, "prompt": "hi"} | fields)
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"] == param
    assert word in error["message"]


BAD_BODIES = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b"[]", "object"),
    (b'"hi"', "object"),
    (b"\xff\xfe", "UTF-8"),
    (b'{"model": "\xc3"}', "UTF-8"),
    (b'\xef\xbb\xbf{"model": "x"}', "JSON"),
    (b'{"temperature": NaN}', "NaN"),
    (b'{"temperature": -Infinity}', "Infinity"),
    (b'{"temperature": 1e999}', "too large"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "JSON"),
    (b'{"messages": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "deep"),
    (b'{"user": "\\ud800"}', "UTF-8"),
    (b'{"user": "\\uDFFF\\ud800"}', "UTF-8"),
]


@pytest.mark.parametrize(("content", "word"), BAD_BODIES)
def test_bad_bodies(client: httpx.Client, content: bytes, word: str) -> None:
    for path in (CHAT, TEXT):
        response = client.post(path, content=content)
        error = error_of(response)
        assert response.status_code == 400
        assert error["param"] is None
        assert word in error["message"]


def test_a_pair_of_surrogates_is_one_character(client: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "🎉"}]}
    assert "\\ud83c" in json.dumps(body)
    assert client.post(CHAT, content=json.dumps(body)).status_code == 200


def test_a_body_that_is_too_long_is_refused_with_and_without_its_length(
    client: httpx.Client,
) -> None:
    long = json.dumps({"user": "x" * MAX_BODY}).encode()
    for content in (long, iter([long[:1000], long[1000:]])):
        response = client.post(CHAT, content=content)
        assert response.status_code == 413
        assert error_of(response)["code"] == "payload_too_large"


def test_unsupported_and_invalid_differ_in_their_code(client: httpx.Client) -> None:
    def code(**fields: Any) -> str:
        return error_of(client.post(CHAT, json={"model": MODEL, "messages": HI, **fields}))["code"]

    assert code(functions=[]) == code(verbosity="low") == "unsupported_parameter"
    assert code(tool_choice="any") == "unsupported_parameter"
    assert code(temperature="x") == code(top_p=7) == "invalid_value"
    assert code(max_tokens=5000) == "context_length_exceeded"


def test_the_context_is_told_with_both_numbers(client: httpx.Client) -> None:
    ids = [5] * 1000
    response = client.post(TEXT, json={"model": MODEL, "prompt": ids, "max_tokens": 30})
    message = error_of(response)["message"]
    assert "1024" in message
    assert "1030" in message
    response = client.post(TEXT, json={"model": MODEL, "prompt": [5] * 1024})
    assert error_of(response)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1", "/v2/chat/completions", "/docs"])
def test_unknown_routes(client: httpx.Client, path: str) -> None:
    response = client.post(path, json={})
    assert response.status_code == 404
    assert path in error_of(response)["message"]


def test_there_are_no_embeddings(client: httpx.Client) -> None:
    response = client.post("/v1/embeddings", json={"model": MODEL, "input": "hi"})
    assert response.status_code == 404
    assert "no embeddings" in error_of(response)["message"]


def test_responses_are_not_stored(client: httpx.Client) -> None:
    for method in ("GET", "DELETE"):
        response = client.request(method, "/v1/responses/resp_1")
        assert response.status_code == 404
        assert "stores no responses" in error_of(response)["message"]


def test_agents_ask_whether_anybody_is_there(client: httpx.Client) -> None:
    assert client.head("/").status_code == 200
    assert client.get("/").json()["name"] == "mlx-mtp"


def test_wrong_methods(client: httpx.Client) -> None:
    for method, path in (
        ("PUT", CHAT),
        ("GET", TEXT),
        ("POST", "/v1/models"),
        ("DELETE", "/health"),
    ):
        response = client.request(method, path)
        assert response.status_code == 405
        error_of(response)


def test_unknown_models(client: httpx.Client) -> None:
    for response in (
        client.post(CHAT, json={"model": "gpt-4", "messages": HI}),
        client.post(TEXT, json={"model": "gpt-4", "prompt": "hi"}),
        client.get("/v1/models/gpt-4"),
    ):
        error = error_of(response)
        assert response.status_code == 404
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert MODEL in error["message"]


def test_a_step_that_fails_before_the_first_token_is_a_500(serve: Serve) -> None:
    engine = FakeEngine(lambda _: iter([out(finish="error", error=StepError("out of memory"))]))
    with serve(engine) as client:
        for stream in (False, True):
            body = {"model": MODEL, "messages": HI, "stream": stream}
            response = client.post(CHAT, json=body)
            error = error_of(response)
            assert response.status_code == 500
            assert (error["type"], error["code"]) == ("server_error", "step_failed")
            assert "out of memory" in error["message"]


def test_an_engine_that_takes_nothing_is_a_503(serve: Serve) -> None:
    engine = FakeEngine(answer([300]))
    engine.refusal = EngineStoppedError("it died")
    with serve(engine) as client:
        for stream in (False, True):
            response = client.post(CHAT, json={"model": MODEL, "messages": HI, "stream": stream})
            assert response.status_code == 503
            assert error_of(response)["code"] == "engine_stopped"


def test_a_bug_is_a_500_that_tells_nothing(serve: Serve) -> None:
    engine = FakeEngine(answer([300]))
    engine.refusal = RuntimeError("secret path /home/me")
    with serve(engine) as client:
        response = client.post(CHAT, json={"model": MODEL, "messages": HI})
        assert response.status_code == 500
        assert "secret" not in error_of(response)["message"]


def test_when_one_sequence_is_refused_the_others_are_cancelled(serve: Serve) -> None:
    engine = FakeEngine(answer([300]), FakeInfo(vocab_size=5000))
    submit, calls = engine.submit, []

    def second_fails(request: Any) -> None:
        calls.append(request.request_id)
        if len(calls) == 2:
            raise EngineStoppedError("full")
        submit(request)

    engine.submit = second_fails
    with serve(engine) as client:
        response = client.post(CHAT, json={"model": MODEL, "messages": HI, "n": 3})
        assert response.status_code == 503
        assert calls[0] in engine.cancelled


def test_a_client_that_leaves_in_mid_body_disturbs_nobody(client: Served) -> None:
    with socket.create_connection(client.address) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        )
    assert client.get("/health").status_code == 200
