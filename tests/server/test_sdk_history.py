"""An answer that an SDK got goes back as history, in each form that the SDK gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputRefusal,
)
from pydantic import BaseModel

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve
from tests.server.fake_engine import FakeEngine, answer
from tests.server.wire_help import ARGUMENTS, CALL, WEATHER, WEATHER_SCHEMA

HI: Any = [{"role": "user", "content": "hi"}]
THINKING: Any = {"chat_template_kwargs": {"enable_thinking": True}}
SAID = {
    "text": "Let me see.\n</think>\n\nHere it is.",
    "call": f"Let me see.\n</think>\n\nHere it is. {CALL}",
}
FUNCTION = {"type": "function", **WEATHER["function"]}
TOOL: Any = {"name": "get_weather", "input_schema": WEATHER_SCHEMA}

FORMS: dict[str, Callable[[BaseModel], Any]] = {
    "object": lambda value: value,
    "dump": lambda value: value.model_dump(),
    "json": lambda value: value.model_dump(mode="json", by_alias=True),
    "no nulls": lambda value: value.model_dump(exclude_none=True),
    "to_dict": lambda value: value.to_dict(),  # type: ignore[attr-defined]
}


class Answering:
    """A served engine, and what it was asked last.

    Args:
        engine: that is served.
        url: of the server.
        tokenizer: the engine's.
    """

    def __init__(self, engine: FakeEngine, url: str, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.url = url
        self._tokenizer = tokenizer

    def prompt(self) -> str:
        ids = self.engine.submitted[-1].prompt_token_ids
        return b"".join(map(self._tokenizer.token_bytes, ids)).decode()

    def turn(self) -> str:
        """What the prompt has of the earlier answer."""
        return self.prompt().rpartition("<|im_start|>user\nAnd?")[0].rpartition("\nhi<|im_end|>")[2]


@pytest.fixture(scope="module", params=SAID)
def said(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(said: str, serve: Serve, tokenizer: Tokenizer) -> Iterator[Answering]:
    engine = FakeEngine(lambda request: answer(tokenizer.encode(SAID[said]))(request))
    with serve(engine) as client:
        yield Answering(engine, str(client.base_url), tokenizer)


@pytest.fixture(scope="module")
def sdk(served: Answering) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(served: Answering) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="k", max_retries=0) as made:
        yield made


def check(served: Answering, said: str) -> None:
    """The prompt has what the model said, and nothing else of the answer."""
    turn = served.turn()
    assert "Here it is." in turn
    assert ("<tool_call>" in turn) == (said == "call")
    assert ("Rome" in turn) == (said == "call")
    for word in ("parsed", "annotations", "refusal", "logprobs", "signature", "None", "null"):
        assert word not in turn


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["create", "parse", "stream"])
def test_chats(served: Answering, sdk: openai.OpenAI, said: str, how: str, form: str) -> None:
    tool = openai.pydantic_function_tool(get_weather) if how != "create" else WEATHER
    fields: Any = {"model": MODEL, "messages": HI, "tools": [tool], "extra_body": THINKING}
    if how == "create":
        message: Any = sdk.chat.completions.create(**fields).choices[0].message
    elif how == "parse":
        message = sdk.chat.completions.parse(**fields).choices[0].message
    else:
        with sdk.chat.completions.stream(**fields) as stream:
            message = stream.get_final_completion().choices[0].message
    assert message.reasoning_content == "Let me see."
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
        for call in message.tool_calls or ()
    ]
    assert len(results) == (said == "call")
    fields["messages"] = [*HI, FORMS[form](message), *results, {"role": "user", "content": "And?"}]
    sdk.chat.completions.create(**fields)
    check(served, said)


class get_weather(BaseModel):  # noqa: N801
    """The weather."""

    city: str


def test_the_sdks_notes_on_a_parsed_answer_are_not_in_the_prompt(
    served: Answering, sdk: openai.OpenAI
) -> None:
    call = {"name": "f", "arguments": ARGUMENTS, "parsed_arguments": {"city": "Paris"}}
    message: Any = {
        "role": "assistant",
        "content": '{"a": 1}',
        "parsed": {"a": 77},
        "tool_calls": [{"id": "c", "type": "function", "function": call}],
    }
    chat = [*HI, message, {"role": "tool", "tool_call_id": "c", "content": "x"}]
    sdk.chat.completions.create(model=MODEL, messages=[*chat, {"role": "user", "content": "And?"}])
    assert '{"a": 1}' in served.turn()
    assert "Rome" in served.turn()
    assert "77" not in served.turn()
    assert "Paris" not in served.turn()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["create", "parse", "stream"])
@pytest.mark.parametrize("summary", [False, True])
def test_responses(
    served: Answering, sdk: openai.OpenAI, said: str, how: str, summary: bool, form: str
) -> None:
    fields: Any = {"model": MODEL, "input": HI, "include": ["reasoning.encrypted_content"]}
    fields["reasoning"] = {"effort": "high", **({"summary": "auto"} if summary else {})}
    fields["tools"] = [FUNCTION]
    if how == "create":
        response: Any = sdk.responses.create(**fields)
    elif how == "parse":
        strict = {"type": "function", "name": "get_weather", "strict": True}
        fields["tools"] = [{**strict, "parameters": WEATHER_SCHEMA}]
        response = sdk.responses.parse(**fields)
    else:
        with sdk.responses.stream(**fields) as stream:
            response = stream.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    assert len(calls) == (said == "call")
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        for call in calls
    ]
    history = [FORMS[form](item) for item in response.output]
    fields["input"] = [*HI, *history, *results, {"role": "user", "content": "And?"}]
    sdk.responses.create(**fields)
    check(served, said)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["create", "parse", "stream", "beta"])
def test_messages(
    served: Answering, claude: anthropic.Anthropic, said: str, how: str, form: str
) -> None:
    fields: Any = {"model": MODEL, "messages": HI, "max_tokens": 99, "tools": [TOOL]}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 50}
    if how == "create":
        message: Any = claude.messages.create(**fields)
    elif how == "parse":
        message = claude.messages.parse(**fields)
    elif how == "beta":
        message = claude.beta.messages.create(**fields)
    else:
        with claude.messages.stream(**fields) as stream:
            message = stream.get_final_message()
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny."}
        for block in message.content
        if block.type == "tool_use"
    ]
    assert len(results) == (said == "call")
    blocks = [FORMS[form](block) for block in message.content]
    more = {"type": "text", "text": "And?"}
    fields["messages"] = [
        *HI,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [*results, more]},
    ]
    claude.messages.create(**fields)
    check(served, said)


CITED: Any = {
    "type": "url_citation",
    "url_citation": {"url": "http://x", "title": "t", "start_index": 0, "end_index": 1},
}
OF_OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "all nulls": (ChatCompletionMessage(role="assistant", content="Yes.").model_dump(), "Yes."),
    "OpenAI": ({"content": "Yes.", "refusal": None, "annotations": []}, "Yes."),
    "citations": ({"content": "Yes.", "annotations": [CITED]}, "Yes."),
    "refusal": ({"content": None, "refusal": "I won't.", "annotations": []}, "I won't."),
    "refusal part": ({"content": [{"type": "refusal", "refusal": "I won't."}]}, "I won't."),
    "vLLM": (
        {
            "content": "Yes.",
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": "Hm.",
        },
        "<think>\nHm.\n</think>\n\nYes.",
    ),
    "cut while thinking": ({"content": None, "reasoning": "Hm."}, "<think>\nHm.\n</think>\n\n"),
    "both names": (
        {"content": "Yes.", "reasoning": "Hm.", "reasoning_content": "Hm."},
        "<think>\nHm.\n</think>\n\nYes.",
    ),
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_chats_with_answers_of_other_servers(
    served: Answering, sdk: openai.OpenAI, name: str
) -> None:
    fields, told = OF_OTHERS[name]
    chat: Any = [*HI, {"role": "assistant", **fields}]
    sdk.chat.completions.create(model=MODEL, messages=chat)
    turn = served.prompt().partition("\nhi<|im_end|>\n<|im_start|>assistant\n")[2]
    assert turn.startswith(f"{told}<|im_end|>")
    assert "http://x" not in turn


def test_responses_with_a_call_of_openais(served: Answering, sdk: openai.OpenAI) -> None:
    fields: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    call = ResponseFunctionToolCall(**fields, id="i", caller={"type": "direct"}, **{"async": False})
    back: Any = {"type": "function_call_output", "call_id": "c", "output": "x", "caller": None}
    and_then: Any = {"role": "user", "content": "And?"}
    for item in (call, call.model_dump(by_alias=True)):
        sdk.responses.create(model=MODEL, input=[*HI, item, back, and_then])
        assert "direct" not in served.turn()
    program: Any = call.to_dict() | {"caller": {"type": "program", "caller_id": "p"}}
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]\.caller"):
        sdk.responses.create(model=MODEL, input=[*HI, program, back, and_then])


def test_responses_with_a_refusal(served: Answering, sdk: openai.OpenAI) -> None:
    part = ResponseOutputRefusal(type="refusal", refusal="I won't.")
    item = ResponseOutputMessage(
        id="m", type="message", role="assistant", status="completed", content=[part], phase=None
    )
    sdk.responses.create(
        model=MODEL, input=[*HI, item.model_dump(), {"role": "user", "content": "And?"}]
    )
    assert "<|im_start|>assistant\nI won't.<|im_end|>" in served.turn()


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"},
        "messages[0].reasoning: differs from reasoning_content",
    ),
    ({"role": "user", "content": "x", "annotations": []}, "messages[0].annotations: belongs to"),
    ({"role": "user", "content": "x", "refusal": "y"}, "messages[0].refusal: belongs to"),
    ({"role": "user", "content": [{"type": "refusal", "refusal": "y"}]}, "takes text only"),
    ({"role": "assistant", "content": [{"type": "refusal", "text": "y"}]}, '"refusal": "..."'),
    ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
    (
        {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}},
        "messages[0].function_call",
    ),
]


@pytest.mark.parametrize(("message", "told"), WRONG)
def test_what_is_refused(sdk: openai.OpenAI, message: Any, told: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model=MODEL, messages=[message])
    assert told in str(caught.value)


def test_a_refusal_in_a_wrong_form(sdk: openai.OpenAI) -> None:
    item: Any = {"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.content\[0\]"):
        sdk.responses.create(model=MODEL, input=[item])
