"""Answers fit the SDKs' own types strictly, and their additional fields are known.

The recorded exchanges are checked without a server; the answers that they lack are requested.
"""

from typing import Any

import pytest
from openai.types import Completion
from pydantic import BaseModel, TypeAdapter

from tests.clients.shapes import CHAT, MESSAGES, RESPONSES, TYPES
from tests.server.test_exchanges import GROUPS, MASKED

# llama.cpp's and vLLM's fields, which clients read; the seed, to repeat a request; and fields of
# responses that other versions of the SDK have.
OURS = {"seed", "timings", "reasoning_content", "store", "name", "bytes"}
COMPLETION: Any = TypeAdapter(Completion)
PATHS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
RECORDED = [
    (group["said"], exchange)
    for group in GROUPS
    for exchange in group["exchanges"]
    if exchange["api"] in (*PATHS, "text") and {"whole", "stream"} & exchange.keys()
]


def unknown(value: Any) -> set[str]:
    """Returns the names of fields, at any depth, that the SDK's types don't have."""
    if isinstance(value, list):
        return set().union(*map(unknown, value)) if value else set()
    if not isinstance(value, BaseModel):
        return set()
    inner = [getattr(value, name) for name in type(value).model_fields]
    return set(value.model_extra or {}) | unknown(inner)


def check(value: Any) -> Any:
    """Validate again from JSON, without coercion, with the type that the SDK chose."""
    assert isinstance(value, BaseModel)
    assert unknown(value) <= OURS
    type(value).model_validate_json(value.model_dump_json(exclude_unset=True), strict=True)
    return value


def unmasked(value: Any) -> Any:
    """Returns a recorded answer with numbers in the place of masks."""
    if isinstance(value, list):
        return [unmasked(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    found = {key: unmasked(inner) for key, inner in value.items()}
    if found.get("usage") == "*":
        found["usage"] = {"input_tokens": 9, "output_tokens": 0}
    numbers = MASKED - {"system_fingerprint"} | {"completion_tokens", "total_tokens"}
    return found | {key: 0 for key in numbers if found.get(key) == "*"}


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_recorded_answers(number: int) -> None:
    said, exchange = RECORDED[number]
    whole, chunk = TYPES.get(PATHS.get(exchange["api"], ""), (COMPLETION, COMPLETION))
    answers = [exchange[how] for how in ("whole", "stream") if how in exchange]
    for body in unmasked([one for one in answers if isinstance(one, dict)]):
        if isinstance(body.get("status"), int):
            assert said.startswith("(") and body["error"]
        else:
            check(whole.validate_python(body))
    head: dict[str, Any] = {}
    for event in unmasked([event for one in answers if isinstance(one, list) for event in one]):
        if event == "[DONE]":
            continue
        if "error" in event or event.get("type") == "response.failed":
            assert said == "(fails later)"  # its code is our own
            continue
        if "choices" in event:
            # Fields that all chunks begin with are recorded only in the first one.
            event = head = head | event
        if chunk is COMPLETION:
            # The SDK uses one type for chunks and answers, which has no null for a later reason.
            for choice in event["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(chunk.validate_python(event))
