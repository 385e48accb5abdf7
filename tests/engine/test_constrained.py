"""Grammars in the engine; test_equality.py tests that tokens are equal with MTP on or off."""

import json
from itertools import count

import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.errors import GrammarError, StepError
from mlx_mtp.sampling import grammar_masks
from mlx_mtp.sampling.params import GrammarSpec
from tests.support.cases import SPECS, STEP, make_requests
from tests.support.grammars import EOS, TOO_WIDE_WITHIN, compiled, ids
from tests.support.harness import Driver, greedy, plain, request
from tests.support.tiny_models import VOCAB

KIND = "greedy grammars"


def drive(model, depth: int, **config) -> Driver:
    config = EngineConfig(num_draft_tokens=depth, prefill_step_size=STEP, **config)
    return Driver(model, vocab_size=VOCAB, stop_ids=(EOS,), config=config)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_grammar_that_meets_a_limit_ends_its_own_request_alone(tiny_models, references, depth):
    """One answer is steered to a state without a mask; another with the same grammar is not."""
    model, reference = tiny_models["qwen3_5"], references("qwen3_5", KIND)
    ((bracket,), (brace,), (one,)) = ids("["), ids("{"), ids("1")
    quote = ids('{"')[0]
    limited = []
    for name, other in (("bad", one), ("good", brace)):
        sampling = greedy(30, logit_bias=((other, -100.0), (quote, -100.0)))
        limited.append(request(name, [5, 6, 7], sampling, compiled(TOO_WIDE_WITHIN)))
    driver = drive(model, depth)
    got = driver.run_arrivals({0: limited, 1: make_requests(KIND)[:4]})
    last = driver.outputs["bad"][-1]
    assert isinstance(last.error, GrammarError)
    assert last.finish_reason == "error"
    assert "items" in str(last.error)
    assert got["bad"] in ([], [bracket])
    assert got["good"] == list(plain(model, limited[1], VOCAB, (EOS,)).tokens)
    for name in ("r0", "r1", "r2", "r3"):
        assert tuple(got[name]) == reference[name].tokens
    assert driver.core.scheduler.stats().num_requests_running == 0


def test_a_first_token_that_cannot_be_masked_is_an_error_of_its_row_alone(tiny_models, references):
    driver, wanted = drive(tiny_models["qwen3_next"], 2), make_requests(KIND)
    bad = driver.add(wanted[0])
    bad.constraint.advance([5])  # No answer begins with "b": its matcher fails.
    for each in wanted[1:3]:
        driver.add(each)
    got = driver.run()
    assert got["r0"] == []
    assert isinstance(driver.outputs["r0"][-1].error, GrammarError)
    for name in ("r1", "r2"):
        assert tuple(got[name]) == references("qwen3_next", KIND)[name].tokens


PANIC = type(
    "PanicException", (BaseException,), {}
)  # pyo3's exception has this name, and its type can't be imported.


@pytest.mark.parametrize("rows", ["", "_par", "_par_with_draft_tokens"])
def test_a_panic_of_llguidance_ends_its_step_alone(tiny_models, references, monkeypatch, rows):
    name, calls = f"fill_next_token_bitmask{rows}", count()
    original = getattr(grammar_masks, name)

    def panics(*parts) -> None:
        if next(calls) == 2:
            raise PANIC("index out of bounds")
        original(*parts)

    monkeypatch.setattr(grammar_masks, name, panics)
    driver = drive(tiny_models["qwen3_next"], 2, max_num_seqs=4)
    got = driver.run_arrivals({0: make_requests(KIND)})
    hit = [each for each in got if driver.reason(each) == "error"]
    assert 1 <= len(hit) <= 4
    for each, reference in references("qwen3_next", KIND).items():
        if each in hit:
            error = driver.outputs[each][-1].error
            assert isinstance(error, StepError)
            assert "PanicException: index out of bounds" in str(error)
            assert tuple(got[each]) == reference.tokens[: len(got[each])]
        else:
            assert tuple(got[each]) == reference.tokens
    assert driver.core.scheduler.stats().num_requests_running == 0


def test_only_a_batch_with_a_grammar_goes_without_look_ahead(tiny_models):
    """Look-ahead resumes as soon as no row's grammar constrains it anymore."""
    driver = drive(tiny_models["qwen3_next"], 2)
    driver.add(request("free", [5, 6, 7], greedy(60)))
    driver.step()
    budget = next(r for r in make_requests(KIND) if r.sampling.grammar == SPECS[-1])
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
    driver.step()
    assert driver.core._in_flight


def test_drafts_are_masked_so_that_they_are_accepted(tiny_models):
    """After the first letter of a choice between two words, the mask leaves only right drafts."""
    words = GrammarSpec("choice", json.dumps(["abcdefghij", "klmnopqrst"]))
    driver = drive(tiny_models["qwen3_5"], 4)
    driver.add(request("a", [5, 6, 7], greedy(30), compiled(words)))
    driver.run()
    stats = driver.core.scheduler.stats()
    # 11 tokens in windows of 5: unmasked drafts of a random head would hardly ever be right.
    assert stats.num_draft_windows <= 3
    assert stats.num_accepted_tokens >= 7
