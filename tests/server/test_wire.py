"""Request bodies, defaults and limits, beyond the recorded exchanges."""

import dataclasses
import random
from typing import Any

import pytest

from mlx_mtp.errors import ContextLengthError, InvalidRequestError, ModelError, UsageError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.api.openai.protocol import ChatRequest, CompletionRequest
from mlx_mtp.server.api.schema import SAMPLING, Float
from mlx_mtp.server.generation.inputs import (
    AnswerOptions,
    engine_requests,
    model_defaults,
    sampling_params,
    unwrap,
    with_flags,
    wrap,
)
from tests.support.fake_engine import FakeEngine, FakeInfo, answer
from tests.support.in_process import GOOD, MESSAGES, RESPONSES, in_process

NEUTRAL = model_defaults({})


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "hi", **fields})


def sampled(
    body: ChatRequest, defaults: SamplingParams = NEUTRAL, seed: int | None = None
) -> SamplingParams:
    return sampling_params(body.options(), defaults, random.Random(seed), FakeInfo(vocab_size=100))


def test_explicit_nulls_mean_absent_everywhere() -> None:
    nulls = dict.fromkeys(ChatRequest.model_fields)
    del nulls["model"], nulls["messages"]
    message = {"role": "user", "content": "hi", "tool_calls": None, "refusal": None}
    assert chat(messages=[message], **nulls) == chat()
    tool = {"type": "function", "function": {"name": "f", "strict": None, "parameters": None}}
    (tool,) = chat(tools=[tool]).conversation().offered_tools
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    assert tool.for_template() == {"type": "function", "function": function}


def test_every_sampling_parameter_is_a_field_and_reaches_the_sampler() -> None:
    known = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert set(known) - set(SAMPLING) == {
        *("choice", "grammar", "optimistic", "prompt_logprobs", "top_logprobs")
    }
    others = {"logit_bias": ({"5": 1.5}, ((5, 1.5),)), "stop_token_ids": ([9], (9,))}
    others |= {"ignore_eos": (True, True), "allowed_token_ids": ([9], (9,))}
    for name, kind in SAMPLING.items():
        number = 0.5 if kind is Float else 3
        given, expected = others.get(name, (number, number))
        assert getattr(sampled(chat(**{name: given})), name) == expected != known[name]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_what_the_sampler_can_do_every_api_may_ask_for(path: str) -> None:
    """Anthropic's own servers allow temperatures up to 1, and OpenAI's have no top_k."""
    engine, asked = FakeEngine(answer([300])), {"temperature": 1.5, "top_k": 7, "seed": 3}
    with in_process(engine) as client:
        assert client.post(path, json=GOOD[path] | asked).status_code == 200
    sampling = engine.submitted[0].sampling
    assert {name: getattr(sampling, name) for name in asked} == asked


def test_the_models_defaults_apply_and_the_request_wins() -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "eos_token_id": [1]}
    params = sampled(chat(top_k=5, temperature=0), model_defaults(config))
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.95, 5, 0.0)
    assert model_defaults({"do_sample": False, "temperature": 0.6}).temperature == 0.0
    assert model_defaults({}) == SamplingParams(max_tokens=1 << 31)
    # A server's flags are between the model's defaults and the request.
    served = with_flags(model_defaults(config), {"top_k": -1, "top_p": 0.5, "max_tokens": 9})
    assert (served.temperature, served.top_p, served.top_k) == (0.6, 0.5, 0)
    assert (sampled(chat(), served).max_tokens, sampled(chat(max_tokens=3), served).max_tokens) == (
        9,
        3,
    )
    with pytest.raises(UsageError, match=r"--top-p: top_p is 0.0"):
        with_flags(NEUTRAL, {"top_p": 0.0})
    # vLLM's value for all tokens.
    assert sampled(chat(top_k=-1), model_defaults(config)).top_k == 0
    assert model_defaults({"top_k": -1}).top_k == 0


@pytest.mark.parametrize(
    "config", [{"temperature": -1}, {"top_p": "x"}, {"top_k": 1.5}, {"top_k": -2}]
)
def test_defaults_that_make_no_sense_are_an_error_of_the_model(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        model_defaults(config)


def room(prompt_tokens: int, **sampling: int) -> int:
    params = SamplingParams(**{"max_tokens": 1 << 31} | sampling)
    (request,) = engine_requests("", [(1,) * prompt_tokens], params, AnswerOptions(), 10)
    return request.sampling.max_tokens


def test_the_answer_gets_the_room_that_is_left() -> None:
    assert [room(3), *(room(3, max_tokens=n) for n in (6, 7, 8))] == [7, 6, 7, 7]
    for sampling in ({"min_tokens": 8}, {"min_tokens": 4, "max_tokens": 3}):
        with pytest.raises(InvalidRequestError, match=r"min_tokens is \d, but .* [73] tokens"):
            room(3, **sampling)
    with pytest.raises(ContextLengthError, match=r"10 tokens.*10 tokens"):
        room(10)


def test_reasoning_that_clients_send_back_may_be_damaged() -> None:
    assert unwrap(wrap("Ich muß 駅")) == "Ich muß 駅"
    mark = wrap("")
    for damaged in ("", "other", f"{mark}*", f"{mark}\ufeffSSBu", f"{mark}\ud800", f"{mark}/w=="):
        assert unwrap(damaged) == ""
