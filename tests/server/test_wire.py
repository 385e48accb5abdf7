"""Request bodies, defaults and limits, beyond the recorded exchanges."""

import dataclasses
import json
import random
from typing import Any

import pytest
from pydantic import ValidationError

from mlx_mtp.errors import ContextLengthError, ModelError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.conversation import Message, ToolCall, folded
from mlx_mtp.server.fields import MAX_PROMPT_IDS, SAMPLING, Float
from mlx_mtp.server.openai.wire import ChatRequest, CompletionRequest
from mlx_mtp.server.params import RequestOptions, engine_requests, model_defaults, sampling_params

NEUTRAL = model_defaults({})


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "hi", **fields})


def sampled(
    body: ChatRequest, defaults: SamplingParams = NEUTRAL, seed: int | None = None
) -> SamplingParams:
    return sampling_params(body.options(), defaults, random.Random(seed), vocab_size=100)


def test_explicit_nulls_mean_absent_everywhere() -> None:
    nulls = dict.fromkeys(ChatRequest.model_fields)
    del nulls["model"], nulls["messages"]
    message = {"role": "user", "content": "hi", "tool_calls": None, "refusal": None}
    assert chat(messages=[message], **nulls) == chat()
    tool = {"type": "function", "function": {"name": "f", "strict": None, "parameters": None}}
    (tool,) = chat(tools=[tool]).conversation().offered_tools
    assert tool.for_template() == {"type": "function", "function": {"name": "f"}}


def test_every_sampling_parameter_is_a_field_and_reaches_the_sampler() -> None:
    known = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert set(known) - set(SAMPLING) == {"choice", "grammar", "top_logprobs"}
    others = {"logit_bias": ({"5": 1.5}, ((5, 1.5),)), "stop_token_ids": ([9], (9,))}
    others["ignore_eos"] = (True, True)
    for name, kind in SAMPLING.items():
        number = 0.5 if kind is Float else 3
        given, expected = others.get(name, (number, number))
        assert getattr(sampled(chat(**{name: given})), name) == expected != known[name]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [*((text, text) for text in ("not json", "[1]", "3", "[" * 100_000)), ("", {}), (" \n", {})],
)
def test_arguments_that_are_no_object(arguments: str, read: Any) -> None:
    """Text stays as it is; no text at all is an object without fields."""
    message = Message("assistant", tool_calls=(ToolCall("f", arguments),))
    (call,) = message.for_template()["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": read}
    (call,) = message.for_template(as_object=True)["tool_calls"]
    assert call["function"]["arguments"] == ({"arguments": read} if read else {})


def test_system_messages_are_folded_where_they_stand() -> None:
    said = Message("assistant", "a")
    chat = [*(Message("system", t) for t in "sd"), Message("user", "u"), Message("system", "t")]
    assert folded([*chat, said, Message("system", "v")]) == [
        Message("system", "s\n\nd"),
        Message("user", "u\n\nt"),
        said,
        Message("user", "v"),
    ]


@pytest.mark.parametrize("ids", [["x"], [1]])
def test_a_prompt_of_too_many_ids_is_refused_by_their_number(ids: list[Any]) -> None:
    many = ids * (MAX_PROMPT_IDS + 1)
    for prompt in ([many], [[1], many]):
        with pytest.raises(ValidationError, match=f"{MAX_PROMPT_IDS + 1} token ids; at most"):
            completion(prompt=prompt)


def test_both_names_of_max_tokens_and_both_ways_to_ask_for_logprobs() -> None:
    names = ("max_tokens", "max_completion_tokens")
    for given in (names[:1], names[1:], names):
        assert chat(**dict.fromkeys(given, 3)).options().sampling["max_tokens"] == 3
    wanted = [chat(), chat(logprobs=True), chat(logprobs=True, top_logprobs=5), completion()]
    assert [body.options().sampling.get("top_logprobs") for body in wanted] == [None, 0, 5, None]
    assert completion(logprobs=0).options().sampling["top_logprobs"] == 0


def test_the_models_defaults_apply_and_the_request_wins() -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "eos_token_id": [1]}
    params = sampled(chat(top_k=5, temperature=0), model_defaults(config))
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.95, 5, 0.0)
    assert model_defaults({"do_sample": False, "temperature": 0.6}).temperature == 0.0
    assert model_defaults({}) == SamplingParams(max_tokens=1)
    # vLLM's way to say "all".
    assert sampled(chat(top_k=-1), model_defaults(config)).top_k == 0
    assert model_defaults({"top_k": -1}).top_k == 0


@pytest.mark.parametrize(
    "config", [{"temperature": -1}, {"top_p": "x"}, {"top_k": 1.5}, {"top_k": -2}]
)
def test_defaults_that_make_no_sense_are_an_error_of_the_model(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        model_defaults(config)


def test_each_prompt_and_choice_is_a_request_of_its_own() -> None:
    options = completion(prompt=[[1], [2, 3]], n=2, max_tokens=5).options()
    requests = engine_requests("id", [(1,), (2, 3)], NEUTRAL, options, 10, client=("me",))
    assert [r.request_id for r in requests] == ["id-0", "id-1", "id-2", "id-3"]
    assert [r.prompt_token_ids for r in requests] == [(1,), (1,), (2, 3), (2, 3)]
    assert [r.sampling.choice for r in requests] == [0, 1, 0, 1]
    assert {(r.sampling.seed, r.sampling.max_tokens, r.client) for r in requests} == {
        (0, 5, ("me",))
    }


def test_the_answer_gets_the_room_that_is_left() -> None:
    def room(prompt: int, wanted: int | None = None, *, cut: bool = False) -> int:
        sampling = {} if wanted is None else {"max_tokens": wanted}
        return RequestOptions(sampling, cut_to_context=cut).room(prompt, 10)

    assert room(3) == room(3, 7) == room(3, 9, cut=True) == 7
    assert room(3, 6) == room(3, 6, cut=True) == 6
    with pytest.raises(ContextLengthError, match=r"10 tokens, but 11 .* 3 .* 8"):
        room(3, 8)
    for cut in (False, True):
        with pytest.raises(ContextLengthError, match=r"10 tokens.*10 tokens"):
            room(10, cut=cut)


def test_seeds_are_repeatable_and_exact_in_a_double() -> None:
    seeds = [sampled(chat(), seed=number).seed for number in (*range(50), *range(50))]
    assert seeds[:50] == seeds[50:]
    assert len(set(seeds)) == 50
    assert all(json.loads(str(seed)) == float(seed) for seed in seeds)
