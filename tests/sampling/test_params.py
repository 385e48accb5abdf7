"""Every field is checked before it can reach mlx."""

from __future__ import annotations

import pytest

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams

VOCAB = 100


@pytest.mark.parametrize(
    "field",
    [
        {"max_tokens": 0},
        {"max_tokens": 2**40},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-45},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"top_logprobs": 21},
        {"top_logprobs": -1},
        {"logit_bias": ((100, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((2**40, 1.0),)},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((1, float("nan")),)},
        {"logit_bias": tuple((i, 0.0) for i in range(2000))},
        {"stop_token_ids": (100,)},
        {"stop_token_ids": tuple(range(65))},
        {"ignore_eos": True, "grammar": GrammarSpec("json_object")},
    ],
    ids=str,
)
def test_out_of_range_names_the_field(field):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{"max_tokens": 5, **field}).validate(VOCAB)
    assert caught.value.param == next(iter(field))


def test_the_limits_themselves_are_allowed():
    SamplingParams(
        max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, min_p=1.0, seed=-(2**63),
        logit_bias=((99, -100.0),), stop_token_ids=(0,), top_logprobs=20,
    ).validate(VOCAB)  # fmt: skip
    budget = GrammarSpec("free", free_until="</think>", free_tokens=0)
    SamplingParams(max_tokens=1, ignore_eos=True, grammar=budget).validate(VOCAB)
    SamplingParams(max_tokens=1, seed=2**63 - 1).validate(VOCAB)


def test_a_budget_has_a_range():
    budget = GrammarSpec("free", free_until="</think>", free_tokens=-1)
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(max_tokens=1, grammar=budget).validate(VOCAB)
    assert caught.value.param == "thinking_budget"


def test_choices_and_seeds_have_noise_of_their_own():
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63)]
    words = {
        SamplingParams(max_tokens=1, seed=s, choice=c).noise_seed() for s in seeds for c in range(4)
    }
    assert len(words) == len(seeds) * 4
    assert all(0 <= w < 2**32 for w in words)
