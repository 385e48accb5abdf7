"""Logprobs of the prompt are the model's own, for all chunks, batches and drafts."""

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.engine.logprobs import prompt_scores
from mlx_mtp.engine.memory import PROMPT_POSITIONS
from mlx_mtp.engine.request import TokenLogprobs
from mlx_mtp.sampling.params import SamplingParams
from tests.support.cases import EOS, STEP, ask, driver, words
from tests.support.harness import Driver, greedy, plain, request
from tests.support.tiny_models import FAMILIES, VOCAB

CLOSE = 1e-4
ROUNDING = 1e-3  # tolerance where random weights amplify rounding
TOP = 3
# One and two tokens, around a chunk's end, and several chunks.
LENGTHS = (1, 2, STEP - 1, STEP, STEP + 1, 33, 50)


def prompt(length: int) -> list[int]:
    """Returns a prompt with turn ends, where prefill chunks end to save the prefix."""
    tokens = words(length, length)
    tokens[5::9] = [EOS] * len(tokens[5::9])
    return tokens


def found_by(run: Driver, name: str) -> list[TokenLogprobs]:
    first, *others = run.outputs[name]
    assert not any(output.prompt_logprobs for output in others)
    return list(first.prompt_logprobs)


def check_plain(found: list[TokenLogprobs], model, tokens, close: float) -> None:
    """Check logprobs against one forward pass of mlx-lm over all tokens."""
    logits = model.model(mx.array([tokens]))[0].astype(mx.float32)
    table = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for entry, row, token in zip(found, table, tokens[1:], strict=False):
        assert entry.logprob == pytest.approx(row[token], abs=close)
        assert (row > row[token] + close).sum() < entry.rank <= (row > row[token] - close).sum()
        ids, values = zip(*entry.top)
        np.testing.assert_allclose(values, np.sort(row)[: -TOP - 1 : -1], rtol=0, atol=close)
        np.testing.assert_allclose(values, row[list(ids)], rtol=0, atol=close)
    assert len(found) == len(tokens) - 1


@pytest.mark.parametrize(
    ("family", "depth", "overlap"), list(zip(FAMILIES, (0, 1, 3), (True, False, True)))
)
def test_in_a_mixed_batch(tiny_models, ties, family, depth, overlap):
    """Short prompts share a chunk, others take several; rows ask for different logprobs or none."""
    model, run = tiny_models[family], driver(tiny_models[family], depth, overlap=overlap)
    sampled = SamplingParams(max_tokens=12, temperature=0.9)
    wanted = [
        request(f"{length}", prompt(length), replace(sampled, seed=length, prompt_logprobs=top))
        for length, top in zip(LENGTHS, (TOP, 0, None, TOP, TOP, None, TOP), strict=True)
    ]
    run.run_arrivals({0: wanted[2:5], 1: wanted[:2], 4: wanted[5:]})
    for each in wanted:
        found, top = found_by(run, each.request_id), each.sampling.prompt_logprobs
        if top == TOP:
            check_plain(found, model, each.prompt_token_ids, ROUNDING)
        assert len(found) == (0 if top is None else len(each.prompt_token_ids) - 1)
        ties.check(each.request_id, run.tokens(each.request_id), plain(model, each, VOCAB, (EOS,)))


@pytest.mark.parametrize("depth", [0, 3])
def test_they_equal_those_of_decoding_the_same_tokens(demo_model, depth):
    """An answer's logprobs, with and without drafts, equal those of a prompt of the same tokens."""
    text, size = [int(t) for t in np.random.default_rng(1).integers(300, 4000, 20)], 4096
    run = driver(demo_model, depth, vocab_size=size, prefill_step_size=PROMPT_POSITIONS + 8)
    sampling = SamplingParams(max_tokens=60, temperature=0.8, seed=3, top_logprobs=TOP)
    ask(run, request("answer", text, replace(sampling, ignore_eos=True)))
    whole = [*text, *run.tokens("answer")]
    # Computed again, although it is in the prefix cache, and without sampling a token.
    ask(run, request("prompt", whole, greedy(0, prompt_logprobs=TOP)))
    assert (run.tokens("prompt"), run.reason("prompt")) == ([], "length")
    asked = found_by(run, "prompt")
    check_plain(asked, demo_model, whole, CLOSE)
    drawn = [entry for output in run.outputs["answer"] for entry in output.logprobs]
    for one, other in zip(asked[len(text) - 1 :], drawn, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=CLOSE)
        for (_, value), (_, decoded) in zip(one.top, other.top, strict=True):
            assert value == pytest.approx(decoded, abs=CLOSE)


def test_they_read_no_cached_prefix_and_save_theirs(tiny_models, ties):
    """Another request with the prompt waits for its prefix; it waits for none and looks none up."""
    model, tokens = tiny_models["qwen3_next"], prompt(45)
    run = driver(model, 2)
    sampling = greedy(9, prompt_logprobs=TOP)
    first, other = request("first", tokens, sampling), request("other", tokens, greedy(9))
    again = request("again", tokens, sampling)
    ask(run, first, other)
    ask(run, again)
    assert [run.reused(name) for name in ("first", "other", "again")] == [0, 45, 0]
    assert run.reuse.num_queries == 45
    for each in (first, other, again):
        ties.check(each.request_id, run.tokens(each.request_id), plain(model, each, VOCAB, (EOS,)))
    for name in ("first", "again"):
        check_plain(found_by(run, name), model, tokens, ROUNDING)


def test_the_logits_of_few_positions_are_in_memory_at_once():
    count, size, hidden = 1024, 10_000, 16
    table, states = mx.random.normal((hidden, size)), mx.random.normal((count, hidden))
    mx.eval(table, states)
    model = SimpleNamespace(logits=lambda hidden: hidden @ table)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    scores = prompt_scores(model, states, mx.arange(count), [count], [count], [TOP], size)
    mx.async_eval(scores)
    assert scores.tables[0].shape == (count,)
    mx.synchronize()
    assert mx.get_peak_memory() - before < 4 * size * count / 2
