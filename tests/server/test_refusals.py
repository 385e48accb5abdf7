"""Refusals: what is sent, and the status, code, parameter and words of the error."""

import itertools
import json
import logging
import math
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_mtp.engine.request import TokenLogprobs
from mlx_mtp.errors import EngineStoppedError, StepError, StepMemoryError
from mlx_mtp.server.http import body as body_module
from mlx_mtp.server.http.body import MAX_DEPTH, MAX_ITEMS, MAX_PARTS
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL, tokenizer_with
from tests.support.fake_engine import FakeEngine, answer, out
from tests.support.in_process import (
    CHAT,
    COUNT,
    DETOKENIZE,
    GENERATING,
    GOOD,
    HI,
    MESSAGES,
    RESPONSES,
    TEXT,
    in_process,
)
from tests.support.raw_http import error_of

MAX_BODY = 4 << 20
BIG, WRONG = 10**30, "x"
MEDIA = "unsupported_media_type"
INVALID, UNSUPPORTED, CONTEXT = "invalid_value", "unsupported_parameter", "context_length_exceeded"
NO_API = "unsupported_route"
NO_MODEL = "model_not_found"
Fields = dict[str, Any]


def user(content: Any) -> Fields:
    return {"messages": [{"role": "user", "content": content}]}


def tool(parameters: Any) -> Fields:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


def calls(*given: Any) -> Fields:
    return {"messages": [{"role": "assistant", "tool_calls": given}, *HI]}


