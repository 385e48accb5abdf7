"""The same tokens with MTP on or off, alone or in a batch, however the drafts come and go."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request
from tests.engine.cases import (
    EOS,
    FACTORS,
    STEP,
    Erratic,
    check_head_cache,
    covering,
    make_requests,
    proposer_for,
)
from tests.harness import Driver, OracleProposer, Ties, greedy, request
from tests.tiny_models import VOCAB

QUICK = covering(FACTORS)
WHOLE = [
    dict(
        zip(FACTORS, (*case, FACTORS["arrivals"][number % 3], bool(number % 2))),
    )
    for number, case in enumerate(itertools.product(*list(FACTORS.values())[:4]))
]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.full) for case in WHOLE)]


@pytest.fixture(scope="module")
def ties():
    """All differences at rounding ties that this file met, listed at its end."""
    found = Ties()
    yield found
    found.report("random models")


@pytest.fixture
def model_of(tiny_models):
    """A family's model; "few rows" is one that takes itself for a quantized one on CUDA."""
    few = dataclasses.replace(tiny_models["qwen3_5"], slow_few_rows=True)
    return {**tiny_models, "few rows": few}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_tokens_equal_plain_decoding(model_of, references, ties, case):
    family = case["model"] if case["model"] != "few rows" else "qwen3_5"
    model, reference = model_of[case["model"]], references(family, case["requests"])
    requests = make_requests(case["requests"])
    erratic = Erratic(seed=len(case["drafts"])) if case["depth"] == "erratic" else None
    driver = Driver(
        model,
        vocab_size=VOCAB,
        stop_ids=(EOS,),
        config=EngineConfig(
            num_draft_tokens=0 if erratic else case["depth"],
            prefill_step_size=STEP,
            overlap=case["overlap"],
        ),
        proposer=proposer_for(case["drafts"], model, reference, requests),
        depth=erratic,
    )
    if erratic:
        wanted = itertools.cycle((None, 0, None, 1, None, 2, None, 4))
        requests = [dataclasses.replace(r, num_draft_tokens=n) for r, n in zip(requests, wanted)]
    gone: list[str] = []
    if case["arrivals"] == "alone":
        for each in (requests[6], requests[1]):
            driver.add(each)
            driver.run()
    else:
        random = np.random.default_rng(len(str(case)))
        arrivals: dict[int, list[Request]] = {}
        for index in random.permutation(len(requests))[: random.integers(3, 9)]:
            arrivals.setdefault(int(random.integers(0, 12)), []).append(requests[index])
        if case["arrivals"] == "cancelled":
            gone = [each.request_id for arriving in arrivals.values() for each in arriving[:1]]
        driver.run_arrivals(arrivals, {int(random.integers(1, 16)): [name] for name in gone[:3]})
    for name, outputs in driver.outputs.items():
        tokens = driver.tokens(name)
        if not outputs or outputs[-1].finish_reason is None:
            assert name in gone
            assert tuple(tokens) == reference[name].tokens[: len(tokens)]
        else:
            ties.check(f"{case} {name}", tokens, reference[name])
    check_counters(driver, case)


def check_counters(driver: Driver, case: dict) -> None:
    """Forced drafts are all accepted up to the end of an answer, spoiled ones never."""
    stats, depth = driver.core.stats(), case["depth"]
    outputs = [o for outs in driver.outputs.values() for o in outs]
    assert stats.num_draft_tokens >= sum(o.num_draft_tokens for o in outputs)
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    if case["drafts"] == "reject":
        assert stats.num_accepted_tokens == 0
    if isinstance(depth, int):
        assert stats.num_draft_tokens == depth * stats.num_drafts
        assert (depth == 0) == (stats.num_drafts == 0)
        if case["drafts"] == "force":
            # Every window but a request's last, which its end may cut, is accepted whole.
            cut = len(driver.outputs) * depth
            assert stats.num_accepted_tokens >= stats.num_draft_tokens - cut


def forced(model, requests) -> tuple[dict[str, list[int]], OracleProposer]:
    """Plain answers, and drafts that are always right."""
    alone = Driver(model, vocab_size=VOCAB, config=EngineConfig(num_draft_tokens=0))
    for each in requests:
        alone.add(dataclasses.replace(each, num_draft_tokens=None))
    plain = alone.run()
    answers = {r.request_id: (*r.prompt_token_ids, *plain[r.request_id]) for r in requests}
    return plain, OracleProposer(answers, VOCAB, 1.0)


