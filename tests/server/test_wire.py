"""Request bodies: what is accepted, how it is understood, and how defaults and limits apply."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from mlx_mtp.errors import ContextLengthError, InvalidRequestError, ModelError
from mlx_mtp.server.conversation import folded
from mlx_mtp.server.fields import MAX_PROMPT_IDS
from mlx_mtp.server.openai.wire import ChatRequest, CompletionRequest
from mlx_mtp.server.options import Options
from mlx_mtp.server.params import (
    SamplingDefaults,
    SeedSource,
    engine_requests,
    room,
    sampling_params,
)
from tests.server.fake_engine import FakeInfo

PLAIN = SamplingDefaults()


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "hi", **fields})


def for_template(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    body = chat(messages=list(messages))
    return [message.for_template() for message in folded(body.conversation().messages)]


def tools_for_template(**fields: Any) -> list[dict[str, Any]]:
    return [tool.for_template() for tool in chat(**fields).conversation().offered_tools]


def test_explicit_nulls_mean_absent_everywhere() -> None:
    nulls = dict.fromkeys(ChatRequest.model_fields)
    del nulls["model"], nulls["messages"]
    message = {"role": "user", "content": "hi", "tool_calls": None, "refusal": None}
    assert chat(messages=[message], **nulls) == chat()
    tool = {"type": "function", "function": {"name": "f", "strict": None, "parameters": None}}
    assert tools_for_template(tools=[tool]) == [{"type": "function", "function": {"name": "f"}}]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert for_template({"role": "user", "content": parts})[0]["content"] == "ab"


def test_developer_is_the_templates_system() -> None:
    assert for_template({"role": "developer", "content": "x"}) == [
        {"role": "system", "content": "x"}
    ]


def test_system_messages_are_folded_where_they_stand() -> None:
    def system(text: str) -> dict[str, Any]:
        return {"role": "system", "content": text}

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    said = {"role": "assistant", "content": "a"}
    developer = {"role": "developer", "content": "d"}
    assert for_template(system("s"), developer, user("u"), system("t"), said, system("v")) == [
        system("s\n\nd"),
        user("u\n\nt"),
        said,
        user("v"),
    ]


def test_tool_calls_come_with_their_arguments_parsed() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"}
    result = {"role": "tool", "tool_call_id": "1", "content": "2", "name": "f"}
    first, second = for_template(answer, result)
    assert first["content"] == ""
    assert first["reasoning_content"] == "so"
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert second == {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"}


@pytest.mark.parametrize("arguments", ["not json", "[1]", "3", "[" * 100_000])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = for_template({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("arguments", ["", " \n", "{}"])
def test_no_arguments_are_an_object_without_fields(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = for_template({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_a_tools_schema_is_passed_on_whole() -> None:
    schema = {"type": "object", "properties": {"x": {"default": None}}, "required": []}
    function = {"parameters": schema, "description": "d", "name": "f", "strict": True}
    (tool,) = tools_for_template(tools=[{"type": "function", "function": function}])
    assert tool["function"] == {"name": "f", "description": "d", "parameters": schema}
    assert list(tool["function"]) == ["name", "description", "parameters"]


def test_tool_choice_none_drops_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tools_for_template(tools=tools, tool_choice="none") == []


def test_labels_and_neutral_values_are_accepted() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        safety_identifier="s",
        store=False,
        modalities=["text"],
        verbosity="medium",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        tool_choice="auto",
        n=1,
    )
    completion(best_of=1, echo=False, suffix="")
    completion(best_of=3, n=3)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts_have_four_forms(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize("ids", [["x"], [1]])
def test_a_prompt_of_too_many_ids_is_refused_by_their_number(ids: list[Any]) -> None:
    many = ids * (MAX_PROMPT_IDS + 1)
    for prompt in ([many], [[1], many]):
        with pytest.raises(ValidationError, match=f"{MAX_PROMPT_IDS + 1} token ids; at most"):
            completion(prompt=prompt)


def test_stop_may_be_one_string_or_a_list() -> None:
    assert chat(stop="x").stop == ["x"]
    assert chat(stop=["x", "y"]).stop == ["x", "y"]
    assert chat(stop=[]).stop == chat(stop=None).stop == []


@pytest.mark.parametrize("field", ["n", "seed", "top_k", "max_tokens", "temperature", "top_p"])
def test_a_boolean_is_no_number(field: str) -> None:
    with pytest.raises(ValidationError):
        chat(**{field: True})


def test_both_names_of_max_tokens_mean_the_same() -> None:
    assert chat(max_tokens=3).answer_tokens == 3
    assert chat(max_completion_tokens=3).answer_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=3).answer_tokens == 3


def test_logprobs_of_both_endpoints() -> None:
    assert chat().wanted_logprobs is None
    assert chat(logprobs=True).wanted_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).wanted_logprobs == 5
    assert chat(logprobs=False).wanted_logprobs is None
    assert completion().wanted_logprobs is None
    assert completion(logprobs=0).wanted_logprobs == 0


def test_every_parameter_reaches_the_sampler() -> None:
    body = chat(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={"5": -100, "17": 1.5},
        stop_token_ids=[9],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=2,
    )
    params = sampling_params(body.options(), PLAIN, seed=11, vocab_size=100)
    assert params.max_tokens == 7
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.1)
    assert params.repetition_penalty == 1.1
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, -0.3)
    assert params.logit_bias == ((5, -100.0), (17, 1.5))
    assert params.stop_token_ids == (9,)
    assert params.ignore_eos
    assert params.top_logprobs == 2
    assert params.seed == 11


def test_the_models_defaults_apply_and_the_request_wins() -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "eos_token_id": [1]}
    defaults = SamplingDefaults.from_generation_config(config)
    params = sampling_params(
        chat(top_k=5, temperature=0).options(), defaults, seed=0, vocab_size=10
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.95, 5, 0.0)


def test_do_sample_false_means_greedy() -> None:
    config = {"do_sample": False, "temperature": 0.6}
    assert SamplingDefaults.from_generation_config(config).temperature == 0.0
    assert SamplingDefaults.from_generation_config({}).temperature == 1.0


def test_a_top_k_of_minus_1_keeps_all_tokens_as_in_vllm() -> None:
    few = SamplingDefaults(top_k=20)
    for value in (-1, 0):
        params = sampling_params(chat(top_k=value).options(), few, seed=0, vocab_size=10)
        assert params.top_k == 0
        assert not params.truncates
    assert SamplingDefaults.from_generation_config({"top_k": -1}).top_k == 0
    with pytest.raises(ModelError, match="top_k"):
        SamplingDefaults.from_generation_config({"top_k": -2})


@pytest.mark.parametrize("config", [{"temperature": -1}, {"top_p": "x"}, {"top_k": 1.5}])
def test_defaults_that_make_no_sense_are_an_error_of_the_model(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        SamplingDefaults.from_generation_config(config)


@pytest.mark.parametrize("key", ["", "x", "-1", "01", " 1", "1.0", "²", "99999999999", "1" * 5000])
def test_logit_bias_keys_are_token_ids(key: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sampling_params(chat(logit_bias={key: 1}).options(), PLAIN, seed=0, vocab_size=10)
    assert caught.value.param == "logit_bias"


def test_each_prompt_and_choice_is_a_request_of_its_own() -> None:
    body = completion(prompt=[[1], [2, 3]], n=2, max_tokens=5)
    params = sampling_params(body.options(), PLAIN, seed=4, vocab_size=10)
    requests = engine_requests(
        "id", [(1,), (2, 3)], params, body.options(), FakeInfo(max_model_len=10)
    )
    assert [r.request_id for r in requests] == ["id-0", "id-1", "id-2", "id-3"]
    assert [r.prompt_token_ids for r in requests] == [(1,), (1,), (2, 3), (2, 3)]
    assert [r.sampling.choice for r in requests] == [0, 1, 0, 1]
    assert {r.sampling.seed for r in requests} == {4}


def test_the_answer_gets_the_room_that_is_left() -> None:
    assert room(3, Options(), 10) == 7
    assert room(3, Options(max_tokens=7), 10) == 7
    assert room(3, Options(max_tokens=9, cut_to_context=True), 10) == 7
    with pytest.raises(ContextLengthError, match=r"10 tokens, but 11 .* 3 .* 8"):
        room(3, Options(max_tokens=8), 10)
    for cut in (False, True):
        with pytest.raises(ContextLengthError, match=r"10 tokens.*10 tokens"):
            room(10, Options(cut_to_context=cut), 10)


def test_seeds_are_repeatable_and_exact_in_a_double() -> None:
    first, second = SeedSource(3), SeedSource(3)
    seeds = [first.next() for _ in range(100)]
    assert seeds == [second.next() for _ in range(100)]
    assert len(set(seeds)) == 100
    assert all(json.loads(str(seed)) == float(seed) for seed in seeds)
    assert SeedSource(None).next() != SeedSource(None).next()
