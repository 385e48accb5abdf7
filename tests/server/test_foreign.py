"""Parameters for other servers in all APIs: neutral, renamed, noted, or refused."""

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.grammar import JSON_WHITESPACE
from mlx_mtp.server.api.compat import ANY, MAX_IGNORED, MAX_NAME, NEUTRAL, REFUSED
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import library_tokenizer
from tests.server.test_cves import WIRE
from tests.server.test_metrics import samples
from tests.support.fake_engine import FakeEngine, answer
from tests.support.in_process import (
    CHAT,
    COUNT,
    GENERATING,
    GOOD,
    HI,
    IGNORED,
    MESSAGES,
    RESPONSES,
    TEXT,
    TOKENIZE,
    in_process,
)
from tests.support.wire_help import WEATHER, joined

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(answer([300]))


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with in_process(engine) as client:
        yield client


@pytest.fixture(scope="module")
def strict() -> Iterator[httpx.Client]:
    with in_process(unknown_parameters="error") as client:
        yield client


def placed(name: str, value: object) -> Fields:
    """Returns the fields of a chat with this value for the parameter."""
    fields: Fields = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [{**WEATHER, "function": {**WEATHER["function"]}}],
        "stream": "stream_options" in name,
        "stream_options": {} if "stream_options" in name else None,
        "structured_outputs": {"regex": "a"} if "structured_outputs" in name else None,
    }
    *places, key = name.split(".")
    inner: Any = fields
    if places[:1] == ["content[]"]:
        inner, places = fields["messages"][0], ["content[]"]
    elif "tool_calls[]" in places:
        call = {"id": "c", "function": {"name": "get_weather", "arguments": "{}"}}
        fields["messages"].insert(0, {"role": "assistant", "tool_calls": [call]})
    for place in places:
        inner = inner[place.removesuffix("[]")]
        inner = inner[0] if place.endswith("[]") else inner
    inner[key] = value
    return fields


@pytest.mark.parametrize("path", [*GENERATING, COUNT])
def test_neutral_values_pass_in_silence(
    client: httpx.Client, strict: httpx.Client, path: str
) -> None:
    # Each neutral value is sent in turn, with up to 40 parameters per request.
    needed = {"max_tokens"} if path in (MESSAGES, COUNT) else set()
    for turn in range(max(len(values) for values in NEUTRAL.values())):
        names = [name for name in NEUTRAL if "." not in name and name not in needed]
        for start in range(0, len(names), 40):
            given = {name: NEUTRAL[name] for name in names[start : start + 40]}
            fields = {name: values[turn % len(values)] for name, values in given.items()}
            fields = {name: "x" if value is ANY else value for name, value in fields.items()}
            for asked in (client, strict):
                response = asked.post(path, json=GOOD[path] | fields)
                assert response.status_code == 200, f"{fields} {response.text}"
                assert IGNORED not in response.headers


def test_neutral_values_within_objects(client: httpx.Client, strict: httpx.Client) -> None:
    for name, values in NEUTRAL.items():
        for value in values if "." in name else ():
            path, given = CHAT, "x" if value is ANY else value
            fields = placed(name, given) if not name.startswith("text.") else {}
            if not fields:
                path, fields = RESPONSES, {"text": {name.partition(".")[2]: given}}
            for asked in (client, strict):
                response = asked.post(path, json=GOOD[path] | fields)
                assert response.status_code == 200, f"{fields} {response.text}"
                assert IGNORED not in response.headers


