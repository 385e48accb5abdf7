"""Grammars: the same tokens with MTP on or off, alone or in a batch, and free rows untouched."""

from __future__ import annotations

import json
import re
from functools import cache

import jsonschema
import numpy as np
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.build import build_engine
from mlx_mtp.engine.request import Request
from mlx_mtp.errors import GrammarError, InvalidRequestError, StepError
from mlx_mtp.models.draft_head import DraftHead
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.grammar_masks import GrammarMasks
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from mlx_mtp.speculative.proposer import MTPProposer
from tests.grammars import EOS, THINK_END, TOO_WIDE_WITHIN, compiled, ids, text
from tests.harness import Driver, OracleProposer, Plain, Ties, plain, request
from tests.tiny_models import FAMILIES, VOCAB

STEP = 16
PERSON = {
    "type": "object",
    "properties": {
        "ab": {"type": "string", "maxLength": 6},
        "n": {"type": "integer"},
        "ok": {"type": "boolean"},
    },
    "required": ["ab", "n", "ok"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"enum": ["ab", "abab", 12, True]}, "minItems": 2, "maxItems": 5}
SPECS = (
    GrammarSpec("json_schema", json.dumps(PERSON)),
    GrammarSpec("json_schema", json.dumps(LIST)),
    GrammarSpec("json_object"),
    GrammarSpec("regex", "(ab)+[0-9]{2,6}(x|yz)*"),
    GrammarSpec("choice", json.dumps(["ab", "abab12", "true", "tru"])),
    GrammarSpec("lark", 'start: <tool_call> "a"+ %json {"type": "integer"} <tool_call>'),
    GrammarSpec("regex", "[0-9]{3}", free_until="</think>"),
    GrammarSpec("json_schema", json.dumps(LIST), free_until="</think>", free_tokens=7),
    GrammarSpec("free", free_until="</think>", free_tokens=5),
)
SAMPLED = (
    SamplingParams(max_tokens=40, temperature=1.0, seed=7),
    SamplingParams(max_tokens=40, temperature=0.7, top_k=5, top_p=0.9, seed=3),
    SamplingParams(max_tokens=30, temperature=1.5, min_p=0.05, frequency_penalty=0.8),
    SamplingParams(max_tokens=30, temperature=0.9, repetition_penalty=1.3, logit_bias=((40, 5.0),)),
)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)


def make_requests(sampled: bool) -> list[Request]:
    """One request for each grammar, and three without one in their midst."""
    random = np.random.default_rng(5)
    requests = []
    for index in range(len(SPECS) + 3):
        spec = SPECS[index - index // 4] if index % 4 != 3 else None
        prompt = random.integers(4, VOCAB, (3, 1, 9, 18, 4)[index % 5])
        sampling = SAMPLED[index % len(SAMPLED)] if sampled else GREEDY
        grammar = compiled(spec) if spec is not None else None
        requests.append(request(f"r{index}", prompt, sampling, grammar))
    assert {r.sampling.grammar for r in requests} == {None, *SPECS}
    return requests


@pytest.fixture(scope="module")
def references(tiny_models: dict[str, LoadedModel]):
    @cache
    def of(family: str, sampled: bool) -> dict[str, Plain]:
        model = tiny_models[family]
        return {r.request_id: plain(model, r, VOCAB, (EOS,)) for r in make_requests(sampled)}

    return of


@pytest.fixture(scope="module")
def ties():
    found = Ties()
    yield found
    found.report("random models with grammars")


def drive(model, depth, proposer=None, **config) -> Driver:
    return Driver(
        model,
        vocab_size=VOCAB,
        stop_ids=(EOS,),
        config=EngineConfig(num_draft_tokens=depth, prefill_step_size=STEP, **config),
        proposer=proposer,
    )


def oracle(kind: str, references: dict[str, Plain], requests: list[Request]):
    """Drafts that no mask has seen; None: the model's own head, whose drafts are masked."""
    if kind == "head":
        return None
    known = {
        r.request_id: (*r.prompt_token_ids, *references[r.request_id].tokens) for r in requests
    }
    return OracleProposer(known, VOCAB, {"reject": 0.0, "mixed": 0.6, "force": 1.0}[kind])


QUICK = [
    ("qwen3_next", 0, "head"),
    ("qwen3_next", 1, "head"),
    ("qwen3_next", 2, "mixed"),
    ("qwen3_next", 3, "head"),
    ("qwen3_5", 3, "force"),
    ("qwen3_5_moe", 4, "head"),
]
WHOLE = [
    pytest.param(family, depth, acceptance, marks=pytest.mark.full)
    for family in FAMILIES
    for depth in (0, 1, 2, 3, 4)
    for acceptance in ("head", "reject", "mixed", "force")
    if (family, depth, acceptance) not in QUICK
]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("family", "depth", "acceptance"), [*QUICK, *WHOLE])
def test_staggered_batches_equal_plain_decoding(
    tiny_models, references, ties, family, depth, acceptance, sampled
):
    requests, reference = make_requests(sampled), references(family, sampled)
    random = np.random.default_rng(depth + 10 * sampled)
    driver = drive(tiny_models[family], depth, oracle(acceptance, reference, requests))
    arrivals: dict[int, list[Request]] = {}
    for index in random.permutation(len(requests)):
        arrivals.setdefault(int(random.integers(0, 15)), []).append(requests[index])
    got = driver.run_arrivals(arrivals)
    for name, tokens in got.items():
        label = f"{family} k={depth} {acceptance} sampled={sampled} {name}"
        ties.check(label, tokens, reference[name])
        assert driver.reason(name) in ("stop", "length")


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_drafts_from_few_tokens_change_nothing(tiny_models, references, ties, sampled):
    """Also where the grammar allows none of them."""
    model, requests = tiny_models["qwen3_next"], make_requests(sampled)
    reference = references("qwen3_next", sampled)
    for few in ([EOS], range(0, VOCAB, 2)):
        driver = drive(model, 3, MTPProposer(model, DraftHead(model, few)))
        got = driver.run_arrivals({0: requests[:6], 3: requests[6:]})
        for name, tokens in got.items():
            label = f"{len(few)} tokens to draft from, sampled={sampled} {name}"
            ties.check(label, tokens, reference[name])


