"""The same tokens with MTP on or off, alone or in a batch: every family, depth and acceptance."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from tests.harness import Driver, OracleProposer, Plain, Ties, greedy, plain, request
from tests.tiny_models import FAMILIES, VOCAB

EOS = 1
STEP = 16  # small, so that prompts are cut into several chunks

SAMPLED = (
    SamplingParams(max_tokens=20, temperature=1.0, seed=7),
    SamplingParams(max_tokens=17, temperature=0.7, top_k=8, top_p=0.9, seed=-3),
    SamplingParams(max_tokens=24, temperature=1.5, min_p=0.05, seed=2**62, frequency_penalty=0.8),
    SamplingParams(max_tokens=9, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(max_tokens=22, temperature=1.0, seed=7, choice=1, logit_bias=((5, 4.0),)),
)


def make_requests(sampled: bool) -> list[Request]:
    """Eight prompts, from one token to several chunks; a length of k + 1 for every k among them."""
    random = np.random.default_rng(11)
    lengths = (1, 2, 3, 4, 6, 17, 37, 16)
    requests = []
    for index, length in enumerate(lengths):
        sampling = SAMPLED[index % 5] if sampled else greedy(6 + 3 * index)
        requests.append(request(f"r{index}", random.integers(2, VOCAB, length), sampling))
    return requests


@pytest.fixture(scope="module")
def references(tiny_models: dict[str, LoadedModel]):
    """Plain decoding of every prompt, computed once per family."""

    @cache
    def of(family: str, sampled: bool) -> dict[str, Plain]:
        model = tiny_models[family]
        return {r.request_id: plain(model, r, VOCAB, (EOS,)) for r in make_requests(sampled)}

    return of


@pytest.fixture(scope="module")
def ties():
    """All differences at rounding ties that this file met, listed at its end."""
    found = Ties()
    yield found
    found.report("random models")


def proposer_for(acceptance: str, references: dict[str, Plain], requests: list[Request]):
    """None: the model's own head."""
    if acceptance == "head":
        return None
    answers = {
        r.request_id: (*r.prompt_token_ids, *references[r.request_id].tokens) for r in requests
    }
    rate = {"reject": 0.0, "force": 1.0, "mixed": 0.6}[acceptance]
    return OracleProposer(answers, VOCAB, rate)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("acceptance", ["head", "reject", "mixed", "force"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_staggered_batches_equal_plain_decoding(
    tiny_models, references, ties, family, depth, acceptance, sampled
):
    model, reference = tiny_models[family], references(family, sampled)
    requests = make_requests(sampled)
    random = np.random.default_rng(depth + 10 * sampled)
    size = int(random.integers(2, 9))

    def driver() -> Driver:
        return Driver(
            model,
            vocab_size=VOCAB,
            stop_ids=(EOS,),
            config=EngineConfig(num_draft_tokens=depth, prefill_step_size=STEP),
            proposer=proposer_for(acceptance, reference, requests),
        )

    alone = driver()
    alone.add(requests[6])
    got = alone.run()
    ties.check(f"{family} k={depth} {acceptance} alone", got["r6"], reference["r6"])

    batch = driver()
    chosen = random.permutation(len(requests))[:size]
    arrivals: dict[int, list[Request]] = {}
    for index in chosen:
        arrivals.setdefault(int(random.integers(0, 12)), []).append(requests[index])
    got = batch.run_arrivals(arrivals)
    for name, tokens in got.items():
        ties.check(
            f"{family} k={depth} {acceptance} batch of {size} {name}", tokens, reference[name]
        )
    check_counters(batch, depth, acceptance)


def check_counters(driver: Driver, depth: int, acceptance: str) -> None:
    """Forced drafts are all accepted up to the end of an answer, spoiled ones never."""
    stats = driver.core.stats()
    if depth == 0:
        assert stats.num_drafts == 0
        return
    assert stats.num_draft_tokens == depth * stats.num_drafts
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    if acceptance == "reject":
        assert stats.num_accepted_tokens == 0
    if acceptance == "force":
        # Every window but a request's last, which its end may cut, is accepted whole.
        cut = len(driver.outputs) * depth
        assert stats.num_accepted_tokens >= stats.num_draft_tokens - cut


@pytest.mark.parametrize("family", FAMILIES)
def test_depth_changes_from_step_to_step(tiny_models, references, ties, family):
    """Drafts to no drafts and back: the next step must see the accepted tokens' state."""

    class Changing:
        def __init__(self) -> None:
            self.steps = iter([3, 0, 0, 2, 5, 1, 0, 3] * 100)

        def depth(self, batch_size: int) -> int:
            return next(self.steps)

    for acceptance in ("head", "mixed", "force"):
        requests, reference = make_requests(False), references(family, False)
        driver = Driver(
            tiny_models[family],
            vocab_size=VOCAB,
            stop_ids=(EOS,),
            config=EngineConfig(prefill_step_size=STEP),
            proposer=proposer_for(acceptance, reference, requests),
            depth=Changing(),
        )
        got = driver.run_arrivals({0: requests[:3], 4: requests[3:6], 7: requests[6:]})
        for name, tokens in got.items():
            ties.check(f"{family} changing depth {acceptance} {name}", tokens, reference[name])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cancel_at", [1, 3, 6, 9])
def test_cancelled_neighbours_leave_the_others_alone(
    tiny_models, references, ties, cancel_at, overlap
):
    requests, reference = make_requests(False), references("qwen3_next", False)
    driver = Driver(
        tiny_models["qwen3_next"],
        vocab_size=VOCAB,
        stop_ids=(EOS,),
        config=EngineConfig(num_draft_tokens=3, prefill_step_size=STEP, overlap=overlap),
        proposer=proposer_for("mixed", reference, requests),
    )
    got = driver.run_arrivals(
        {0: requests[:4], 2: requests[4:]}, {cancel_at: ["r2", "r6"], cancel_at + 1: ["r0"]}
    )
    for name in ("r1", "r3", "r4", "r5", "r7"):
        ties.check(f"beside cancelled at {cancel_at} {name}", got[name], reference[name])
    for name in ("r0", "r2", "r6"):
        assert tuple(got[name]) == reference[name].tokens[: len(got[name])]


def test_the_plain_loop_and_the_overlapped_one_agree(tiny_models, references, ties):
    reference = references("qwen3_5", True)
    for overlap in (False, True):
        driver = Driver(
            tiny_models["qwen3_5"],
            vocab_size=VOCAB,
            stop_ids=(EOS,),
            config=EngineConfig(num_draft_tokens=2, prefill_step_size=STEP, overlap=overlap),
        )
        got = driver.run_arrivals({0: make_requests(True)[:5], 3: make_requests(True)[5:]})
        for name, tokens in got.items():
            ties.check(f"overlap={overlap} {name}", tokens, reference[name])
