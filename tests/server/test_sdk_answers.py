"""Answers and events are what the SDKs' own types say, strictly, and what is more is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai.types import Completion
from pydantic import BaseModel

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve
from tests.server.fake_engine import FakeEngine, answer
from tests.server.wire_help import CALL, WEATHER, WEATHER_SCHEMA

THOUGHT = "Let me see.\n</think>\n\nHere it is. "
SAID = THOUGHT + CALL
HI: Any = [{"role": "user", "content": "hi"}]
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
# llama.cpp's and vLLM's fields, which clients read; the seed, to ask for the same again; and those
# of responses that other versions of the SDK have.
OURS = {"seed", "timings", "reasoning_content", "store", "name", "bytes"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "call": {"tools": True},
    "logprobs": {"logprobs": True},
    "cut": {"length": 3},
}


@pytest.fixture(scope="module")
def url(serve: Serve, tokenizer: Tokenizer) -> Iterator[str]:
    def script(request: Any) -> Any:
        return answer(tokenizer.encode(SAID))(request)

    with serve(FakeEngine(script)) as client:
        yield str(client.base_url)


@pytest.fixture(scope="module")
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="k", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=url, api_key="k", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def unknown(value: Any) -> set[str]:
    """The names of fields, at any depth, that the SDK's types don't have."""
    if isinstance(value, list):
        return set().union(*map(unknown, value)) if value else set()
    if not isinstance(value, BaseModel):
        return set()
    inner = [getattr(value, name) for name in type(value).model_fields]
    return set(value.model_extra or {}) | unknown(inner)


def check(value: Any) -> Any:
    """Validate once more, from JSON and without coercion, by the type that the SDK chose."""
    assert isinstance(value, BaseModel)
    assert unknown(value) <= OURS
    type(value).model_validate_json(value.model_dump_json(exclude_unset=True), strict=True)
    return value


def collect(stream: Any) -> list[Any]:
    with stream:
        return [check(event) for event in stream]


@pytest.mark.parametrize("case", CASES)
def test_chats(sdk: openai.OpenAI, case: str) -> None:
    asked = CASES[case]
    fields: dict[str, Any] = {"extra_body": THINKING}
    if "tools" in asked:
        fields["tools"] = [WEATHER]
    if "logprobs" in asked:
        fields |= {"logprobs": True, "top_logprobs": 2}
    if "length" in asked:
        fields["max_tokens"] = asked["length"]
    create = sdk.chat.completions.create
    whole = check(create(model=MODEL, messages=HI, **fields))
    reason = {"call": "tool_calls", "cut": "length"}.get(case, "stop")
    assert whole.choices[0].finish_reason == reason
    options: Any = {"include_usage": True}
    chunks = collect(
        create(model=MODEL, messages=HI, stream=True, stream_options=options, **fields)
    )
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == reason


def test_stored_chats(sdk: openai.OpenAI) -> None:
    chats = sdk.chat.completions
    made = chats.create(model=MODEL, messages=HI, store=True, tools=[WEATHER])
    for stored in (chats.retrieve(made.id), chats.update(made.id, metadata={"a": "b"})):
        check(stored)
    for listed in chats.list():
        check(listed)
    check(chats.delete(made.id))


@pytest.mark.parametrize("logprobs", [None, 2])
def test_completions(sdk: openai.OpenAI, logprobs: int | None) -> None:
    fields: Any = {"model": MODEL, "prompt": ["hi", "ho"], "n": 2, "logprobs": logprobs}
    assert len(check(sdk.completions.create(**fields)).choices) == 4
    # The SDK has one type for answers and chunks, and no null for the reason that is still to come.
    with sdk.completions.with_streaming_response.create(**fields, stream=True) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    ended = 0
    for line in lines:
        chunk = json.loads(line)
        (choice,) = chunk["choices"]
        ended += choice["finish_reason"] == "stop"
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(Completion.model_validate(chunk))
    assert ended == 4


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("case", CASES)
def test_responses(sdk: openai.OpenAI, case: str, summary: Any) -> None:
    asked = CASES[case]
    reasoning = {"effort": "high", **({"summary": summary} if summary else {})}
    fields: dict[str, Any] = {"reasoning": reasoning, "include": ["reasoning.encrypted_content"]}
    if "tools" in asked:
        fields["tools"] = [{"type": "function", **WEATHER["function"]}]
    if "logprobs" in asked:
        fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if "length" in asked:
        fields["max_output_tokens"] = asked["length"]
    whole = check(sdk.responses.create(model=MODEL, input="hi", **fields))
    events = collect(sdk.responses.create(model=MODEL, input="hi", stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert [item.type for item in last.response.output] == [item.type for item in whole.output]
    assert sdk.responses.create(model=MODEL, input="hi", extra_body={"seed": 4}).seed == 4
    assert isinstance(last.response.seed, int)
    kinds = {event.type for event in events}
    assert ("response.function_call_arguments.done" in kinds) == (case == "call")
    thought = "summary_text" if summary else "text"
    assert f"response.reasoning_{thought}.delta" in kinds


@pytest.mark.parametrize("case", CASES)
def test_messages(claude: anthropic.Anthropic, case: str) -> None:
    asked = CASES[case]
    fields: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 99}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 50}
    if "tools" in asked:
        fields["tools"] = [{"name": "get_weather", "input_schema": WEATHER_SCHEMA}]
    if "length" in asked:
        fields["max_tokens"] = asked["length"]
    whole = check(claude.messages.create(**fields))
    assert whole.stop_reason == {"call": "tool_use", "cut": "max_tokens"}.get(case, "end_turn")
    events = collect(claude.messages.create(**fields, stream=True))
    assert [event.type for event in (events[0], *events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[-2].delta.stop_reason == whole.stop_reason
    with claude.messages.stream(**fields) as stream:
        final = check(stream.get_final_message())
    assert isinstance(final.seed, int)
    assert claude.messages.create(**fields, extra_body={"seed": 4}).seed == 4
    assert [block.type for block in final.content] == [block.type for block in whole.content]


def test_the_rest(sdk: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    check(claude.messages.count_tokens(model=MODEL, messages=HI))
    for model in (*sdk.models.list(), sdk.models.retrieve(MODEL), *claude.models.list()):
        assert model.id == MODEL
        names = {"max_model_len", "type", "display_name", "created_at", "lifecycle"}
        names.add("max_input_tokens")
        assert unknown(model) <= names | {"object", "created", "owned_by"}
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.create(model=MODEL, input="hi", temperature=-1)
    body = json.loads(caught.value.response.content)["error"]
    assert set(body) == {"message", "type", "param", "code"}
