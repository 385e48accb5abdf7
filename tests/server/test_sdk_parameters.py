"""Every parameter that the SDKs' types have is acted on, or refused by its name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic.types.beta.message_create_params as anthropic_beta
import anthropic.types.message_count_tokens_params as anthropic_count
import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_text
import openai.types.responses.response_create_params as openai_responses
import pytest
from pydantic import ValidationError

from mlx_mtp.server.anthropic.wire import CountRequest, MessagesRequest
from mlx_mtp.server.fields import WireModel
from mlx_mtp.server.http_errors import from_validation
from mlx_mtp.server.openai.wire import ChatRequest, CompletionRequest
from mlx_mtp.server.responses.wire import ResponsesRequest
from tests.server.sdk_parameters import variants

TABLE = Path(__file__).parents[1] / "data" / "sdk_parameters.json"
MEANINGS = (
    "a label: it means nothing to a model, nor does OpenAI's or Anthropic's server act on it",
    "the one value that changes nothing",
    "a hint for another server's caches or scheduling",
    "a tool of OpenAI's servers, which Codex offers to every server: the model is not told of it",
)
"""Why a parameter has no effect; the others stand under the tests that show theirs."""
HI = [{"role": "user", "content": "hi"}]


# What a parameter makes no sense without.
COMPANIONS = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}


class Endpoint(NamedTuple):
    """What is probed: the SDK's type of a request, ours, and what is required."""

    kind: Any
    model: type[WireModel]
    smallest: dict[str, Any]


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(
        openai_chat.CompletionCreateParamsNonStreaming, ChatRequest, {"messages": HI}
    ),
    "/v1/completions": Endpoint(
        openai_text.CompletionCreateParamsNonStreaming, CompletionRequest, {"prompt": "hi"}
    ),
    "/v1/responses": Endpoint(
        openai_responses.ResponseCreateParamsNonStreaming, ResponsesRequest, {"input": "hi"}
    ),
    "/v1/messages": Endpoint(
        anthropic_beta.MessageCreateParamsNonStreaming,
        MessagesRequest,
        {"max_tokens": 9, "messages": HI},
    ),
    "/v1/messages/count_tokens": Endpoint(
        anthropic_count.MessageCountTokensParams, CountRequest, {"messages": HI}
    ),
}


def probes(endpoint: Endpoint) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each place, the parameter that it is in, and a request that differs there."""
    seen = set()
    for place, values in variants(endpoint.kind):
        name = place
        for sign in ".[(=":
            name = name.partition(sign)[0]
        # An empty object says nothing yet; what it may hold comes after it.
        if name in ("", "model") or place in seen or values[name] == {}:
            continue
        seen.add(place)
        # Responses have `top_logprobs` by themselves.
        has_companion = set(COMPANIONS.get(name, {})) <= set(endpoint.model.model_fields)
        more = COMPANIONS.get(name, {}) if has_companion else {}
        yield place, name, {"model": "m", **endpoint.smallest, **more, name: values[name]}


def accepted(endpoint: Endpoint) -> list[str]:
    """The places whose request is taken; that all others are refused by name is checked too."""
    found = []
    for place, name, body in probes(endpoint):
        try:
            endpoint.model.model_validate(body)
        except ValidationError as error:
            refused = from_validation(error)
            assert refused.status == 400
            assert (refused.param or "").startswith(name), f"{place}: {refused}"
            assert refused.param in str(refused), f"{place}: {refused}"
        else:
            found.append(place)
    return found


def means(place: str, prefix: str) -> bool:
    return place == prefix or (place.startswith(prefix) and place[len(prefix)] in ".[(=")


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_is_accepted_is_in_the_table_and_the_rest_is_refused_by_name(path: str) -> None:
    table = json.loads(TABLE.read_text("utf-8"))[path]
    places = accepted(ENDPOINTS[path])
    for meaning in table:
        assert meaning in MEANINGS or (TABLE.parents[2] / meaning).is_file()
    prefixes = [prefix for group in table.values() for prefix in group]
    assert len(prefixes) == len(set(prefixes))
    unknown = [place for place in places if not any(means(place, p) for p in prefixes)]
    assert not unknown, "accepted, but nobody has said what becomes of it"
    stale = [prefix for prefix in prefixes if not any(means(place, prefix) for place in places)]
    assert not stale, "in the table, but not accepted"
