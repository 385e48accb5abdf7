"""The same tokens with MTP on or off, alone or in a batch: every family, depth and acceptance."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request
from tests.engine.cases import EOS, STEP, make_requests, proposer_for
from tests.harness import Driver, Ties
from tests.tiny_models import FAMILIES, VOCAB


@pytest.fixture(scope="module")
def ties():
    """All differences at rounding ties that this file met, listed at its end."""
    found = Ties()
    yield found
    found.report("random models")


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
