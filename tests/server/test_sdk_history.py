"""An answer that an SDK got can be sent back as history, in each form that the SDK gives it.

Answers of other servers are among the recorded exchanges.
"""

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve
from tests.support.wire_help import CALL, WEATHER_SCHEMA, prompt_of, saying

HI: Any = [{"role": "user", "content": "hi"}]
AND: Any = {"role": "user", "content": "And?"}
SAID = f"Let me see.\n</think>\n\nHere it is. {CALL}"
Form = Callable[[BaseModel], Any]
FORMS: dict[str, Form] = {
    "object": lambda value: value,
    "dump": lambda value: value.model_dump(),
    "json": lambda value: value.model_dump(mode="json", by_alias=True),
    "no nulls": lambda value: value.model_dump(exclude_none=True),
    "to_dict": lambda value: value.to_dict(),  # type: ignore[attr-defined]
}


class get_weather(BaseModel):  # noqa: N801
    """The weather."""

    city: str


def chat(sdk: openai.OpenAI, form: Form) -> None:
    chats: Any = sdk.chat.completions
    fields: Any = {"model": MODEL, "tools": [openai.pydantic_function_tool(get_weather)]}
    fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}
    message = chats.parse(messages=HI, **fields).choices[0].message
    assert message.reasoning_content == "Let me see."
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    chats.create(messages=[*HI, form(message), result, AND], **fields)


def response(sdk: openai.OpenAI, form: Form) -> None:
    fields: Any = {"model": MODEL, "include": ["reasoning.encrypted_content"]}
    fields["reasoning"] = {"effort": "high"}
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA}
    fields["tools"] = [tool | {"strict": True}]
    found = sdk.responses.parse(input=HI, **fields).output
    result = {"type": "function_call_output", "call_id": found[-1].call_id, "output": "Sunny."}
    sdk.responses.create(input=[*HI, *map(form, found), result, AND], **fields)


def message(claude: anthropic.Anthropic, form: Form) -> None:
    tool = {"name": "get_weather", "input_schema": WEATHER_SCHEMA}
    fields: Any = {"model": MODEL, "max_tokens": 99, "tools": [tool]}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 50}
    found = claude.messages.create(messages=HI, **fields).content
    result = {"type": "tool_result", "tool_use_id": found[-1].id, "content": "Sunny."}
    said = {"role": "assistant", "content": [form(block) for block in found]}
    asked = {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}
    claude.messages.create(messages=[*HI, said, asked], **fields)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_history(serve: Serve, tokenizer: Tokenizer, form: Form) -> None:
    engine = saying(tokenizer, SAID)
    with (
        serve(engine) as client,
        openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="k", max_retries=0) as sdk,
        anthropic.Anthropic(base_url=str(client.base_url), api_key="k", max_retries=0) as claude,
    ):
        for ask, api in ((chat, sdk), (response, sdk), (message, claude)):
            ask(api, form)  # type: ignore[arg-type]
            prompt = prompt_of(engine, tokenizer)
            # The prompt has the model's text and call, and nothing else of the answer.
            turn = prompt.rpartition("<|im_start|>user\nAnd?")[0].rpartition("\nhi<|im_end|>")[2]
            assert "Here it is." in turn and "<tool_call>" in turn and "Rome" in turn
            for word in ("parsed", "annotations", "refusal", "logprobs", "None", "null"):
                assert word not in turn
