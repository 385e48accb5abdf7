"""Tokens are equal with MTP on or off, alone or in a batch, with any drafts."""

import dataclasses
import itertools

import numpy as np
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.engine.request import Request, RequestOptions
from mlx_mtp.kernels import attention
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.host_sources import HostSources
from tests.support.cases import (
    EOS,
    SPECS,
    STEP,
    Erratic,
    RandomChunks,
    check_head_cache,
    drafter_for,
    make_requests,
)
from tests.support.grammars import compiled
from tests.support.harness import Driver, OracleDrafter, greedy, plain, request
from tests.support.quick import covering
from tests.support.tiny_models import VOCAB

FACTORS = {
    "model": ("qwen3_next", "qwen3_5", "qwen3_5_moe"),
    "depth": (0, 1, 2, 3, 5, "erratic", "auto"),
    "drafts": ("head", "half", "reject", "mixed", "force"),
    "requests": ("greedy", "sampled", "greedy grammars", "sampled grammars"),
    "arrivals": ("alone", "staggered", "cancelled"),
    "overlap": (True, False),
    "chunks": ("whole", "random"),
}
# Depths 1, 2 and 5 are only in the full product: other tests, as those of ranks, cover them.
CASES = covering(FACTORS | {"depth": (0, 3, "erratic", "auto")})
for number, values in enumerate(itertools.product(*list(FACTORS.values())[:4])):
    others = (
        each[number // place % len(each)]
        for place, each in enumerate(list(FACTORS.values())[4:], start=1)
    )
    whole = dict(zip(FACTORS, (*values, *others)))
    CASES.append(pytest.param(whole, marks=pytest.mark.full))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_tokens_equal_plain_decoding(tiny_models, references, ties, case):
    family = case["model"]
    model, reference = tiny_models[family], references(family, case["requests"])
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
        drafter=drafter_for(case["drafts"], model, reference, requests),
        depth=erratic,
        host_sources=HostSources(["copy"], 1 << 20) if erratic else None,
        prefills=RandomChunks if case["chunks"] == "random" else PrefillScheduler,
    )
    if erratic:
        wanted = itertools.cycle((None, 0, None, 1, None, 2, None, 4))
        requests = [
            dataclasses.replace(r, options=RequestOptions(num_draft_tokens=n))
            for r, n in zip(requests, wanted)
        ]
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
    # Right drafts are all accepted up to the end of an answer, wrong ones never.
    stats, depth = driver.core.scheduler.stats(), case["depth"]
    outputs = [o for outs in driver.outputs.values() for o in outs]
    assert stats.num_draft_tokens >= sum(o.num_draft_tokens for o in outputs)
    assert sum(map(sum, stats.num_accepted_tokens_per_pos.values())) == stats.num_accepted_tokens
    if case["drafts"] == "reject":
        assert sum(stats.num_accepted_tokens_per_pos.get("mtp", ())) == 0
    if isinstance(depth, int):
        assert stats.num_draft_tokens == depth * stats.num_draft_windows
        assert (depth == 0) == (stats.num_draft_windows == 0)
        if case["drafts"] == "force":
            # Every window is accepted whole, except a request's last, which its end can cut.
            cut = len(driver.outputs) * depth
            assert stats.num_accepted_tokens >= stats.num_draft_tokens - cut


def forced(model, requests) -> tuple[dict[str, list[int]], OracleDrafter]:
    """Returns plain answers, and a drafter that is always right."""
    alone = Driver(model, vocab_size=VOCAB, config=EngineConfig(num_draft_tokens=0))
    for each in requests:
        alone.add(dataclasses.replace(each, options=RequestOptions()))
    plain = alone.run()
    answers = {r.request_id: (*r.prompt_token_ids, *plain[r.request_id]) for r in requests}
    return plain, OracleDrafter(answers, VOCAB, 1.0, length=512)


