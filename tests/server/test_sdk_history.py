"""An answer that an SDK got goes back as history, in each form that the SDK gives it.

Answers of other servers are among the recorded exchanges.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve
from tests.server.fake_engine import FakeEngine, answer
from tests.server.wire_help import CALL, WEATHER, WEATHER_SCHEMA

HI: Any = [{"role": "user", "content": "hi"}]
AND: Any = {"role": "user", "content": "And?"}
THINKING: Any = {"chat_template_kwargs": {"enable_thinking": True}}
SAID = f"Let me see.\n</think>\n\nHere it is. {CALL}"
FORMS: dict[str, Callable[[BaseModel], Any]] = {
    "object": lambda value: value,
    "dump": lambda value: value.model_dump(),
    "json": lambda value: value.model_dump(mode="json", by_alias=True),
    "no nulls": lambda value: value.model_dump(exclude_none=True),
    "to_dict": lambda value: value.to_dict(),  # type: ignore[attr-defined]
}


def pairs(*ways: str) -> Any:
    """Each form and each way, not all of their pairs."""
    return pytest.mark.parametrize(("form", "how"), [*zip(FORMS, cycle(ways))])


class get_weather(BaseModel):  # noqa: N801
    """The weather."""

    city: str


@dataclass
class Answering:
    """A served engine, and the history that it was asked with last."""

    engine: FakeEngine
    sdk: openai.OpenAI
    claude: anthropic.Anthropic
    tokenizer: Tokenizer

    def check(self) -> None:
        """The prompt has what the model said, and nothing else of the answer."""
        ids = self.engine.submitted[-1].prompt_token_ids
        prompt = b"".join(map(self.tokenizer.token_bytes, ids)).decode()
        turn = prompt.rpartition("<|im_start|>user\nAnd?")[0].rpartition("\nhi<|im_end|>")[2]
        assert "Here it is." in turn
        assert "<tool_call>" in turn and "Rome" in turn
        for word in ("parsed", "annotations", "refusal", "logprobs", "signature", "None", "null"):
            assert word not in turn


@pytest.fixture(scope="module")
def served(serve: Serve, tokenizer: Tokenizer) -> Iterator[Answering]:
    engine = FakeEngine(answer(tokenizer.encode(SAID)))
    with serve(engine) as client:
        url = str(client.base_url)
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as sdk,
            anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as claude,
        ):
            yield Answering(engine, sdk, claude, tokenizer)


@pairs("create", "parse", "stream")
def test_chats(served: Answering, how: str, form: str) -> None:
    chats = served.sdk.chat.completions
    tool = openai.pydantic_function_tool(get_weather) if how != "create" else WEATHER
    fields: Any = {"model": MODEL, "messages": HI, "tools": [tool], "extra_body": THINKING}
    if how == "stream":
        with chats.stream(**fields) as stream:
            message: Any = stream.get_final_completion().choices[0].message
    else:
        message = getattr(chats, how)(**fields).choices[0].message
    assert message.reasoning_content == "Let me see."
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    chats.create(**fields | {"messages": [*HI, FORMS[form](message), result, AND]})
    served.check()


@pairs("create", "parse", "stream")
@pytest.mark.parametrize("summary", [{}, {"summary": "auto"}])
def test_responses(served: Answering, how: str, summary: dict[str, str], form: str) -> None:
    responses = served.sdk.responses
    fields: Any = {"model": MODEL, "input": HI, "include": ["reasoning.encrypted_content"]}
    fields["reasoning"] = {"effort": "high", **summary}
    strict = {"strict": True} if how == "parse" else {}
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA, **strict}
    fields["tools"] = [tool]
    if how == "stream":
        with responses.stream(**fields) as stream:
            response: Any = stream.get_final_response()
    else:
        response = getattr(responses, how)(**fields)
    result = {"type": "function_call_output", "output": "Sunny."}
    result["call_id"] = response.output[-1].call_id
    history = [FORMS[form](item) for item in response.output]
    responses.create(**fields | {"input": [*HI, *history, result, AND]})
    served.check()


@pairs("create", "parse", "stream", "beta")
def test_messages(served: Answering, how: str, form: str) -> None:
    claude = served.claude
    tool = {"name": "get_weather", "input_schema": WEATHER_SCHEMA}
    fields: Any = {"model": MODEL, "messages": HI, "max_tokens": 99, "tools": [tool]}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 50}
    if how == "stream":
        with claude.messages.stream(**fields) as stream:
            message: Any = stream.get_final_message()
    elif how == "beta":
        message = claude.beta.messages.create(**fields)
    else:
        message = getattr(claude.messages, how)(**fields)
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "Sunny."}
    blocks = [FORMS[form](block) for block in message.content]
    said = {"role": "assistant", "content": blocks}
    asked = {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}
    claude.messages.create(**fields | {"messages": [*HI, said, asked]})
    served.check()
