"""Every field is checked before it can reach mlx."""

from __future__ import annotations

import pytest

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams

VOCAB = 100


@pytest.mark.parametrize(
    ("field", "wrong", "limits"),
    [
        ("max_tokens", (0, 2**40), (1,)),
        ("temperature", (-0.1, float("nan"), float("inf")), (0.0,)),
        ("top_p", (0.0, 1.1), (1.0,)),
        ("top_k", (-1,), (0,)),
        ("min_p", (-0.1, 1.5), (0.0, 1.0)),
        ("repetition_penalty", (0.0, 1e-45), (0.01,)),
        ("presence_penalty", (2.5,), (-2.0, 2.0)),
        ("frequency_penalty", (-2.5,), (-2.0, 2.0)),
        ("seed", (2**63, -(2**63) - 1), (2**63 - 1, -(2**63))),
        ("top_logprobs", (21, -1), (0, 20)),
        ("logit_bias", (((100, 1.0),), ((-1, 1.0),), ((2**40, 1.0),)), (((99, -100.0),),)),
        ("logit_bias", (((1, 101.0),), ((1, float("nan")),), ((1, 0.0),) * 2000), (((1, 100.0),),)),
        ("stop_token_ids", ((100,), tuple(range(65))), ((0, 99),)),
    ],
)
def test_out_of_range_names_the_field(field, wrong, limits):
    for value in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{"max_tokens": 5, field: value}).validate(VOCAB)
        assert caught.value.param == field
    for value in limits:
        SamplingParams(**{"max_tokens": 5, field: value}).validate(VOCAB)


def test_what_goes_with_a_grammar():
    def check(kind: str, tokens: int | None, **fields: bool) -> None:
        grammar = GrammarSpec(kind, free_until="</think>", free_tokens=tokens)
        SamplingParams(max_tokens=1, grammar=grammar, **fields).validate(VOCAB)

    check("free", 0, ignore_eos=True)
    with pytest.raises(InvalidRequestError, match="thinking_budget"):
        check("free", -1)
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        check("json_object", None, ignore_eos=True)


def test_choices_and_seeds_have_noise_of_their_own():
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63)]
    words = {
        SamplingParams(max_tokens=1, seed=s, choice=c).noise_seed() for s in seeds for c in range(4)
    }
    assert len(words) == len(seeds) * 4
    assert all(0 <= w < 2**32 for w in words)