def test_a_request_has_its_own_depth_among_deeper_ones(tiny_models):
    """All drafts are right, so each step gives a row its requested number of drafts, plus one."""
    model = tiny_models["qwen3_5"]
    requests = [request(f"r{n}", [5 + n, 9], greedy(25, ignore_eos=True)) for n in range(5)]
    wanted = (None, 0, 1, 3, None)
    requests = [
        dataclasses.replace(r, options=RequestOptions(num_draft_tokens=n))
        for r, n in zip(requests, wanted)
    ]
    plain, drafter = forced(model, requests)
    driver = Driver(model, vocab_size=VOCAB, drafter=drafter)
    assert driver.run_arrivals({0: requests}) == plain
    for number, depth in enumerate((2, 0, 1, 3, 2)):
        outputs = driver.outputs[f"r{number}"][1:-1]
        assert {o.num_draft_tokens for o in outputs} == {depth}
        assert all(o.num_accepted_tokens == o.num_draft_tokens for o in outputs)
        assert all(len(o.token_ids) == o.num_draft_tokens + 1 for o in outputs)
    stats = driver.core.scheduler.stats()
    outputs = [o for outs in driver.outputs.values() for o in outs]
    assert stats.num_draft_tokens == sum(o.num_draft_tokens for o in outputs)


class Scripted(Erratic):
    def depth(self, steady: bool) -> int:
        return 4 if steady else 2


@pytest.mark.parametrize("overlap", [True, False])
def test_what_rows_get_when_they_join_others_with_more_or_fewer_drafts(tiny_models, overlap):
    """All drafts that rows get are right, before and after they join, at different depths."""
    model, policy = tiny_models["qwen3_next"], Scripted(0)
    # Long enough that the KV that attention reads, and its allocation, have to grow.
    requests = [request(f"r{i}", [5 + i] * 40, greedy(40, ignore_eos=True)) for i in range(2)]
    requests.append(request("r2", [5] * 230, greedy(40, ignore_eos=True)))
    plain, drafter = forced(model, requests)
    config = EngineConfig(overlap=overlap, drafts="mtp")
    driver = Driver(model, vocab_size=VOCAB, config=config, drafter=drafter, depth=policy)
    assert driver.run_arrivals({0: requests[:1], 5: requests[1:]}) == plain
    outputs = [o for outs in driver.outputs.values() for o in outs[1:-1]]
    assert all(o.num_accepted_tokens == o.num_draft_tokens for o in outputs)
    assert {o.num_draft_tokens for o in outputs} >= {2, 4}


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_ids_and_limits_cut_inside_a_window(tiny_models, overlap):
    """An accepted draft after a stop id, or past max_tokens, is never delivered."""
    model, prompt, cuts = tiny_models["qwen3_5"], [5, 6, 7], range(1, 12)
    full = plain(model, request("x", prompt, greedy(30)), VOCAB).tokens
    names = [f"{how} {cut}" for cut in cuts for how in ("stop", "length")]
    right = OracleDrafter(dict.fromkeys(names, (*prompt, *full)), VOCAB, 1.0)
    config = EngineConfig(num_draft_tokens=5, overlap=overlap)
    for drafter in (None, right):
        driver = Driver(model, vocab_size=VOCAB, config=config, drafter=drafter)
        for cut in cuts:
            stops = greedy(30, stop_token_ids=(full[cut], 90))
            driver.add(request(f"stop {cut}", prompt, stops))
            driver.add(request(f"length {cut}", prompt, greedy(cut)))
        got = driver.run()
        for cut in cuts:
            assert tuple(got[f"stop {cut}"]) == full[: full.index(full[cut]) + 1]
            assert tuple(got[f"length {cut}"]) == full[:cut]
        assert [driver.reason(name) for name in names] == [name.split()[0] for name in names]


