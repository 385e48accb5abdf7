"""Structured output over HTTP: what is refused, by name, and the bundled model's answers."""

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.errors import GrammarError, UnavailableError
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARACTERS
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.grammar.grammars import MAX_CACHED, Grammars
from mlx_mtp.text.sandbox import grammar_check
from mlx_mtp.text.sandbox.helper import Helper
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve, Served
from tests.support.fake_engine import EOS, FakeEngine, answer
from tests.support.in_process import in_process
from tests.support.wire_help import CHAT, chat_body, events

COMPLETIONS = "/v1/completions"
FORM = "response_format"
SCHEMA = "response_format.json_schema"
LIKES = {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3}
PERSON = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "owl", "bear"]}, "likes": LIKES},
    "required": ["animal", "likes"],
    "additionalProperties": False,
}
CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
WIDE = [f"p{i}" for i in range(3000)]
HOSTILE: dict[str, dict[str, Any]] = {
    "expensive": {"guided_json": {"type": "integer", "multipleOf": 999_983}},
    "endless": {
        "guided_grammar": "start: A\nA: ~/(.*a.{100}b.*)/ & /(.*b.{90}a.*)/ & ~/.*c.{80}.*/"
    },
    "deep": {"guided_json": {"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d3000": {}}}},
    "wide": {"guided_json": {"type": "object", "properties": {key: {} for key in WIDE}}},
}
LONG = MAX_GRAMMAR_CHARACTERS + 1
ME, YOU = ("me", ""), ("you", "")