def test_answers_end_where_the_grammar_does_and_fit_it(references):
    """The references themselves: what they are compared with is what a client wants."""
    reference = references("qwen3_next", False)
    for wanted in make_requests(False):
        tokens, spec = reference[wanted.request_id].tokens, wanted.sampling.grammar
        if spec is None or spec.kind == "free" or tokens[-1] != EOS:
            continue
        answer = text(tokens[tokens.index(THINK_END) + 1 if spec.free_until else 0 : -1])
        if spec.kind.startswith("json"):
            value = json.loads(answer)
            if spec.value:
                jsonschema.validate(value, json.loads(spec.value))
        elif spec.kind == "choice":
            assert answer in json.loads(spec.value)
        elif spec.kind == "regex":
            assert re.fullmatch(spec.value, answer.lstrip("\n"))
    ended = [tokens[-1] == EOS for tokens in (r.tokens for r in reference.values())]
    assert sum(ended) >= 6


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cancel_at", [1, 3, 5, 8])
def test_cancelled_neighbours_leave_the_others_alone(
    tiny_models, references, ties, cancel_at, overlap
):
    requests, reference = make_requests(False), references("qwen3_next", False)
    driver = drive(tiny_models["qwen3_next"], 3, overlap=overlap)
    gone = {cancel_at: ["r0", "r3"], cancel_at + 2: ["r9", "r1"]}
    got = driver.run_arrivals({0: requests[:6], 2: requests[6:]}, gone)
    for name, tokens in got.items():
        if name in ("r0", "r1", "r3", "r9"):
            assert tuple(tokens) == reference[name].tokens[: len(tokens)]
        else:
            ties.check(f"beside cancelled at {cancel_at} {name}", tokens, reference[name])


@pytest.mark.parametrize("depth", [0, 4])
def test_stop_ids_and_limits_cut_inside_a_window(tiny_models, references, depth):
    model, spec = tiny_models["qwen3_next"], SPECS[0]
    wanted = make_requests(False)[0]
    full = references("qwen3_next", False)["r0"].tokens
    for cut in range(1, len(full) - 1, 4):
        driver = drive(model, depth)
        for name, more in (
            ("stop", {"max_tokens": 40, "stop_token_ids": (full[cut],)}),
            ("length", {"max_tokens": cut}),
        ):
            sampling = SamplingParams(temperature=0.0, **more)
            driver.add(request(name, wanted.prompt_token_ids, sampling, compiled(spec)))
        got = driver.run()
        assert tuple(got["stop"]) == full[: full.index(full[cut]) + 1]
        assert tuple(got["length"]) == full[:cut]
        assert (driver.reason("stop"), driver.reason("length")) == ("stop", "length")


@pytest.mark.parametrize("depth", [0, 3])
def test_a_grammar_that_meets_a_limit_ends_its_own_request_alone(
    tiny_models, references, ties, depth
):
    """One answer is steered to where a mask can't be made, another of the same grammar is not."""
    model, reference = tiny_models["qwen3_5"], references("qwen3_5", False)
    ((bracket,), (brace,), (one,)) = ids("["), ids("{"), ids("1")
    quote = ids('{"')[0]
    steer = {"bad": (one, -100.0), "good": (brace, -100.0)}
    limited = [
        request(
            name,
            [5, 6, 7],
            SamplingParams(max_tokens=30, temperature=0.0, logit_bias=(bias, (quote, -100.0))),
            compiled(TOO_WIDE_WITHIN),
        )
        for name, bias in steer.items()
    ]
    driver = drive(model, depth)
    got = driver.run_arrivals({0: limited, 1: make_requests(False)[:5]})
    last = driver.outputs["bad"][-1]
    assert isinstance(last.error, GrammarError)
    assert last.finish_reason == "error"
    assert "items" in str(last.error)
    assert got["bad"] in ([], [bracket])
    assert got["good"] == list(plain(model, limited[1], VOCAB, (EOS,)).tokens)
    for name in ("r0", "r1", "r2", "r3", "r4"):
        ties.check(f"beside a failed grammar {name}", got[name], reference[name])
    assert driver.core.stats().num_requests_running == 0


