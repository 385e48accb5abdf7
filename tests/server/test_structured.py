"""Structured output over HTTP: what is refused, by name, and what the bundled model answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.build import build_engine
from mlx_mtp.errors import EngineError, GrammarError, UnsupportedParameterError
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARACTERS
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.grammar_check import GrammarChecker
from mlx_mtp.server.structured import MAX_CACHED, Grammars
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve
from tests.server.fake_engine import EOS, FakeEngine, answer, endless
from tests.server.wire_help import CHAT, WEATHER, ask, chat_body, events

COMPLETIONS = "/v1/completions"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "animal": {"enum": ["fox", "owl", "bear"]},
        "age": {"type": "integer", "maximum": 99, "minimum": 1},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "animal", "age", "likes"],
    "additionalProperties": False,
}
DEEP = {"$ref": "#/$defs/d0"}, {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
WIDE = [f"p{i}" for i in range(3000)]
HOSTILE = {
    "dear": {"guided_json": {"type": "integer", "multipleOf": 999_983}},
    "endless": {
        "guided_grammar": "start: A\nA: ~/(.*a.{100}b.*)/ & /(.*b.{90}a.*)/ & ~/.*c.{80}.*/"
    },
    "deep": {"guided_json": {**DEEP[0], "$defs": {**DEEP[1], "d3000": {"type": "string"}}}},
    "wide": {"guided_json": {"type": "object", "properties": {key: {} for key in WIDE}}},
}


def form(schema: object, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.fixture(scope="module")
def fake(serve: Serve, tokenizer: Tokenizer) -> Iterator[tuple[httpx.Client, FakeEngine]]:
    engine = FakeEngine(answer(tokenizer.encode("ok")))
    with serve(engine) as client:
        yield client, engine


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {}}, "response_format.type", ""),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "required",
        ),
        ({"response_format": form([])}, "response_format.json_schema.schema", "dict"),
        ({"response_format": form({}, strict=1)}, "response_format.json_schema.strict", "bool"),
        ({"response_format": form({}, other=1)}, "response_format.json_schema.other", ""),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format.schema",
            "json_object",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": form({})["json_schema"]}},
            "response_format.json_schema",
            "belongs to type json_schema",
        ),
        ({"response_format": form({"type": "foo"})}, "response_format", "Invalid type: foo"),
        ({"response_format": form({"not": {}})}, "response_format", "not"),
        (
            {"response_format": form({"description": "x" * MAX_GRAMMAR_CHARACTERS})},
            "response_format.json_schema.schema",
            str(MAX_GRAMMAR_CHARACTERS),
        ),
        ({"guided_json": 3}, "guided_json", "dict"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": "[]"}, "guided_json", "dict"),
        ({"guided_json": " " * (MAX_GRAMMAR_CHARACTERS + 1)}, "guided_json", "characters"),
        ({"guided_json": '{"a":' * 2000}, "guided_json", "JSON"),
        ({"guided_json": {"type": "foo"}}, "guided_json", "Invalid type: foo"),
        ({"guided_regex": ""}, "guided_regex", ""),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "guided_regex", ""),
        ({"guided_choice": []}, "guided_choice", ""),
        ({"guided_choice": [1]}, "guided_choice[0]", "string"),
        ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice", str(MAX_CHOICES)),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
        ({"guided_grammar": 'root ::= "a'}, "guided_grammar", "GBNF"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json"),
        (
            {"guided_regex": "a", "response_format": {"type": "text"}},
            "guided_regex",
            "response_format",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"structured_outputs": {}}, "structured_outputs", "one of json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "one of json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "true"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        (
            {"structured_outputs": {"choice": ["a"], "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "not a parameter",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_json": {}},
            "structured_outputs",
            "guided_json",
        ),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_is_refused_names_the_field(fake, fields, param, words) -> None:
    response = fake[0].post(CHAT, json=chat_body(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_completions_take_the_guided_fields_and_no_response_format(fake) -> None:
    client, engine = fake
    ask(client, COMPLETIONS, prompt="a", guided_choice=["ok", "no"])
    assert engine.submitted[-1].sampling.grammar == GrammarSpec("choice", '["ok", "no"]')
    assert engine.submitted[-1].grammar is not None
    body = {"model": MODEL, "prompt": "a"}
    response = client.post(COMPLETIONS, json={**body, "response_format": {"type": "json_object"}})
    assert response.json()["error"]["param"] == "response_format"
    response = client.post(COMPLETIONS, json={**body, "guided_regex": "(a"})
    assert response.json()["error"]["param"] == "guided_regex"
    assert response.json()["error"]["code"] == "invalid_grammar"


def test_what_reaches_the_engine(fake) -> None:
    client, engine = fake

    def spec(**fields: Any) -> GrammarSpec | None:
        ask(client, **fields)
        return engine.submitted[-1].sampling.grammar

    assert spec() is None
    assert engine.submitted[-1].grammar is None
    assert spec(response_format={"type": "text"}) is None
    assert spec(response_format={"type": "json_object"}) == GrammarSpec("json_object")
    schema = GrammarSpec("json_schema", '{"type": "array"}')
    array = {"type": "array"}
    assert spec(response_format=form(array, strict=True, description="d")) == schema
    assert spec(response_format={"type": "json_object", "schema": array}) == schema
    assert spec(guided_json=array) == spec(guided_json=json.dumps(array)) == schema
    assert spec(guided_regex="a+") == GrammarSpec("regex", "a+")
    assert spec(guided_grammar='start: "a"') == GrammarSpec("lark", 'start: "a"')
    for words in (
        {"json": array},
        {"json": json.dumps(array)},
        {"regex": "a+"},
        {"grammar": 'start: "a"'},
        {"choice": ["a", "b"]},
    ):
        (name, value), *_ = words.items()
        assert spec(structured_outputs=words) == spec(**{f"guided_{name}": value})
    assert spec(structured_outputs={"json_object": True}) == GrammarSpec("json_object")
    thinking = spec(guided_regex="a+", chat_template_kwargs={"enable_thinking": True})
    assert thinking == GrammarSpec("regex", "a+", free_until="</think>")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_while_others_stream(serve: Serve, name: str) -> None:
    """A stream that runs beside goes on, and so do grammars that are none of these."""
    with serve(FakeEngine(endless(300))) as client:
        body = chat_body(stream=True, max_tokens=10**6)
        with client.stream("POST", CHAT, json={**body, "max_tokens": 900}) as stream:
            lines = stream.iter_lines()
            next(lines)
            response = httpx.post(
                f"{client.base_url}{CHAT}", json=chat_body(**HOSTILE[name]), timeout=30
            )
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "invalid_grammar"
            assert response.json()["error"]["param"] == next(iter(HOSTILE[name]))
            for _ in range(20):
                next(lines)
        assert client.get("/health").status_code == 200
        again = client.post(CHAT, json=chat_body(**HOSTILE[name]))
        assert again.json() == response.json()


def test_others_are_answered_while_a_grammar_takes_its_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole streams, one after the other: what had been buffered before would not be enough."""
    began = threading.Event()
    check, paused = GrammarChecker.check, []

    def stopped(self: GrammarChecker, spec: GrammarSpec) -> None:
        # The process that tries it out works on it for as long as the test likes.
        paused.append(self._process or self._start())
        paused[0].send_signal(signal.SIGSTOP)
        began.set()
        check(self, spec)

    monkeypatch.setattr(GrammarChecker, "check", stopped)
    with (
        serve(FakeEngine(answer([300] * 5))) as client,
        httpx.Client(timeout=120) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        hostile = chat_body(**HOSTILE["endless"])
        asking = pool.submit(other.post, f"{client.base_url}{CHAT}", json=hostile)
        assert began.wait(30)
        try:
            for _ in range(12):
                assert len(events(client)) > 3
            assert not asking.done()
        finally:
            paused[0].send_signal(signal.SIGCONT)
        assert asking.result().status_code == 400


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(tokenizer.to_json(), (EOS,))
    yield made
    made.close()


def test_grammars_are_kept_and_the_oldest_forgotten(grammars: Grammars) -> None:
    async def script() -> None:
        first = GrammarSpec("regex", "first")
        kept = await grammars.compile(first, "x")
        assert await grammars.compile(first, "y") is kept
        same = await asyncio.gather(*(grammars.compile(GrammarSpec("regex", "b"), "x"),) * 1)
        both = await asyncio.gather(
            *(grammars.compile(GrammarSpec("regex", "b"), "x") for _ in "ab")
        )
        assert both == [same[0], same[0]]
        wrong = GrammarSpec("regex", "(")
        for field in ("one", "two"):
            with pytest.raises(GrammarError, match=field) as caught:
                await grammars.compile(wrong, field)
            assert caught.value.param == field
        for number in range(MAX_CACHED):
            await grammars.compile(GrammarSpec("regex", str(number)), "x")
        assert await grammars.compile(first, "x") is not kept

    asyncio.run(script())


def test_a_checking_process_that_is_gone_is_replaced(grammars: Grammars) -> None:
    async def script() -> None:
        await grammars.compile(GrammarSpec("regex", "a"), "x")
        grammars._checker._process.kill()
        with pytest.raises(EngineError, match="try again"):
            await grammars.compile(GrammarSpec("regex", "b"), "x")
        await grammars.compile(GrammarSpec("regex", "b"), "x")

    asyncio.run(script())


def test_a_model_without_an_end_has_no_grammars(tokenizer: Tokenizer) -> None:
    made = Grammars(tokenizer.to_json(), ())
    with (
        contextlib.closing(made),
        pytest.raises(UnsupportedParameterError, match="no token that ends"),
    ):
        asyncio.run(made.compile(GrammarSpec("json_object"), "response_format"))


@pytest.fixture(scope="module")
def served(serve: Serve, demo_model: LoadedModel, tokenizer: Tokenizer) -> Iterator[openai.OpenAI]:
    """The bundled model with MTP, by OpenAI's client."""
    config = EngineConfig(num_draft_tokens=3)
    engine = build_engine(demo_model, config, tokenizer.vocab_size, tokenizer.eos_token_ids)
    with (
        serve(engine) as client,
        openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="k", max_retries=0) as sdk,
    ):
        yield sdk