def form(schema: object, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(answer(tokenizer.encode("ok")))


@pytest.fixture(scope="module")
def fake(serve: Serve, engine: FakeEngine) -> Iterator[Served]:
    with serve(engine, unknown_parameters="error") as client:
        yield client


REFUSED: list[tuple[str, object, str, str]] = [
    # the field, its value, the field that the error names, a word of the message
    (FORM, {"type": "json_schema"}, SCHEMA, "required"),
    (FORM, form({}, other=1), f"{SCHEMA}.other", ""),
    (FORM, {"type": "text", "schema": {}}, f"{FORM}.schema", "json_object"),
    (FORM, {**form({}), "type": "json_object"}, SCHEMA, "belongs to type json_schema"),
    (FORM, form({"type": "foo"}), FORM, "Invalid type: foo"),
    (FORM, form({"not": {}}), FORM, "not"),
    (FORM, form({"title": "x" * LONG}), f"{SCHEMA}.schema", str(MAX_GRAMMAR_CHARACTERS)),
    (FORM, form({"minimum": 10**400}), FORM, "out of range"),
    (FORM, form(nested(127)), FORM, "recursion limit"),
    ("guided_json", "{", "", "JSON"),
    ("guided_json", " " * LONG, "", "characters"),
    ("guided_json", '{"const": 1e999}', "", "JSON"),
    ("guided_json", '{"const": "\\ud800"}', "", "JSON"),
    ("guided_json", '{"const": NaN}', "", "JSON"),
    ("guided_json", '{"type": "object", "type": "array"}', "", "'type' twice"),
    ("guided_regex", "(a", "", "can't be enforced: regex parse error: unclosed group"),
    (
        "guided_regex",
        "x" * 9999 + "\n(",
        "",
        "can't be enforced: regex parse error: unclosed group",
    ),
    ("guided_choice", [], "", ""),
    ("guided_choice", ["a"] * (MAX_CHOICES + 1), "", str(MAX_CHOICES)),
    ("guided_grammar", "start: missing", "", "missing"),
    ("guided_grammar", 'root ::= "a', "", "GBNF"),
    ("structured_outputs", {}, "", "one of json"),
    ("structured_outputs", {"json_object": False}, "structured_outputs.json_object", "true"),
    ("structured_outputs", {"choice": ["a"], "x": 1}, "structured_outputs.x", "not a parameter"),
]
A_TOOL = {"type": "function", "function": {"name": "f"}}
TOGETHER: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "a", FORM: {"type": "text"}}, "guided_regex", FORM),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "grammar"),
    ({"tools": [A_TOOL], "ebnf": 'start: "a"'}, "tools", "A grammar can't be combined"),
    ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "structured_outputs", "guided_j"),
]


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        *(({field: value}, param or field, word) for field, value, param, word in REFUSED),
        *((fields, next(iter(fields)), "") for fields in HOSTILE.values()),
        *TOGETHER,
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_is_refused_names_the_field(
    fake: Served, fields: dict[str, Any], param: str, word: str
) -> None:
    response = fake.post(CHAT, json=chat_body(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert word in error["message"]
    assert not re.search(r"\d \| |%json", error["message"]), "the grammar is not shown"


def string(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string", **keywords}}


A, TOOL_F = 'the parameter "a"', 'of the tool "f"'
WRONG_TOOLS: list[tuple[dict[str, Any], str]] = [
    # the schemas of a strict tool's parameters, and a part of the error
    ({"a": {"type": "integer", "minimum": "x"}}, f'"minimum" of {A} {TOOL_F}: '),
    # If nothing tells which rule is too expensive, the tools are tried one by one.
    ({"a": {"type": "integer", "multipleOf": 999_983}}, f"{TOOL_F[3:]}: It takes more than"),
    ({"b": {"type": "integer"}, "a": string(pattern="(")}, f'"items" of {A} {TOOL_F}: regex parse'),
    (
        {"a": {"type": "array", "prefixItems": [{"$ref": "#/$defs/no"}]}},
        f"of {A} {TOOL_F}: Pointer",
    ),
    ({"a": string(format="foo"), "c": string()}, f"of {A} {TOOL_F}: Unknown format: foo"),
]
OF_JSON = [
    ({"a": {"$ref": "#/nope"}}, f"\"$ref\" of {A} {TOOL_F}: Pointer '/nope' does not exist"),
    (
        {"a": {"type": "string", "pattern": "("}},
        f'"pattern" of {A} {TOOL_F}: regex parse error: unc',
    ),
    ({"a": {"type": "foo"}}, f'"type" of {A} {TOOL_F}: Invalid type: foo'),
]


@pytest.mark.parametrize(
    ("parser", "properties", "words"),
    [
        *(("qwen3_coder", *case) for case in WRONG_TOOLS),
        *(("hermes", *case) for case in (*WRONG_TOOLS, *OF_JSON)),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_wrong_schema_of_a_tool_is_named(
    parser: str, properties: dict[str, Any], words: str
) -> None:
    right = {"name": "ok", "parameters": {"type": "object", "properties": {"x": string()}}}
    wrong = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": {**each, "strict": True}} for each in (right, wrong)]
    with in_process(tool_call_parser=parser) as client:
        response = client.post(CHAT, json=chat_body(tools=tools, tool_choice="required"))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        400,
        "tools",
        "invalid_grammar",
    )
    assert words in error["message"]
    assert not re.search(r"\d \| |%json", error["message"]), "the grammar is not shown"


def test_others_are_answered_while_a_grammar_takes_its_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole streams are answered in turn, which is more than could have been buffered before."""
    began = threading.Event()
    ask, paused = Helper.ask, []

    def stopped(self: Helper, question: Any, seconds: float) -> Any:
        # The process that tries the grammar is stopped for as long as the test needs.
        self.start()
        paused.append(self._process)
        paused[0].send_signal(signal.SIGSTOP)
        began.set()
        return ask(self, question, seconds)

    monkeypatch.setattr(Helper, "ask", stopped)
    with (
        serve(FakeEngine(answer([300] * 5))) as client,
        httpx.Client(timeout=120) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        hostile = chat_body(**HOSTILE["deep"])
        asking = pool.submit(other.post, f"{client.base_url}{CHAT}", json=hostile)
        assert began.wait(30)
        try:
            for _ in range(12):
                assert len(events(client)) > 3
            assert not asking.done()
        finally:
            paused[0].send_signal(signal.SIGCONT)
        assert asking.result().status_code == 400


def test_grammars_are_kept_and_the_oldest_forgotten(tokenizer: Tokenizer) -> None:
    async def script(grammars: Grammars) -> None:
        first = GrammarSpec("regex", "first")
        kept = await grammars.compile(first, "x", ME)
        assert await grammars.compile(first, "y", YOU) is kept
        one, other = await asyncio.gather(
            *(grammars.compile(GrammarSpec("regex", "b"), "x", client) for client in (ME, YOU))
        )
        assert one is other
        wrong = GrammarSpec("regex", "(")
        for field in ("one", "two"):
            with pytest.raises(GrammarError, match=field) as caught:
                await grammars.compile(wrong, field, ME)
            assert caught.value.param == field
        for number in range(MAX_CACHED):
            await grammars.compile(GrammarSpec("regex", str(number)), "x", ME)
        assert await grammars.compile(first, "x", ME) is not kept
        # A checking process that has died is replaced.
        process = grammars._checker._process
        assert process is not None
        process.kill()
        await grammars.compile(GrammarSpec("regex", "c"), "x", ME)

    with contextlib.closing(Grammars(tokenizer, (EOS,))) as made:
        asyncio.run(script(made))


def test_a_checker_that_is_stopped_is_replaced(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAIT_SECONDS", 2.0)

    async def script(grammars: Grammars) -> None:
        await grammars.compile(GrammarSpec("regex", "a"), "x", ME)
        process = grammars._checker._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        await grammars.compile(GrammarSpec("regex", "b"), "x", ME)
        assert process.poll() == -signal.SIGKILL

    with contextlib.closing(Grammars(tokenizer, (EOS,))) as made:
        asyncio.run(script(made))


def test_a_trial_that_was_killed_refuses_no_grammar(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short, processes are killed; a grammar that crashes its trial is refused."""
    script = f"""if True:
        import os, signal
        from mlx_mtp.text.sandbox import grammar_check
        def end(grammar):
            with open({str(tmp_path / "trials")!r}, "a+") as trials:
                trials.seek(0)
                number = len(trials.read())
                trials.write("x")
            os.kill(os.getpid(), signal.SIGKILL if number < 3 else signal.SIGSEGV)
        grammar_check._random_walk = end
        grammar_check.helpers.answer_questions(grammar_check._answers)
    """
    begin = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **more: begin([sys.executable, "-c", script], **more)
    )
    with contextlib.closing(Grammars(tokenizer, (EOS,))) as made:
        # Two trials of each grammar: both killed; then one killed, and one that crashes.
        for error, words in ((UnavailableError, "lack of memory"), (GrammarError, "too deeply")):
            with pytest.raises(error, match=words):
                asyncio.run(made.compile(GrammarSpec("regex", "a"), "x", ME))


def test_one_clients_grammars_do_not_hold_up_anothers(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    compile_one = Grammars._compile

    def noting(self: Grammars, compiler: Any, spec: GrammarSpec, tools: Any) -> Any:
        order.append(spec.value)
        return compile_one(self, compiler, spec, tools)

    monkeypatch.setattr(Grammars, "_compile", noting)

    async def script(grammars: Grammars) -> None:
        wanted = [(str(number), ME) for number in range(12)] + [("yours", YOU)]
        await asyncio.gather(
            *(grammars.compile(GrammarSpec("regex", text), "x", who) for text, who in wanted)
        )

    with contextlib.closing(Grammars(tokenizer, (EOS,))) as made:
        asyncio.run(script(made))
    assert order.index("yours") <= 2
    assert len(order) == 13


def test_a_fork_that_dies_without_an_answer_is_an_error() -> None:
    script = """if True:
        from mlx_mtp.sampling.params import GrammarSpec
        from mlx_mtp.text.sandbox.grammar_check import _in_a_fork
        class Compiler:
            def compile(self, spec):
                raise (SystemExit if spec.value == "a" else KeyError)("why")
        print([_in_a_fork(Compiler(), GrammarSpec("regex", value)) for value in "ab"])
    """
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "['llguidance failed on it.', \"'why'.\"]\n"


@pytest.fixture(scope="module")
def served(serve: Serve, demo_model: LoadedModel, tokenizer: Tokenizer) -> Iterator[openai.OpenAI]:
    """OpenAI's client for a server of the bundled model with MTP."""
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


def test_an_answer_fits_its_schema(served: openai.OpenAI) -> None:
    fields = {"response_format": form(PERSON, strict=True), "temperature": 1.0}
    (whole,) = say(served, logprobs=True, **fields).choices
    jsonschema.validate(json.loads(whole.message.content), PERSON)
    assert whole.finish_reason == "stop"
    assert all(token.logprob <= 0 for token in whole.logprobs.content)
    pieces = [c.choices[0].delta.content or "" for c in say(served, stream=True, **fields)]
    assert "".join(pieces) == whole.message.content
    assert len(pieces) > 5


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_regex", r"[A-Z][a-z]{2,9} is [0-9]\.", r"[A-Z][a-z]{2,9} is [0-9]\."),
        ("guided_choice", ["London", "Rome é🎉"], "London|Rome é🎉"),
        ("guided_grammar", 'root ::= "yes" | "no" [0-9]{2}', "yes|no[0-9]{2}"),
        ("guided_json", {"enum": ["</think>", 7]}, '"</think>"|7'),
    ],
)
def test_guided_answers_match(
    served: openai.OpenAI, field: str, value: object, pattern: str
) -> None:
    for temperature, thinking in ((0, False), (1.5, True)):
        kwargs = {"enable_thinking": thinking, **({"thinking_budget": 6} if thinking else {})}
        more = {field: value, "chat_template_kwargs": kwargs}
        (choice,) = say(served, temperature=temperature, extra_body=more).choices
        assert re.fullmatch(pattern, choice.message.content)
        assert choice.finish_reason == "stop"
        assert bool(getattr(choice.message, "reasoning_content", None)) == thinking


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