def test_a_request_has_its_own_depth_among_deeper_ones(tiny_models):
    """Every draft would be right, so what a row gets of a step is what it asked for, plus one."""
    model = tiny_models["qwen3_5"]
    requests = [
        dataclasses.replace(
            request(f"r{number}", [5 + number, 9], greedy(25, ignore_eos=True)),
            num_draft_tokens=drafts,
        )
        for number, drafts in enumerate((None, 0, 1, 3, None))
    ]
    plain, proposer = forced(model, requests)
    config = EngineConfig(num_draft_tokens=2)
    driver = Driver(model, vocab_size=VOCAB, config=config, proposer=proposer)
    for each in requests:
        driver.add(each)
    assert driver.run() == plain
    # While the row that wants 3 is there, the others that don't mind take 3 too.
    for number, depth in enumerate((3, 0, 1, 3, 3)):
        outputs = driver.outputs[f"r{number}"][1:-1]
        assert {o.num_draft_tokens for o in outputs[:3]} == {depth}
        assert all(o.num_accepted_tokens == o.num_draft_tokens for o in outputs)
        assert all(len(o.token_ids) == o.num_draft_tokens + 1 for o in outputs)
    stats, outputs = driver.core.stats(), [o for outs in driver.outputs.values() for o in outs]
    assert stats.num_draft_tokens == sum(o.num_draft_tokens for o in outputs)
    assert stats.num_accepted_tokens == sum(o.num_accepted_tokens for o in outputs)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_rows_get_when_they_join_others_with_more_or_fewer_drafts(tiny_models, overlap):
    """The window is that of the rows that run; what is missing in a joining row doesn't count."""

    class Scripted(Erratic):
        def choose(self, steady: bool) -> int:
            return 4 if steady else 2

    model, policy = tiny_models["qwen3_next"], Scripted(0)
    requests = [request(f"r{i}", [5 + i, 9], greedy(40, ignore_eos=True)) for i in range(3)]
    plain, proposer = forced(model, requests)
    config = EngineConfig(overlap=overlap)
    driver = Driver(model, vocab_size=VOCAB, config=config, proposer=proposer, depth=policy)
    assert driver.run_arrivals({0: requests[:1], 5: requests[1:]}) == plain
    outputs = [o for outs in driver.outputs.values() for o in outs[1:-1]]
    assert all(o.num_accepted_tokens == o.num_draft_tokens for o in outputs)
    assert {o.num_draft_tokens for o in outputs} >= {2, 4}
    assert {step.depth for step in policy.steps} == {2, 4}


class Parking(Erratic):
    def choose(self, steady: bool) -> int:
        return 0 if len(self.planned) > 4 else 3


@pytest.mark.parametrize(
    ("policy", "name", "steps", "joins"),
    [(Erratic(1), "a", 14, 6), (Parking(0), "c", 52, 18)],
    ids=["erratic", "parked for longer than positions are deferred"],
)
def test_the_heads_cache_is_complete_whatever_was_drafted(tiny_models, policy, name, steps, joins):
    """Rows come and go, and positions that were deferred are written in the end."""
    model = tiny_models["qwen3_next"]
    driver = Driver(model, vocab_size=VOCAB, depth=policy)
    driver.add(request("a", range(2, 39), greedy(64, ignore_eos=True)))
    driver.add(request("b", [5], greedy(7, ignore_eos=True)))
    for number in range(steps):
        driver.step()
        if number == joins:
            driver.add(request("c", [7, 8], greedy(50, ignore_eos=True)))
    assert driver.reason("b") == "length"
    check_head_cache(driver, model, name)


@pytest.mark.parametrize(("depth", "step"), [(0, 16), (3, 16), (1, 1)])
def test_the_heads_cache_is_complete_at_every_depth_and_chunk_size(tiny_models, depth, step):
    """One row per trunk position, as if written in one go."""
    model = tiny_models["qwen3_5"]
    config = EngineConfig(num_draft_tokens=depth, prefill_step_size=step)
    driver = Driver(model, vocab_size=VOCAB, config=config)
    driver.add(request("a", range(2, 39), greedy(20, ignore_eos=True)))
    driver.add(request("b", [5], greedy(20, ignore_eos=True)))
    while len(driver.tokens("a")) < 12:
        driver.step()
    check_head_cache(driver, model, "a")


def test_windows_of_few_rows_are_filled_up(model_of):
    few, other = model_of["few rows"], model_of["qwen3_5"]
    lengths = {(b, t): few.window_length(b, t) for b in range(1, 9) for t in range(1, 9)}
    for (batch, length), run in lengths.items():
        assert run >= length
        assert run == length if not 4 <= batch * length < 8 else batch * run >= 8
        assert other.window_length(batch, length) == length