def test_a_first_token_that_cannot_be_masked_is_an_error_of_its_row_alone(tiny_models, monkeypatch):
    model = tiny_models["qwen3_next"]
    driver = drive(model, 2)
    wanted = make_requests(False)
    bad = driver.add(wanted[0])
    bad.constraint.advance([5])  # No answer begins with "b": its matcher fails.
    for each in wanted[1:3]:
        driver.add(each)
    got = driver.run()
    assert got["r0"] == []
    assert isinstance(driver.outputs["r0"][-1].error, GrammarError)
    for each in wanted[1:3]:
        assert tuple(got[each.request_id]) == plain(model, each, VOCAB, (EOS,)).tokens


def test_only_a_batch_with_a_grammar_goes_without_look_ahead(tiny_models):
    """And only until its rows' grammars have no more to say."""
    wanted = {r.sampling.grammar: r for r in make_requests(False)}
    driver = drive(tiny_models["qwen3_next"], 2)
    free = request("free", [5, 6, 7], SamplingParams(max_tokens=60, temperature=0.0))
    driver.add(free)
    driver.step()
    driver.step()
    for _ in range(4):
        driver.step()
        assert driver.core._in_flight
    budget = wanted[GrammarSpec("free", free_until="</think>", free_tokens=5)]
    row = driver.add(budget)
    while not driver.outputs[budget.request_id]:
        driver.step()
        assert driver.core._in_flight
    without = 0
    while row.needs_host:
        driver.step()
        assert bool(driver.core._in_flight) != row.needs_host
        without += 1
    assert 2 <= without <= 6
    for _ in range(3):
        driver.step()
        assert driver.core._in_flight
    driver.run()
    model = tiny_models["qwen3_next"]
    for each in (free, budget):
        assert tuple(driver.tokens(each.request_id)) == plain(model, each, VOCAB, (EOS,)).tokens


def test_logprobs_are_those_of_the_model_not_of_the_mask(tiny_models):
    reports = []
    for depth in (0, 3):
        driver = drive(tiny_models["qwen3_next"], depth)
        sampling = SamplingParams(max_tokens=12, temperature=0.0, top_logprobs=2)
        driver.add(request("a", [5, 6, 7], sampling, compiled(SPECS[0])))
        driver.run()
        reports.append([p for o in driver.outputs["a"] for p in o.logprobs])
    for one, other in zip(*reports, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-4
        assert [t for t, _ in one.top] == [t for t, _ in other.top]
    # The mask had to take tokens that the model finds less likely than its first.
    assert sum(p.logprob < p.top[0][1] for p in reports[0]) >= 6


def test_drafts_are_masked_so_that_they_are_accepted(tiny_models):
    """A choice between two words that part at their first letter: what follows it is certain."""
    words = json.dumps(["abcdefghij", "klmnopqrst"])
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    driver = drive(tiny_models["qwen3_5"], 4)
    driver.add(request("a", [5, 6, 7], sampling, compiled(GrammarSpec("choice", words))))
    driver.run()
    stats = driver.core.stats()
    # 11 tokens in windows of 5: a random head's drafts would hardly ever be right.
    assert stats.num_drafts <= 3
    assert stats.num_accepted_tokens >= 7


def test_what_the_engine_refuses(tiny_models):
    config = EngineConfig(num_draft_tokens=1)
    engine = build_engine(tiny_models["qwen3_next"], config, VOCAB, (EOS,))
    engine.start(lambda outputs: None)
    try:
        bare = SamplingParams(max_tokens=3, grammar=SPECS[0])
        with pytest.raises(InvalidRequestError, match="not been compiled"):
            engine.submit(Request("a", (5,), bare))
        endless = SamplingParams(max_tokens=3, ignore_eos=True)
        with pytest.raises(InvalidRequestError) as caught:
            engine.submit(request("a", [5], endless, compiled(SPECS[0])))
        assert caught.value.param == "ignore_eos"
    finally:
        engine.stop()


def test_a_failure_on_the_device_ends_the_step_and_not_the_engine(tiny_models, monkeypatch, caplog):
    model = tiny_models["qwen3_next"]
    driver = drive(model, 2)
    wanted = make_requests(False)
    driver.add(wanted[0])
    driver.add(wanted[3])
    for _ in range(3):
        driver.step()
    original = GrammarMasks.advance

    def broken(self, tokens, num_kept):
        monkeypatch.setattr(GrammarMasks, "advance", original)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(GrammarMasks, "advance", broken)
    driver.run()
    for name in ("r0", "r3"):
        assert isinstance(driver.outputs[name][-1].error, StepError)
    driver.add(wanted[2])
    assert tuple(driver.run()["r2"]) == plain(model, wanted[2], VOCAB, (EOS,)).tokens