def test_what_is_unknown_is_named_and_answered(client: httpx.Client, engine: FakeEngine) -> None:
    before = samples(client)
    nested = placed("messages[].mood", "sad") | {"top_speed": 3, "typical_p": 0.5}
    nested["tools"][0]["function"]["returns"] = {}
    nested["messages"][0]["content"][0]["lang"] = "en"
    names = {"top_speed", "typical_p", "messages[].mood", "tools[].function.returns"}
    for path, fields, expected in (
        (CHAT, nested, names | {"content[].lang"}),
        (CHAT, nested | {"stream": True}, names | {"content[].lang"}),
        (TEXT, {"top_speed": 1, "typical_p": 0.9}, {"top_speed", "typical_p"}),
        (TOKENIZE, {"top_speed": 1, "": 2}, {"top_speed", "?"}),
        (
            RESPONSES,
            {"text": {"verbosity": "low"}, "truncation": "auto"},
            {"text.verbosity", "truncation"},
        ),
        (
            RESPONSES,
            {"include": ["file_search_call.results"]},
            {"include[].file_search_call.results"},
        ),
        (MESSAGES, {"container_x": 1, "metadata": {"team": "a"}}, {"container_x", "metadata.team"}),
        (
            MESSAGES,
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            {"edits[].clear_tool_uses_20250919"},
        ),
        (COUNT, {"speed": "fast"}, {"speed"}),
    ):
        plain = client.post(
            path, json=GOOD[path] | {"stream": True} if "stream" in fields else GOOD[path]
        )
        response = client.post(path, json=GOOD[path] | fields)
        assert response.status_code == plain.status_code == 200, response.text
        assert set(response.headers[IGNORED].split(", ")) == expected
        assert IGNORED not in plain.headers
    counted = samples(client)
    name = "mlx_mtp:ignored_parameters_total{parameter=top_speed}"
    assert counted[name] - before.get(name, 0) == 4
    # An error has the header too; whatever a client writes, the header is one line of names.
    response = client.post(CHAT, json=GOOD[CHAT] | {"mood": 1, "temperature": -1})
    assert response.status_code == 400 and response.headers[IGNORED] == "mood"
    evil = {"a\r\nSet-Cookie: x": 1, "é" * 500: 2, **{f"n{i}": i for i in range(90)}}
    shown = client.post(CHAT, json=GOOD[CHAT] | evil).headers[IGNORED].split(", ")
    assert shown[0] == "a??Set-Cookie??x" and len(shown) == MAX_IGNORED
    assert max(map(len, shown)) == MAX_NAME
    for start in range(0, 400, 40):
        client.post(CHAT, json=GOOD[CHAT] | {f"n{i}": 1 for i in range(start, start + 15)})
    series = [
        name for name in samples(client) if name.startswith("mlx_mtp:ignored_parameters_total")
    ]
    assert len(series) <= 101