def say(sdk: openai.OpenAI, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "Tell me about Anna the fox."}]
    fields = {"temperature": 0, "max_tokens": 160, "seed": 1, **fields}
    return sdk.chat.completions.create(model=MODEL, messages=messages, **fields)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_an_answer_fits_its_schema(served: openai.OpenAI, temperature: float) -> None:
    wanted = form(PERSON, strict=True)
    whole = say(served, response_format=wanted, temperature=temperature, logprobs=True)
    content = whole.choices[0].message.content
    jsonschema.validate(json.loads(content), PERSON)
    assert whole.choices[0].finish_reason == "stop"
    assert all(token.logprob <= 0 for token in whole.choices[0].logprobs.content)
    stream = say(served, response_format=wanted, temperature=temperature, stream=True)
    pieces = [c.choices[0].delta.content or "" for c in stream if c.choices]
    assert "".join(pieces) == content
    assert len(pieces) > 5


class Animal(BaseModel):
    name: Literal["Anna", "Ben"]
    age: int
    likes: list[Literal["cheese", "rain"]]


def test_the_sdk_parses_into_a_model(served: openai.OpenAI) -> None:
    completion = served.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Who is it?"}],
        response_format=Animal,
        temperature=0,
        max_tokens=200,
        logit_bias={"60": 2},
    )
    assert completion.choices[0].finish_reason == "stop"
    assert isinstance(completion.choices[0].message.parsed, Animal)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[A-Z][a-z]{2,9} is [0-9]{1,2}\\."}, r"[A-Z][a-z]{2,9} is [0-9]{1,2}\."),
        ({"guided_choice": ["London", "Rome é🎉"]}, "London|Rome é🎉"),
        ({"guided_grammar": 'root ::= "yes" | "no" [0-9]{2}'}, "yes|no[0-9]{2}"),
        ({"guided_json": {"enum": ["</think>", 7]}}, '"</think>"|7'),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_guided_answers_match(served, fields, pattern, temperature) -> None:
    for thinking in (False, True):
        kwargs = {"enable_thinking": thinking, **({"thinking_budget": 6} if thinking else {})}
        completion = say(
            served,
            temperature=temperature,
            extra_body={**fields, "chat_template_kwargs": kwargs},
        )
        assert re.fullmatch(pattern, completion.choices[0].message.content)
        assert completion.choices[0].finish_reason == "stop"
        reasoning = getattr(completion.choices[0].message, "reasoning_content", None)
        assert bool(reasoning) == thinking


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_meets_a_limit_on_its_way_says_so(
    served: openai.OpenAI, tokenizer: Tokenizer, stream: bool
) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(600)}}
    schema = {"type": "array", "items": {"anyOf": [{"const": 1}, wide]}, "minItems": 1}
    bias = {str(t): -100 for t in range(4096) if tokenizer.token_bytes(t)[:1] == b"1"}
    with pytest.raises((openai.BadRequestError, openai.APIError), match="be continued") as caught:
        list(say(served, stream=stream, extra_body={"guided_json": schema}, logit_bias=bias))
    assert caught.value.code == "invalid_grammar"
    assert say(served, max_tokens=5).choices[0].finish_reason == "length"


def test_a_required_tool_call_is_made(served: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
    }
    tool = {"type": "function", "function": {**WEATHER["function"], "parameters": schema}}
    completion = say(served, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = completion.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), schema)
    assert completion.choices[0].finish_reason == "tool_calls"


def test_constrained_and_free_answers_at_once_are_those_of_each_alone(served) -> None:
    wanted: list[dict[str, Any]] = [
        {"response_format": form(PERSON)},
        {},
        {"extra_body": {"guided_choice": ["London", "Rome"]}},
        {"temperature": 1.0},
        {"extra_body": {"guided_regex": "[a-z ]{20,40}"}, "temperature": 1.0},
        {"n": 2, "temperature": 1.0, "extra_body": {"guided_json": PERSON}},
    ]

    def texts(fields: dict[str, Any]) -> list[str]:
        return [c.message.content for c in say(served, max_tokens=40, **fields).choices]

    alone = [texts(fields) for fields in wanted]
    got: dict[int, list[str]] = {}

    def work(number: int) -> None:
        got[number] = texts(wanted[number])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[n] for n in range(len(wanted))] == alone
