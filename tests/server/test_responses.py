"""OpenAI's responses: the wire as Codex and the SDK use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from mlx_mtp.errors import StepError
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import FakeEngine, out
from tests.server.wire_help import ARGUMENTS, CALL, WEATHER_SCHEMA, ask, events, saying

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA}
AGENT = f"I need Rome.\n</think>\n\nI look.\n{CALL}"
THINK = {"reasoning": {"effort": "high"}}


def response(client: Any, **fields: Any) -> dict[str, Any]:
    return ask(client, PATH, **{"input": "hi"} | fields)


def stream(client: Any, **fields: Any) -> list[dict[str, Any]]:
    found = events(client, PATH, **{"input": "hi"} | fields)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def prompt_of(engine: FakeEngine, tokenizer: Tokenizer) -> str:
    return b"".join(map(tokenizer.token_bytes, engine.submitted[-1].prompt_token_ids)).decode()


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return saying(tokenizer, "Hello there, é!")


@pytest.fixture(scope="module")
def client(serve: Serve, engine: FakeEngine) -> Iterator[Served]:
    with serve(engine) as client:
        yield client


def test_a_response(client: Served) -> None:
    body = response(client, temperature=0.5, metadata={"a": "b"})
    assert body["id"].startswith("resp_")
    assert body["object"] == "response"
    assert body["status"] == "completed"
    assert body["model"] == MODEL
    assert body["temperature"] == 0.5
    assert body["metadata"] == {"a": "b"}
    assert body["store"] is False
    (item,) = body["output"]
    assert item.pop("id").startswith("msg_")
    text = {"type": "output_text", "text": "Hello there, é!", "annotations": [], "logprobs": []}
    assert item == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 0
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0


def test_the_seed_is_told_and_taken(client: Served, engine: FakeEngine) -> None:
    chosen = response(client)["seed"]
    assert engine.submitted[-1].sampling.seed == chosen
    assert response(client)["seed"] != chosen
    assert response(client, seed=chosen)["seed"] == chosen
    assert engine.submitted[-1].sampling.seed == chosen
    found = stream(client, seed=-9)
    assert engine.submitted[-1].sampling.seed == -9
    for event in (found[0], found[-1]):
        assert event["response"]["seed"] == -9
    refused = client.post(PATH, json={"model": MODEL, "input": "hi", "seed": 1 << 63})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "seed"


def test_a_streamed_response(client: Served) -> None:
    found = stream(client)
    kinds = [event["type"] for event in found]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 3
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    last = found[-1]["response"]
    whole = response(client)
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert last["usage"] == whole["usage"]
    assert set(last) == set(whole)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"include": ["reasoning.encrypted_content"]},
        {"reasoning": {"effort": "high", "summary": "auto"}},
    ],
)
def test_reasoning_text_and_a_call(
    serve: Serve, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    with serve(saying(tokenizer, AGENT)) as client:
        fields = THINK | {"tools": [TOOL]} | fields
        body = response(client, **fields)
        thought, text, call = body["output"]
        summary = fields["reasoning"].get("summary")
        if summary:
            assert thought["summary"] == [{"type": "summary_text", "text": "I need Rome."}]
            assert "content" not in thought
        else:
            assert thought["content"] == [{"type": "reasoning_text", "text": "I need Rome."}]
            assert thought["summary"] == []
        assert ("encrypted_content" in thought) == ("include" in fields)
        assert text["content"][0]["text"] == "I look."
        assert call["call_id"].startswith("call_")
        assert (call["name"], call["arguments"]) == ("get_weather", ARGUMENTS)
        assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
        found = stream(client, **fields)
        assert without_ids(found[-1]["response"]["output"]) == without_ids(body["output"])
        for kind, key in (
            ("response.function_call_arguments", "arguments"),
            ("response.reasoning_summary_text" if summary else "response.reasoning_text", "text"),
            ("response.output_text", "text"),
        ):
            pieces = [event["delta"] for event in found if event["type"] == f"{kind}.delta"]
            (done,) = [event for event in found if event["type"] == f"{kind}.done"]
            assert "".join(pieces) == done[key]
        items = [e["item"] for e in found if e["type"] == "response.output_item.done"]
        assert items == found[-1]["response"]["output"]
        added = [e["item"]["id"] for e in found if e["type"] == "response.output_item.added"]
        assert added == [item["id"] for item in items]


def test_what_is_cut_is_incomplete(serve: Serve, tokenizer: Tokenizer) -> None:
    with serve(saying(tokenizer, CALL)) as client:
        limit = len(tokenizer.encode(CALL)) - 5
        body = response(client, tools=[TOOL], max_output_tokens=limit)
        assert body["status"] == "incomplete"
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        (item,) = body["output"]
        assert (item["type"], item["status"]) == ("function_call", "incomplete")
        assert ARGUMENTS.startswith(item["arguments"])
        found = stream(client, tools=[TOOL], max_output_tokens=limit)
        assert found[-1]["type"] == "response.incomplete"
        output = found[-1]["response"]["output"]
        assert without_ids(output) == without_ids([item])


def test_a_call_that_is_none_is_text(serve: Serve, tokenizer: Tokenizer) -> None:
    said = CALL.replace('"Rome"', "Rome")
    with serve(saying(tokenizer, said)) as client:
        (item,) = response(client, tools=[TOOL])["output"]
        assert (item["type"], item["status"]) == ("message", "completed")
        assert item["content"][0]["text"] == said
        # The stream had told its beginning.
        call, text = stream(client, tools=[TOOL])[-1]["response"]["output"]
        assert (call["type"], call["status"]) == ("function_call", "incomplete")
        assert text["content"] == item["content"]


def test_an_error_in_mid_stream_is_an_event(serve: Serve) -> None:
    failing = [out(40), out(finish="error", error=StepError("it broke"))]
    with serve(FakeEngine(lambda _: iter(failing))) as client:
        *_, last = stream(client)
        assert last["type"] == "response.failed"
        assert last["response"]["error"] == {"code": "step_failed", "message": "it broke"}


def test_a_codex_chat(client: Served, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """As Codex sends it: developer messages, ids, labels, hosted tools and a namespace."""
    seal = "mlx-mtp:" + "SSB0aGluay4="
    items = [
        {"type": "message", "id": "msg_1", "role": "developer", "content": parts("Rules.")},
        {"type": "message", "role": "developer", "content": parts("More ", "rules.")},
        {"type": "message", "role": "user", "content": parts("Do it.")},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal},
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "I do.", "annotations": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "f",
            "arguments": '{"a": 1}',
        },
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": parts("done too")},
    ]
    body = response(
        client,
        input=items,
        instructions="Be kind.",
        tools=[
            TOOL | {"strict": False},
            {"type": "namespace", "name": "agents", "description": "d", "tools": [TOOL]},
            {"type": "web_search", "external_web_access": False},
        ],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        client_metadata={"x-codex-turn-metadata": "{}", "turn": 1},
    )
    assert [tool["name"] for tool in body["tools"]] == ["get_weather"]
    text = prompt_of(engine, tokenizer)
    assert text.startswith("<|im_start|>system\nBe kind.\n\nRules.\n\nMore rules.\n\n# Tools")
    assert "agents" not in text
    assert (
        "<|im_start|>assistant\n<think>\nI think.\n</think>\n\nI do.\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>'
    ) in text
    assert "<tool_response>\ndone\n</tool_response>\n<tool_response>\ndone too\n" in text


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "input_text", "text": text} for text in texts]


def test_answers_that_follow_each_other_stay_apart(
    client: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
    said = {"role": "assistant", "content": "Well."}
    response(client, input=[{"role": "user", "content": "hi"}, call, result, call, said])
    text = prompt_of(engine, tokenizer)
    assert text.count("<|im_start|>assistant\n") == 4
    assert text.endswith("<|im_start|>assistant\nWell.<|im_end|>\n<|im_start|>assistant\n")


def test_reasoning_goes_round(client: Served, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    said = {"role": "assistant", "content": "Four."}
    for thought in (
        {"summary": [], "content": [{"type": "reasoning_text", "text": "I add."}]},
        {"summary": [{"type": "summary_text", "text": "I add."}]},
        {"summary": [], "encrypted_content": "mlx-mtp:SSBhZGQu"},
    ):
        items = [{"role": "user", "content": "hi"}, {"type": "reasoning", **thought}, said]
        response(client, input=items)
        assert "<think>\nI add.\n</think>\n\nFour." in prompt_of(engine, tokenizer)
    for foreign in ("gAAAA", "mlx-mtp:???"):
        items = [{"type": "reasoning", "summary": [], "encrypted_content": foreign}, said]
        response(client, input=items)
        assert "<think>" not in prompt_of(engine, tokenizer)


def test_forms_and_choices(client: Served, engine: FakeEngine) -> None:
    def grammar(**fields: Any) -> Any:
        response(client, **fields)
        return engine.submitted[-1].sampling.grammar

    schema = {"type": "json_schema", "name": "w", "schema": WEATHER_SCHEMA, "strict": True}
    spec = grammar(text={"format": schema})
    assert spec == GrammarSpec("json_schema", json.dumps(WEATHER_SCHEMA))
    assert grammar(text={"format": {"type": "json_object"}}) == GrammarSpec("json_object")
    assert grammar(text={"format": {"type": "text"}, "verbosity": "medium"}) is None
    named = {"type": "function", "name": "get_weather"}
    assert "get_weather" in grammar(tools=[TOOL], tool_choice=named).value
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    assert "get_weather" in grammar(tools=[TOOL], tool_choice=allowed).value
    both = grammar(tools=[TOOL], text={"format": schema})
    assert both.kind == "lark"
    assert "answer: %json" in both.value


def test_logprobs(client: Served) -> None:
    for fields in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        part = response(client, **fields)["output"][0]["content"][0]
        assert b"".join(bytes(e["bytes"]) for e in part["logprobs"]).decode() == part["text"]
        (done,) = [e for e in stream(client, **fields) if e["type"] == "response.output_text.done"]
        assert done["logprobs"] == part["logprobs"]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "required"),
    ({"input": []}, "input", "at least 1"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "function_call_output"),
    ({"input": [{"role": "bishop", "content": "x"}]}, "input[0].role", "'system'"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "'input_text'",
    ),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
    ({"conversation": "c"}, "conversation", "stores no responses"),
    ({"store": True}, "store", "only false"),
    ({"background": True}, "background", "only false"),
    ({"truncation": "auto"}, "truncation", '"disabled"'),
    ({"text": {"verbosity": "low"}}, "text.verbosity", '"medium"'),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "json_schema"),
    ({"include": ["file_search_call.results"]}, "include[0]", "reasoning.encrypted_content"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type", "'function'"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "'function'"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", '"function"'),
    ({"max_output_tokens": 5000}, "max_output_tokens", "1024 tokens"),
    ({"messages": []}, "messages", "not a parameter"),
]


@pytest.mark.parametrize(("fields", "param", "word"), BAD)
def test_bad_requests(client: Served, fields: dict[str, Any], param: str, word: str) -> None:
    answer = client.post(PATH, json={"model": MODEL, "input": "hi"} | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert word in error["message"]


def test_the_sdk(serve: Serve, tokenizer: Tokenizer) -> None:
    with (
        serve(saying(tokenizer, AGENT), api_keys=("k",)) as served,
        openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="k", max_retries=0) as sdk,
    ):
        fields: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": [TOOL], **THINK}
        whole = sdk.responses.create(**fields)
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        assert whole.output_text == "I look."
        with sdk.responses.stream(**fields) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        assert final.output_text == "I look."
        assert final.output[2].arguments == ARGUMENTS
        assert final.usage == whole.usage
