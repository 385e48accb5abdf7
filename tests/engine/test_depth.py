"""Depths that change from step to step and differ from row to row never change a token."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.speculative.depth import DecodeStep, DraftRow
from tests.engine.cases import EOS, STEP, check_head_cache, make_requests, proposer_for
from tests.harness import Driver, OracleProposer, Ties, greedy, request
from tests.tiny_models import FAMILIES, VOCAB


class Erratic:
    """Another depth at every step, often none, whatever the rows want."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.planned: list[int] = []
        self.steps: list[DecodeStep] = []

    def depth(self, rows: list[DraftRow], *, steady: bool) -> int:
        assert rows
        self.planned.append(self.random.choice((0, 0, 0, 1, 2, 3, 5, 8)))
        return self.planned[-1]

    def observe(self, step: DecodeStep) -> None:
        self.steps.append(step)

    def choices(self) -> dict[int, int]:
        return {}


@pytest.fixture(scope="module")
def ties():
    found = Ties()
    yield found
    found.report("random models, changing depths")


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("acceptance", ["head", "reject", "mixed", "force"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_depth_at_any_step(tiny_models, references, ties, family, acceptance, sampled, overlap):
    """Rows join and leave between; some ask for a depth of their own, or for none."""
    requests, reference = make_requests(sampled), references(family, sampled)
    policy = Erratic(seed=len(family) + sampled)
    driver = Driver(
        tiny_models[family],
        vocab_size=VOCAB,
        stop_ids=(EOS,),
        config=EngineConfig(prefill_step_size=STEP, overlap=overlap),
        proposer=proposer_for(acceptance, reference, requests),
        depth=policy,
    )
    wanted = (None, 0, None, 1, None, 2, None, 4)
    mixed = [
        dataclasses.replace(each, num_draft_tokens=drafts)
        for each, drafts in zip(requests, wanted, strict=True)
    ]
    got = driver.run_arrivals(
        {0: mixed[:3], 4: mixed[3:6], 7: mixed[6:]}, {9: ["r4"], 12: ["r7", "r0"]}
    )
    for name, tokens in got.items():
        if driver.reason(name) is None:  # cancelled
            assert tuple(tokens) == reference[name].tokens[: len(tokens)]
        else:
            ties.check(f"{family} {acceptance} {name}", tokens, reference[name])
    changes = {(a > 0, b > 0) for a, b in itertools.pairwise(policy.planned)}
    assert (True, False) in changes
    assert (False, True) in changes


def test_a_request_has_its_own_depth_among_deeper_ones(tiny_models):
    """Every draft would be right, so what a row gets of a step is what it asked for, plus one."""
    model = tiny_models["qwen3_5"]
    requests, answers = [], {}
    for number, drafts in enumerate((None, 0, 1, 3, None)):
        each = request(f"r{number}", [5 + number, 9], greedy(25, ignore_eos=True))
        requests.append(dataclasses.replace(each, num_draft_tokens=drafts))
    alone = Driver(model, vocab_size=VOCAB, config=EngineConfig(num_draft_tokens=0))
    for each in requests:
        alone.add(dataclasses.replace(each, num_draft_tokens=None))
    plain = alone.run()
    answers = {r.request_id: (*r.prompt_token_ids, *plain[r.request_id]) for r in requests}
    driver = Driver(
        model,
        vocab_size=VOCAB,
        config=EngineConfig(num_draft_tokens=2),
        proposer=OracleProposer(answers, VOCAB, 1.0),
    )
    for each in requests:
        driver.add(each)
    assert driver.run() == plain
    # While the row that wants 3 is there, the others that don't mind take 3 too.
    for number, depth in enumerate((3, 0, 1, 3, 3)):
        outputs = driver.outputs[f"r{number}"][1:-1]
        assert {o.num_draft_tokens for o in outputs[:3]} == {depth}
        assert all(o.num_accepted_tokens == o.num_draft_tokens for o in outputs)
        assert all(len(o.token_ids) == o.num_draft_tokens + 1 for o in outputs)
    stats = driver.core.stats()
    told = [o for outs in driver.outputs.values() for o in outs]
    assert stats.num_draft_tokens == sum(o.num_draft_tokens for o in told)
    assert stats.num_accepted_tokens == sum(o.num_accepted_tokens for o in told)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_controller_itself(tiny_models, references, ties, family, overlap):
    """`auto` on real times: whatever it chooses, the tokens are the same."""
    requests, reference = make_requests(True), references(family, True)
    driver = Driver(
        tiny_models[family],
        vocab_size=VOCAB,
        stop_ids=(EOS,),
        config=EngineConfig(prefill_step_size=STEP, overlap=overlap),
    )
    got = driver.run_arrivals({0: requests[:3], 4: requests[3:6], 7: requests[6:]})
    for name, tokens in got.items():
        ties.check(f"{family} auto {name}", tokens, reference[name])
    assert driver.core.stats().depths


@pytest.mark.parametrize("seed", range(4))
def test_the_heads_cache_is_complete_whatever_was_drafted(tiny_models, seed):
    """Parked and not, with rows that come and go: what was put off is made up for."""
    model = tiny_models["qwen3_next"]
    driver = Driver(model, vocab_size=VOCAB, depth=Erratic(seed))
    driver.add(request("a", range(2, 39), greedy(90, ignore_eos=True)))
    driver.add(request("b", [5], greedy(6 + seed, ignore_eos=True)))
    for number in range(14):
        driver.step()
        if number == 5 + seed:
            driver.add(request("c", [7, 8], greedy(90, ignore_eos=True)))
    check_head_cache(driver, model, "a")


def test_a_long_time_without_drafts_is_made_up_for(tiny_models):
    """Longer than what is put off at most, and while rows come and go."""

    class Parking(Erratic):
        def depth(self, rows: list[DraftRow], *, steady: bool) -> int:
            self.planned.append(0 if len(self.planned) > 4 else 3)
            return self.planned[-1]

    model = tiny_models["qwen3_5"]
    for name in ("a", "c"):
        driver = Driver(model, vocab_size=VOCAB, depth=Parking(0))
        driver.add(request("a", range(2, 20), greedy(120, ignore_eos=True)))
        driver.add(request("b", [5], greedy(30, ignore_eos=True)))
        for number in range(52):
            driver.step()
            if number == 18:
                driver.add(request("c", [7, 8], greedy(90, ignore_eos=True)))
        assert driver.reason("b") == "length"
        assert driver.runner.batches.decoding.draft_state._deferred
        check_head_cache(driver, model, name)


def test_what_rows_get_when_they_join_others_with_more_or_fewer_drafts(tiny_models):
    """The window is that of the rows that run; what is missing in a joining row doesn't count."""

    class Scripted(Erratic):
        def depth(self, rows: list[DraftRow], *, steady: bool) -> int:
            self.planned.append(2 if not steady else 4)
            return self.planned[-1]

    model = tiny_models["qwen3_next"]
    requests = [request(f"r{i}", [5 + i, 9], greedy(40, ignore_eos=True)) for i in range(3)]
    alone = Driver(model, vocab_size=VOCAB, config=EngineConfig(num_draft_tokens=0))
    for each in requests:
        alone.add(each)
    plain = alone.run()
    answers = {r.request_id: (*r.prompt_token_ids, *plain[r.request_id]) for r in requests}
    for overlap in (True, False):
        policy = Scripted(0)
        driver = Driver(
            model,
            vocab_size=VOCAB,
            config=EngineConfig(overlap=overlap),
            proposer=OracleProposer(answers, VOCAB, 1.0),
            depth=policy,
        )
        got = driver.run_arrivals({0: requests[:1], 5: requests[1:]})
        assert got == plain
        told = [o for outs in driver.outputs.values() for o in outs[1:-1]]
        assert all(o.num_accepted_tokens == o.num_draft_tokens for o in told)
        assert {o.num_draft_tokens for o in told} >= {2, 4}
        assert {step.depth for step in policy.steps} == {2, 4}