def test_the_flag_makes_it_an_error(strict: httpx.Client) -> None:
    for fields, param in (
        ({"top_speed": 1}, "top_speed"),
        (placed("messages[].mood", 1), "messages[0].mood"),
        (placed("content[].mood", 1), "messages[0].content"),
        ({"mirostat": 2}, "mirostat"),
    ):
        response = strict.post(CHAT, json=GOOD[CHAT] | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_make_an_answer_wrong_is_an_error(client: httpx.Client, name: str) -> None:
    paths = [CHAT] if "." in name else [p for p in WIRE if name not in WIRE[p].model_fields]
    assert paths, "all routes have it"
    for path in paths:
        fields = placed(name, ["x"]) if "." in name else {name: ["x"]}
        response = client.post(path, json=GOOD[path] | fields)
        assert response.status_code == 400
        assert REFUSED[name] in response.json()["error"]["message"]


# Other names on a route, and the field of SamplingParams that they set.
SAME: list[tuple[str, Fields, str, object]] = [
    (CHAT, {"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
    (CHAT, {"n_predict": 3}, "max_tokens", 3),
    (TEXT, {"max_completion_tokens": 3}, "max_tokens", 3),
    (RESPONSES, {"max_tokens": 3}, "max_tokens", 3),
    (TEXT, {"max_tokens": -1}, "max_tokens", 1023),
]


@pytest.mark.parametrize(("path", "fields", "name", "value"), SAME, ids=str)
def test_other_names(
    client: httpx.Client, engine: FakeEngine, path: str, fields: Fields, name: str, value: object
) -> None:
    response = client.post(path, json=GOOD[path] | fields)
    assert response.status_code == 200 and IGNORED not in response.headers, response.text
    assert getattr(engine.submitted[-1].sampling, name) == value


def test_names_that_contradict_each_other(client: httpx.Client) -> None:
    for fields, param in (
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"n_predict": 5, "max_new_tokens": 6, "max_tokens": None}, "max_new_tokens"),
        ({"enable_thinking": True, "reasoning": {"enabled": False}}, "enable_thinking"),
        ({"reasoning_effort": "low", "think": "high"}, "think"),
        ({"regex": "a", "json_schema": {}}, "regex"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
    ):
        response = client.post(CHAT, json=GOOD[CHAT] | fields)
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == param


def test_best_of_is_n(client: httpx.Client) -> None:
    for fields, count in (({"best_of": 2}, 2), ({"best_of": 2, "n": 2}, 2), ({"best_of": 1}, 1)):
        assert len(client.post(TEXT, json=GOOD[TEXT] | fields).json()["choices"]) == count
    for fields in ({"best_of": 3, "n": 2}, {"best_of": 0}):
        assert client.post(TEXT, json=GOOD[TEXT] | fields).status_code == 400


# Fields about thinking, whether the prompt opens a think block, and the budget.
WISHES: list[tuple[Fields, bool, int | None]] = [
    ({"enable_thinking": True}, True, None),
    ({"enable_thinking": False}, False, None),
    ({"thinking": True, "thinking_budget": 9}, True, 9),
    ({"thinking": {"type": "enabled", "budget_tokens": 7}}, True, 7),
    ({"thinking": {"type": "disabled"}}, False, None),
    ({"think": "low"}, True, 2048),
    ({"think": False}, False, None),
    ({"reasoning": {"effort": "none"}}, False, None),
    ({"reasoning": {"max_tokens": 5}}, True, 5),
    ({"reasoning": {"enabled": True, "exclude": True}}, True, None),
    ({"think": True, "reasoning_effort": "medium"}, True, None),
]


@pytest.mark.parametrize(("fields", "thinks", "budget"), WISHES, ids=str)
def test_thinking_by_any_name(
    client: httpx.Client, engine: FakeEngine, fields: Fields, thinks: bool, budget: int | None
) -> None:
    tokenizer = Tokenizer(library_tokenizer(), "")
    engine.script = answer(tokenizer.encode("Hm.\n</think>\n\nFour." if thinks else "Four."))
    response = client.post(CHAT, json=GOOD[CHAT] | fields)
    assert response.status_code == 200 and IGNORED not in response.headers, response.text
    chunks = client.post(CHAT, json=GOOD[CHAT] | fields | {"stream": True}).text
    streamed = [json.loads(line[6:]) for line in chunks.splitlines() if line.startswith("data: {")]
    message = response.json()["choices"][0]["message"]
    shown = thinks and "exclude" not in str(fields)
    assert message.get("reasoning_content") == ("Hm." if shown else None)
    assert joined(streamed)["reasoning_content"] == ("Hm." if shown else "")
    assert message["content"] == joined(streamed)["content"] == "Four."
    grammar = engine.submitted[-1].sampling.grammar
    assert (None if grammar is None else grammar.free_tokens) == budget


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "P", "schema": SCHEMA}}
GRAMMARS: list[tuple[Fields, str, object]] = [
    ({"regex": "a+"}, "regex", "a+"),
    ({"ebnf": 'root ::= "a"'}, "lark", 'root ::= "a"'),
    ({"grammar": 'root ::= "a"'}, "lark", 'root ::= "a"'),
    ({"grammar": {"type": "regex", "value": "a"}}, "regex", "a"),
    ({"grammar": {"type": "json", "value": SCHEMA}}, "json_schema", SCHEMA),
    ({"grammar": {"type": "json_schema", "value": {"schema": SCHEMA}}}, "json_schema", SCHEMA),
    ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
    ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
    # instructor (llama-cpp-python's form, and JSON_SCHEMA) and outlines.
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
    ({"response_format": FORM}, "json_schema", SCHEMA),
    ({"structured_outputs": {"regex": "([a-z]+)"}}, "regex", "([a-z]+)"),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
]