LARGE = {"x": [[]] * (1 << 16)}
DEEP = json.loads('{"a":' * 200 + "1" + "}" * 200)
KWARGS = {"chat_template_kwargs": {str(i): [] for i in range(65)}}
NAMED = {"type": "function", "function": {"name": "g"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
HUGE = {"format": {"type": "json_schema", "name": "x", "schema": {"minimum": 10**400}}}
IGNORED_AND_NOT = {"tools": [{"type": "web_search"}, {"type": "file_search"}]}
# Fields added to the route's good body, the param that is named, and a part of the message. Limits
# of common sizes are among the recorded exchanges, in the group that says "(refused)".
FIELDS: list[tuple[str, str, Fields, str | None, str]] = [
    (CHAT, INVALID, {"temperature": 10**400}, "temperature", "number"),
    (CHAT, INVALID, {"logit_bias": {"\uff11": 1}}, "logit_bias", "not a token id"),
    (CHAT, INVALID, {"seed": 10**4000}, "seed", "at most 9223372036854775807"),
    (CHAT, INVALID, {"n": BIG}, "n", "an integer of 31 digits is out of range"),
    (CHAT, INVALID, {"top_k": BIG}, "top_k", "at most 2147483648"),
    (CHAT, INVALID, {"top_k": -BIG}, "top_k", "at least 0"),
    (CHAT, INVALID, {"stop_token_ids": [BIG]}, "stop_token_ids[0]", "out of range"),
    (CHAT, INVALID, {"thinking_budget": -1}, "thinking_budget", "a number of tokens"),
    (CHAT, INVALID, {"thinking_budget": 1 << 31}, "thinking_budget", "below 2^31"),
    (CHAT, UNSUPPORTED, {"think": WRONG}, "think", "true, false, an effort (none, minimal"),
    (CHAT, INVALID, {"enable_thinking": 1.5}, "enable_thinking", "or an object"),
    (CHAT, INVALID, {"grammar": True}, "grammar", "a string, or an object with type and value"),
    (CHAT, INVALID, {"grammar": "x" * (1 << 18) + "x"}, "grammar", "at most 262144"),
    (CHAT, INVALID, {"stop": True}, "stop", "must be a string or a list of strings"),
    (RESPONSES, INVALID, {"input": True}, "input", "must be a string or a list of items"),
    (MESSAGES, INVALID, {"system": True}, "system", "must be a string or a list of blocks"),
    (CHAT, INVALID, {"messages": []}, "messages", "messages must not be empty."),
    (TEXT, INVALID, {"guided_choice": []}, "guided_choice", "must not be empty"),
    (RESPONSES, UNSUPPORTED, IGNORED_AND_NOT, "tools[1].type", "function"),
    (CHAT, INVALID, {"n": 5}, "n", "1 to 4"),  # CVE-2026-34756, of vLLM.
    (CHAT, INVALID, {"bad_words": [""]}, "bad_words[0]", "at least 1"),
    (CHAT, INVALID, {"bad_words": ["x" * 65]}, "bad_words[0]", "at most 64"),
    (CHAT, INVALID, {"bad_words": [1] * 257}, "bad_words", "at most 256"),
    (CHAT, INVALID, {"allowed_token_ids": []}, "allowed_token_ids", "is empty"),
    (CHAT, INVALID, {"allowed_token_ids": [WRONG] * 70_000}, "allowed_token_ids", "at most 65536"),
    (CHAT, INVALID, {"max_completion_tokens": 0}, "max_completion_tokens", "is 0"),
    (RESPONSES, INVALID, {"max_output_tokens": 0}, "max_output_tokens", "is 0"),
    (TEXT, INVALID, {"max_tokens": 0}, "max_tokens", "is 0"),
    (TEXT, INVALID, {"max_tokens": 3, "min_tokens": 4}, "min_tokens", "3 tokens at most"),
    (CHAT, INVALID, {"metadata": {"x" * 513: "a"}}, "metadata." + "x" * 111 + "...", "512 char"),
    (CHAT, INVALID, {"tool_choice": ALLOWED}, "tool_choice", "names 'g', which is not one"),
    (CHAT, INVALID, tool(DEEP), "tools[0].function.parameters", "128 levels"),
    # Each item is wrong too, which would be reported if any item were validated.
    (CHAT, INVALID, {"messages": [WRONG] * 4097}, "messages", "at most 4096"),
    (CHAT, INVALID, {"logit_bias": {str(i): WRONG for i in range(1025)}}, "logit_bias", "1024"),
    (CHAT, INVALID, KWARGS, "chat_template_kwargs", "at most 64"),
    (CHAT, INVALID, calls(*[WRONG] * 1025), "messages[0].tool_calls", "at most 1024"),
    (CHAT, INVALID, tool(LARGE), "tools[0].function.parameters", "65536"),
    (CHAT, INVALID, {str(i): WRONG for i in range(101)}, None, "at most 100"),
    (CHAT, UNSUPPORTED, {"x" * 5000: 1}, "x" * 120 + "...", "not a parameter"),
    (TEXT, INVALID, {"prompt": [BIG]}, "prompt", "0 to 4095"),
    (TEXT, INVALID, {"prompt": [[1] * ((1 << 20) + 1)]}, "prompt", "token ids; at most"),
    (TEXT, INVALID, {"prompt": ["a"] * 129}, "prompt", "128"),
    (TEXT, INVALID, {"guided_regex": "a" * (1 << 18) + "b"}, "guided_regex", "at most 262144"),
    (TEXT, "invalid_grammar", {"guided_regex": "((("}, "guided_regex", "can't be enforced"),
    (TEXT, CONTEXT, {"prompt": [5] * 1024, "max_tokens": 30}, None, "1024 tokens"),
    (TEXT, CONTEXT, {"prompt": "hello " * 400_000}, None, "more than 2048 tokens > 1023 maximum"),
    (COUNT, INVALID, {"messages": HI * 4097}, None, "at most 4096"),
    (RESPONSES, "invalid_grammar", {"text": HUGE}, "text.format", "out of range"),
]


def text(value: str | bytes) -> bytes:
    """Returns a good body with one more field, `x`, of this JSON."""
    raw = value if isinstance(value, bytes) else value.encode()
    return b'{"model": "test/model", "prompt": "hi", "x": ' + raw + b"}"


BODIES: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b'{"model": "x"', "not valid JSON"),
    (b"{} {}", "Extra data"),
    (b"[]", "must be a JSON object"),
    (b"\xef\xbb\xbf{}", "not valid JSON"),
    (json.dumps(GOOD[TEXT]).encode("utf-16"), "UTF-8"),
    (text(b'"\xff"'), "not valid UTF-8"),
    (text(b'"\xed\xa0\x80"'), "not valid UTF-8"),
    (text(r'"\ud800"'), "surrogate"),
    (text(b'"\x00"'), "control character"),
    (text("NaN"), "NaN is not JSON"),
    (text("1e999"), "1e999 is too large"),
    (text("9" * 5000), "too many digits"),
    (text("[" * 1000 + "]" * 1000), f"at most {MAX_DEPTH} levels"),
    (text("[" * 256 + "]" * 256), "levels"),
    (text("[" * 255 + "]" * 255), "not a parameter"),
    (text('"' + r"[\"{" * 9000 + '"'), "not a parameter"),
    (text("[" + "[]," * MAX_PARTS + "1]"), str(MAX_PARTS)),
    (text("[" + '"",' * MAX_PARTS + "1]"), str(MAX_PARTS)),
    (text("[" + "1," * (MAX_ITEMS + 1) + "1]"), str(MAX_ITEMS)),
    (rb'{"model": "a", "mod\u0065l": "b"}', "'model' twice"),
    (text('[{"a": 1, "b": 2, "a": 3}]'), "'a' twice"),
]
# Headers added to a good request, status, code, a part of the message.
HEADERS: list[tuple[dict[str, str], int, str, str]] = [
    ({"Content-Encoding": "gzip"}, 415, MEDIA, "uncompressed"),
    ({"Content-Type": "text/plain"}, 415, MEDIA, "application/json"),
    ({"Content-Type": ";;;"}, 415, MEDIA, "JSON"),
    ({"Content-Type": "text/json+json; charset=latin1"}, 415, MEDIA, "must be UTF-8"),
    ({"Content-Length": "9" * 12}, 413, "payload_too_large", "--max-body-size"),
    ({"Host": "evil.example"}, 403, "forbidden", "--allowed-host evil.example"),
    ({"Origin": "https://evil.example"}, 403, "forbidden", "--cors-origin https://evil.example"),
]
ROUTES: list[tuple[str, str, int, str, str]] = [
    ("POST", "/v1", 404, "not_found", "no route POST /v1."),
    ("GET", "/v1/responses/resp_1", 404, "not_found", "store: false"),
    ("DELETE", "/v1/responses/resp_1", 404, "not_found", "store: false"),
    ("GET", "/v1/models/gpt-4", 404, NO_MODEL, MODEL),
    ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404, NO_MODEL, "not served"),
    ("GET", "/" + "a" * 9000, 404, "not_found", "aaa..."),
    ("PUT", CHAT, 405, "", "Method Not Allowed: PUT"),
    ("POST", "/v1/embeddings", 400, NO_API, "generates text and makes no embeddings"),
    ("POST", "/api/embed", 400, NO_API, "generates text and makes no embeddings"),
    ("POST", "/images/generations", 400, NO_API, "another server"),
    ("POST", "/v1/responses/resp_1/cancel", 400, NO_API, "another server"),
    ("POST", "/api/pull", 400, NO_API, "another server"),
    ("POST", "/v1/chat/completion", 404, "not_found", "nearest is /v1/chat/completions."),
    ("POST", "/v1/v1/messages", 404, "not_found", "nearest is /v1/messages."),
    ("GET", "/messages", 405, "", "Not Allowed"),
    ("GET", "/api/tag", 404, "not_found", "nearest is /api/tags."),
    ("GET", MESSAGES, 405, "", "Not Allowed"),
    ("POST", MESSAGES + "/x", 404, "not_found", "no route"),
]
TYPES = dict.fromkeys((400, 405, 413, 415), "invalid_request_error")
TYPES |= {403: "permission_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}
ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with in_process(max_choices=4, max_body_bytes=MAX_BODY, unknown_parameters="error") as client:
        yield client


def check(
    response: httpx.Response, path: str, status: int, code: str, word: str, param: str | None = None
) -> None:
    assert response.status_code == status, response.text
    assert word in error_of(response, path)
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    if path.startswith("/api/"):
        assert error == error_of(response, path)
    elif path.startswith((MESSAGES, "/messages")):
        assert error["type"] == ANTHROPIC_TYPES.get(status, TYPES[status])
    else:
        assert (error["type"], error["param"]) == (TYPES[status], param)
        assert error["code"] == (code or None)


@pytest.mark.parametrize(("path", "code", "fields", "param", "word"), FIELDS)
def test_fields(
    client: httpx.Client, path: str, code: str, fields: Fields, param: str | None, word: str
) -> None:
    for stream in [{}] if path == COUNT else [{}, {"stream": True}]:
        # Encoded here, as httpx does not encode every number.
        content = json.dumps(GOOD[path] | stream | fields)
        check(client.post(path, content=content), path, 400, code, word, param)


@pytest.mark.parametrize(("content", "word"), BODIES, ids=lambda value: str(value)[:40])
def test_bodies(client: httpx.Client, content: bytes, word: str) -> None:
    is_field = word == "not a parameter"
    code, param = (UNSUPPORTED, "x") if is_field else (INVALID, None)
    for path in (TEXT,) if b'"prompt"' in content else (TEXT, MESSAGES):
        check(client.post(path, content=content), path, 400, code, word, param)


@pytest.mark.parametrize(("headers", "status", "code", "word"), HEADERS, ids=str)
@pytest.mark.parametrize("path", [TEXT, MESSAGES])
def test_headers(
    client: httpx.Client, path: str, headers: dict[str, str], status: int, code: str, word: str
) -> None:
    check(client.post(path, json=GOOD[path], headers=headers), path, status, code, word)


@pytest.mark.parametrize(("method", "path", "status", "code", "word"), ROUTES)
def test_routes(
    client: httpx.Client, method: str, path: str, status: int, code: str, word: str
) -> None:
    param = "model" if code == NO_MODEL else None
    check(client.request(method, path), path, status, code, word, param)


@pytest.mark.parametrize("path", [TEXT, MESSAGES])
def test_a_body_that_is_too_long(client: httpx.Client, path: str) -> None:
    """A body is refused with and without a Content-Length."""
    for content in (b" " * (MAX_BODY + 1), iter([b" " * MAX_BODY, b" "])):
        check(client.post(path, content=content), path, 413, "payload_too_large", "longer than")


def test_a_text_is_bounded_as_a_body_is(tokenizer: Tokenizer) -> None:
    long = max(range(4000), key=lambda token: len(tokenizer.token_bytes(token)))
    with in_process(tokenizer=tokenizer, max_body_bytes=1000) as client:
        response = client.post(DETOKENIZE, json={"tokens": [long] * 100})
    check(response, DETOKENIZE, 400, INVALID, "longer than 1000 bytes", "tokens")


@pytest.mark.parametrize("path", GOOD)
def test_the_good_bodies_are_good(client: httpx.Client, path: str) -> None:
    if path == COUNT:  # more than fits can be counted
        assert client.post(path, json=GOOD[path] | user("word " * 3000)).status_code == 200
    for headers in (
        {"Content-Type": "application/json; charset=UTF-8"},
        {"Content-Type": "application/vnd.api+json"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Encoding": "identity"},
        {"Origin": "http://localhost"},
    ):
        for suffix in ("", "/"):
            response = client.post(path + suffix, json=GOOD[path], headers=headers)
            assert response.status_code == 200, headers
    # The Content-Type can be missing, as with curl; a pair of surrogates is one character.
    pair = json.dumps(GOOD[path]).replace('"hi"', r'"\ud83c\udf89"')
    assert client.post(path, content=pair).status_code == 200
    function = {"name": "f", "arguments": '{"a": "\\ud83c\\udf89"}'}
    assert client.post(CHAT, json=GOOD[CHAT] | calls({"function": function})).status_code == 200


def test_a_clients_value_is_repeated_in_part(client: httpx.Client) -> None:
    for fields in ({"prompt": [10**4000]}, {"model": "x" * 4000}):
        response = client.post(TEXT, content=json.dumps(GOOD[TEXT] | fields))
        assert len(error_of(response, TEXT)) < 250


def test_large_bodies_are_parsed_off_the_event_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_text, names = body_module.check_text, []

    def noting(*bounds: Any) -> None:
        names.append(threading.current_thread().name)
        check_text(*bounds)

    monkeypatch.setattr(body_module, "check_text", noting)
    for padding in (0, body_module.LARGE_BODY):
        body = GOOD[CHAT] | {"user": "x" * padding}
        assert client.post(CHAT, json=body).status_code == 200
    assert [name.startswith("mlx-mtp-work") for name in names] == [False, True]


def test_a_broken_template_is_not_the_clients_fault() -> None:
    with in_process(tokenizer=tokenizer_with("{% if %}")) as client:
        response = client.post(CHAT, json=GOOD[CHAT])
        check(response, CHAT, 500, "internal_error", "chat template is wrong")


@pytest.mark.parametrize("entry", [(math.nan, ()), (-1.0, ((5, math.nan),))])
def test_logprobs_that_are_no_numbers_are_an_error(entry: tuple[Any, ...]) -> None:
    logprobs = (TokenLogprobs(*entry),)
    with in_process(
        FakeEngine(lambda _: iter([out(300, finish="length", logprobs=logprobs)]))
    ) as c:
        for stream in (False, True):
            response = c.post(CHAT, json=GOOD[CHAT] | {"logprobs": True, "stream": stream})
            check(response, CHAT, 500, "internal_error", "computed NaN")


FAILURES = [
    (StepError("a bug"), 500, "step_failed", "a bug"),
    (StepMemoryError("out of memory"), 500, "out_of_memory", "out of memory"),
    (EngineStoppedError("it died"), 503, "engine_stopped", "it died"),
    # The text of an unexpected exception is only logged.
    (RuntimeError("/home/me/.ssh"), 500, "internal_error", "The server failed; see its log."),
]


@pytest.mark.parametrize(("failure", "status", "code", "message"), FAILURES)
@pytest.mark.parametrize("where", ["at submission", "before the first token"])
def test_what_fails_before_the_first_token_is_a_status(
    failure: Exception,
    status: int,
    code: str,
    message: str,
    where: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = FakeEngine(lambda _: iter([out(finish="error", error=failure)]))
    if where == "at submission":
        engine.refusal = failure
    with in_process(engine) as client:
        for path, stream in itertools.product(GENERATING, (False, True)):
            response = client.post(path, json=GOOD[path] | {"stream": stream})
            check(response, path, status, code, message)


def test_when_one_sequence_is_refused_the_others_are_cancelled() -> None:
    engine = FakeEngine(answer([300]))
    submit = engine.submit

    def second_fails(request: Any) -> None:
        if engine.submitted:
            raise EngineStoppedError("full")
        submit(request)

    engine.submit = second_fails
    with in_process(engine) as client:
        assert client.post(CHAT, json=GOOD[CHAT] | {"n": 3}).status_code == 503
    assert engine.submitted[0].request_id in engine.cancelled
