"""Warm equals cold: whatever is taken from the prefix cache, the tokens are plain decoding's."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from tests.engine.cases import EOS, SAMPLED, STEP
from tests.harness import Driver, Ties, greedy, plain, request
from tests.tiny_models import FAMILIES, VOCAB

ROOM = 64 << 20


@pytest.fixture(scope="module")
def ties():
    """All differences at rounding ties that this file met, listed at its end."""
    found = Ties()
    yield found
    found.report("random models, prefix cache")


def words(seed: int, count: int) -> list[int]:
    """Random tokens that are no turn end."""
    return [int(t) for t in np.random.default_rng(seed).integers(2, VOCAB, count)]


def driver(model: LoadedModel, depth: int | str = 2, **settings) -> Driver:
    size = settings.pop("size", ROOM)
    config = EngineConfig(
        num_draft_tokens=depth, prefill_step_size=STEP, prefix_cache_size=size, **settings
    )
    return Driver(model, vocab_size=VOCAB, stop_ids=(EOS,), config=config)


def ask(warm: Driver, *wanted: Request) -> None:
    """Run requests to their ends, together."""
    for each in wanted:
        warm.add(each)
    warm.run()


def check(warm: Driver, model: LoadedModel, ties: Ties, *wanted: Request) -> None:
    for each in wanted:
        stops = () if each.sampling.ignore_eos else (EOS,)
        reference = plain(model, each, VOCAB, stops)
        ties.check(each.request_id, warm.tokens(each.request_id), reference)


def numbered(sampling: SamplingParams, prompt: list[int], name: str, **more) -> Request:
    return Request(name, tuple(prompt), sampling, **more)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("depth", [0, 1, 3, "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on(tiny_models, ties, family, depth, overlap):
    """Each turn begins where the last answer ended; then it is asked again, and edited."""
    model = tiny_models[family]
    warm = driver(model, depth, overlap=overlap)
    history = [*words(1, 21), EOS, *words(2, 9), EOS, 5]
    held = 0
    for turn in range(3):
        sampling = SAMPLED[turn] if turn else greedy(13, ignore_eos=True)
        asked = request(f"turn {turn}", history, sampling)
        ask(warm, asked)
        check(warm, model, ties, asked)
        answer = warm.tokens(asked.request_id)
        if turn:
            assert warm.reused(asked.request_id) == held, "the end of the last answer was not found"
        held = len(history) + len(answer) - 1
        history = [*history, *answer, EOS, *words(10 + turn, 7), EOS, 5]
    again = request("again", asked.prompt_token_ids, greedy(9))
    edited = request("edited", [*history[:31], *words(20, 12)], greedy(9))
    ask(warm, again, edited)
    check(warm, model, ties, again, edited)
    assert warm.reused("again") == len(asked.prompt_token_ids)
    assert 16 <= warm.reused("edited") <= 31