@pytest.mark.parametrize(("fields", "kind", "value"), GRAMMARS, ids=str)
def test_grammars_by_any_name(
    client: httpx.Client, engine: FakeEngine, fields: Fields, kind: str, value: object
) -> None:
    for path in (CHAT, TEXT):
        response = client.post(path, json=GOOD[path] | fields)
        assert response.status_code == 200 and IGNORED not in response.headers, response.text
        grammar = engine.submitted[-1].sampling.grammar
        assert grammar is not None and grammar.kind == kind
        assert (json.loads(grammar.value) if kind == "json_schema" else grammar.value) == value


def test_schemas_by_the_letter(client: httpx.Client, engine: FakeEngine) -> None:
    closed = {**SCHEMA, "additionalProperties": False}
    for given, expected, whitespace in (
        ({"disable_additional_properties": False}, SCHEMA, JSON_WHITESPACE),
        ({"disable_any_whitespace": False}, closed, JSON_WHITESPACE),
        ({"disable_any_whitespace": True}, closed, None),
        ({"whitespace_pattern": "[ ]?"}, closed, "[ ]?"),
    ):
        body = GOOD[CHAT] | {"structured_outputs": {"json": SCHEMA, **given}}
        assert client.post(CHAT, json=body).status_code == 200
        asked = json.loads(engine.submitted[-1].sampling.grammar.value)
        options = asked.pop("x-guidance")
        assert asked == expected
        assert options.get("whitespace_pattern") == whitespace


OPEN_WEBUI = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "hi", "id": "1f", "timestamp": 1763800000}],
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.0,
    "max_tokens": 128,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repeat_penalty": 1.1,
    "seed": 42,
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5,
    "tfs_z": 1,
    "num_ctx": 2048,
    "num_batch": 512,
    "num_keep": 24,
    "num_gpu": 1,
    "num_thread": 2,
    "use_mmap": True,
    "use_mlock": False,
    "keep_alive": "5m",
    "think": True,
    "stop": ["User:"],
    "logit_bias": {},
    "reasoning_effort": "medium",
    "chat_id": "c",
    "session_id": "s",
}


def test_open_webui_with_all_of_its_advanced_parameters(
    client: httpx.Client, engine: FakeEngine
) -> None:
    response = client.post(CHAT, json={"model": GOOD[CHAT]["model"], **OPEN_WEBUI})
    assert response.status_code == 200 and IGNORED not in response.headers, response.text
    sampling = engine.submitted[-1].sampling
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_tokens) == (1.1, 42, 128)


TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
ASKED: list[Fields] = [
    {"json_schema": {**SCHEMA, "properties": {"a": {"type": "string", "maxLength": 9}}}},
    {"regex": "[a-z]{3,9} [0-9]{2}", "enable_thinking": False},
    {"reasoning": {"max_tokens": 6}, "grammar": {"type": "regex", "value": "(yes|no)+"}},
    {"continue_final_message": True, "messages": [*HI, {"role": "assistant", "content": "The"}]},
    {"chat_template": TEMPLATE},
    {"repeat_penalty": 1.3, "mirostat": 0, "mood": "x"},
    # The reasoning contains the stop string, and goes on.
    {"reasoning": {"max_tokens": 20}, "stop": [" "]},
    {},
]


def test_the_same_tokens_with_mtp_and_without(
    demo_model: LoadedModel, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    found = []
    for depth in (0, 2):
        config = EngineConfig(num_draft_tokens=depth)
        engine: Any = build_engine(
            demo_model, config, tokenizer.vocab_size, tokenizer.eos_token_ids
        )
        with in_process(engine, request_chat_template=True) as client:
            story = {"messages": [{"role": "user", "content": "Tell me about Anna the fox."}]}
            more = {"max_tokens": 40, "seed": 3, "temperature": 0.8}
            bodies = [GOOD[CHAT] | story | more | fields for fields in ASKED]
            with ThreadPoolExecutor(len(bodies)) as pool:
                answers = list(pool.map(lambda b: client.post(CHAT, json=b).json(), bodies))
        found.append([each["choices"][0]["message"] for each in answers])
    assert found[0] == found[1]
    assert json.loads(found[0][0]["content"]).keys() == {"a"}
    assert " " in found[0][-2]["reasoning_content"] and " " not in found[0][-2]["content"]
