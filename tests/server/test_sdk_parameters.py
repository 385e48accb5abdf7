"""Every parameter of the SDKs' types has an effect, is neutral, or is named in an error."""

import collections.abc
import io
import json
import os
import re
import typing
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, is_typeddict

import anthropic.types.beta.message_create_params as anthropic_beta
import anthropic.types.message_count_tokens_params as anthropic_count
import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_text
import openai.types.responses.response_create_params as openai_responses
import pytest
import typing_extensions
from pydantic import BaseModel, ValidationError

from mlx_mtp.server.api.anthropic.protocol import CountRequest, MessagesRequest
from mlx_mtp.server.api.compat import NEUTRAL
from mlx_mtp.server.api.openai.protocol import ChatRequest, CompletionRequest
from mlx_mtp.server.api.responses.protocol import ResponsesRequest
from mlx_mtp.server.api.schema import WireModel
from mlx_mtp.server.http.errors import from_validation

TABLE = Path(__file__).parents[1] / "data" / "sdk_parameters.json"
MEANINGS = (
    "a label: it means nothing to a model, nor does OpenAI's or Anthropic's server act on it",
    "the one value that changes nothing",
    "a hint for another server's caches or scheduling",
    "a tool of OpenAI's servers, which Codex offers to every server: the model is not told of it",
)
"""Why a parameter has no effect; the others stand under the tests that show theirs."""
HI = [{"role": "user", "content": "hi"}]


# Other fields that a parameter requires.
COMPANIONS = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}


_REQUIRED = (typing.Required, typing_extensions.Required)
_WRAPPERS = (*_REQUIRED, typing.NotRequired, typing.Annotated)
_FILES = (typing.IO[bytes], io.IOBase, os.PathLike, datetime)
_PLAIN: dict[Any, tuple[Any, ...]] = {
    str: ("x",),
    int: (1,),
    float: (0.5,),
    bool: (True, False),
    object: ({},),
    Any: ({},),
}
_UNIONS = (Union, type(int | str))
_LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)

Variant = tuple[str, Any]
"""Where a value differs from the smallest one, and the value."""


def variants(kind: Any, path: str = "", inside: tuple[Any, ...] = ()) -> Iterator[Variant]:
    """Yields paths and values of a type; of an object the smallest one, then each key, each form.

    A path has keys, `[]` for a list's item, `(kind)` for an object's `type`, and `=value` for one
    of a few values; `inside` are the object types that contain this one.
    """
    origin = get_origin(kind)
    if origin in _WRAPPERS:
        yield from variants(get_args(kind)[0], path, inside)
    elif origin in (Literal, typing_extensions.Literal):
        yield from ((f"{path}={str(value).lower()}", value) for value in get_args(kind))
    elif origin in _UNIONS:
        for member in get_args(kind):
            yield from variants(member, path, inside)
    elif is_typeddict(kind) or typing_extensions.is_typeddict(kind):
        if kind not in inside:
            yield from _objects(kind, path, (*inside, kind))
    elif kind is type(None) or kind in _FILES or origin is os.PathLike or _is_answer(kind):
        return  # nulls are tested elsewhere; the others look different in JSON
    elif kind in _PLAIN:
        for value in _PLAIN[kind]:
            yield (f"{path}={str(value).lower()}" if kind is bool else path), value
    elif origin is dict or kind is dict:
        inner = get_args(kind)[1] if get_args(kind) else object
        yield from ((path, {"key": value}) for _, value in variants(inner, path, inside))
    elif get_args(kind):
        assert origin in _LISTS or "Sequence" in str(origin), f"{path}: what is {kind}?"
        item = get_args(kind)[0]
        yield from ((place, [value]) for place, value in variants(item, f"{path}[]", inside))
    else:
        raise AssertionError(f"{path}: what is {kind}?")


def _objects(kind: Any, path: str, inside: tuple[Any, ...]) -> Iterator[Variant]:
    # Not `__required_keys__`, which ignores annotations that are still strings.
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    smallest = {}
    for key, hint in hints.items():
        if get_origin(hint) in _REQUIRED:
            first = next(variants(hint, "", inside), None)
            if first is None:
                return
            smallest[key] = first[1]
    tag = smallest.get("type", smallest.get("role"))
    place = f"{path}({tag})" if isinstance(tag, str) and path else path
    yield place, smallest
    for key, hint in hints.items():
        for inner, value in variants(hint, f"{place}.{key}".lstrip("."), inside):
            if key not in ("type", "role") or value != tag:
                yield inner, smallest | {key: value}


def _is_answer(kind: Any) -> bool:
    """True for a part of an answer: types of requests include it, as it can be sent back."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


class Endpoint(NamedTuple):
    """The SDK's type of a request, ours, and the required fields."""

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
    """Yields each place, the parameter that contains it, and a request that differs there."""
    seen = set()
    for place, values in variants(endpoint.kind):
        name = place
        for sign in ".[(=":
            name = name.partition(sign)[0]
        # An empty object tests nothing; its possible contents come after it.
        if name in ("", "model") or place in seen or values[name] == {}:
            continue
        seen.add(place)
        # Responses accept `top_logprobs` without another field.
        has_companion = set(COMPANIONS.get(name, {})) <= set(endpoint.model.model_fields)
        more = COMPANIONS.get(name, {}) if has_companion else {}
        yield place, name, {"model": "m", **endpoint.smallest, **more, name: values[name]}


def accepted(endpoint: Endpoint) -> list[str]:
    """Returns the places whose request is accepted; checks that all others are refused by name."""
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


def is_neutral(place: str) -> bool:
    """True if the server's own table of neutral values has the parameter."""
    name = re.sub(r"\([^)]*\)|=.*", "", place)
    return any(means(name.partition("messages[].")[2] or name, each) for each in NEUTRAL)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_is_accepted_is_in_the_table_and_the_rest_is_refused_by_name(path: str) -> None:
    table = json.loads(TABLE.read_text("utf-8"))[path]
    places = accepted(ENDPOINTS[path])
    for meaning in table:
        assert meaning in MEANINGS or (TABLE.parents[2] / meaning).is_file()
    prefixes = [prefix for group in table.values() for prefix in group]
    assert len(prefixes) == len(set(prefixes))
    unknown = [
        place
        for place in places
        if not is_neutral(place) and not any(means(place, p) for p in prefixes)
    ]
    assert not unknown, "accepted, but nobody has said what becomes of it"
    stale = [prefix for prefix in prefixes if not any(means(place, prefix) for place in places)]
    assert not stale, "in the table, but not accepted"