@pytest.mark.parametrize("first", ["none", "one", "three"])
def test_rows_with_different_numbers_of_stop_ids_do_not_share_them(tiny_models, first):
    """Rows join in any order and emit only token 0, which must not match padded stop ids."""
    stops = {"none": (), "one": (90,), "three": (91, 92, 93)}
    requests = {
        name: request(name, [5, 6], greedy(9, logit_bias=((0, 100.0),), stop_token_ids=ids))
        for name, ids in stops.items()
    }
    driver = Driver(tiny_models["qwen3_5"], vocab_size=VOCAB)
    driver.run_arrivals({0: [requests.pop(first)], 3: list(requests.values())})
    assert driver.run() == {name: [0] * 9 for name in (first, *requests)}


class Parking(Erratic):
    def depth(self, steady: bool) -> int:
        return 0 if len(self.planned) > 4 else 3


@pytest.mark.parametrize(
    ("policy", "name", "steps", "chunk"),
    [(Erratic, "a", 14, 512), (Erratic, "a", 14, 16), (Parking, "c", 52, 16), (None, "a", 9, 512)],
)
def test_the_heads_cache_is_complete_whatever_was_drafted(tiny_models, policy, name, steps, chunk):
    """The head's KV equals that of one pass while rows come and go and its writes are deferred."""
    model = tiny_models["qwen3_next"]
    config = EngineConfig(num_draft_tokens=0, prefill_step_size=chunk)
    depth = None if policy is None else policy(1)
    driver = Driver(model, vocab_size=VOCAB, config=config, depth=depth)
    driver.add(request("a", range(2, 39), greedy(64, ignore_eos=True)))
    driver.add(request("b", [5], greedy(7, ignore_eos=True)))
    for number in range(steps):
        driver.step()
        if number == steps // 3:
            driver.add(request("c", [7, 8], greedy(50, ignore_eos=True)))
    check_head_cache(driver, model, name)


def test_a_prompt_whose_attention_is_in_blocks_of_queries(tiny_models, monkeypatch):
    """Attention in blocks of queries changes neither tokens nor the head's KV."""
    monkeypatch.setattr(attention, "_CPU_BLOCK", 48)
    model, tokens = tiny_models["qwen3_next"], [*range(2, 90)] * 4
    requests = [request(f"r{n}", tokens[: 300 + n], greedy(24, ignore_eos=True)) for n in range(2)]
    config = EngineConfig(num_draft_tokens=3, prefill_step_size=128)
    driver = Driver(model, vocab_size=VOCAB, config=config)
    for wanted in requests:
        driver.add(wanted)
    while not all(len(driver.tokens(wanted.request_id)) > 8 for wanted in requests):
        driver.step()
    check_head_cache(driver, model, "r1")
    for wanted in requests:
        assert driver.tokens(wanted.request_id) == [*plain(model, wanted, VOCAB).tokens]


def test_logprobs_are_the_models_own_whether_a_token_was_drafted_or_masked(tiny_models):
    """Logprobs are those of the unmasked model, and equal with MTP on and off."""
    model, reports = tiny_models["qwen3_5_moe"], []
    sampling = SamplingParams(max_tokens=15, temperature=0.8, seed=4, top_logprobs=3)
    wanted = [
        request("a", [5, 6, 7], sampling),
        request("masked", [5, 6, 7], greedy(12, top_logprobs=2), compiled(SPECS[0])),
        request("b", [5, 6], greedy(15)),
    ]
    _, drafter = forced(model, wanted)
    for depth in (0, 3):
        config = EngineConfig(num_draft_tokens=depth)
        driver = Driver(model, vocab_size=VOCAB, config=config, drafter=drafter)
        driver.run_arrivals({0: wanted})
        got = {name: [p for o in outs for p in o.logprobs] for name, outs in driver.outputs.items()}
        assert [len(got[name]) for name in ("a", "masked", "b")] == [15, 12, 0]
        # The mask forced tokens that are not the model's most likely ones.
        assert sum(p.logprob < p.top[0][1] for p in got["masked"]) >= 6
        reports.append(got["a"] + got["masked"])
    for one, other in zip(*reports, strict=True):
        assert one.logprob < 0.0
        assert abs(one.logprob - other.logprob) < 1e-4
        assert [t for t, _ in one.top] == [t for t, _ in other.top]
        assert one.top[0][1] >= one.logprob
