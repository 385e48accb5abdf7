"""Answers with limits on their tokens, compared with NumPy and mlx-lm, one token at a time."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request
from mlx_mtp.errors import GrammarError
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from tests.support.cases import EOS, STEP
from tests.support.grammars import bad_words, compiled, ids, texts
from tests.support.harness import (
    Driver,
    OracleDrafter,
    Plain,
    PlainMask,
    greedy,
    request,
    slow_scores,
)
from tests.support.quick import diagonal
from tests.support.tiny_models import VOCAB

ANSWER = 24


def slow(model: LoadedModel, wanted: Request, *words: str) -> tuple[Plain, bool]:
    """Decode the reference answer: tries each token, and searches the whole text for `words`.

    Returns the answer, and True if it ended because no token was allowed.
    """
    p, prompt = wanted.sampling, list(wanted.prompt_token_ids)
    stops = [*p.stop_token_ids, *([] if p.ignore_eos else [EOS])]
    grammar = PlainMask(wanted.grammar) if wanted.grammar is not None else None
    cache = make_prompt_cache(model.model)
    output: list[int] = []
    gaps: list[float] = []
    new = prompt
    while len(output) < p.max_tokens and not set(stops) & set(output[-1:]):
        logits = np.array(model.model(mx.array([new]), cache=cache)[0, -1].astype(mx.float32))
        text = b"".join(texts()[token] for token in output)
        banned = {t for t in range(VOCAB) if any(w.encode() in text + texts()[t] for w in words)}
        if grammar is not None:
            bits = np.unpackbits(np.array(grammar.mask()), bitorder="little")[:VOCAB]
            banned |= set(np.flatnonzero(bits == 0).tolist())
        scores = slow_scores(p, logits, prompt, output, stops, list(banned))
        second, first = np.sort(scores)[-2:]
        if first == -np.inf:
            return Plain(tuple(output), tuple(gaps)), True
        gaps.append(float(first - second))
        new = [int(np.argmax(scores))]
        output += new
        if grammar is not None and output[-1] not in stops:
            grammar.consume(output[-1])
    return Plain(tuple(output), tuple(gaps)), False


def drawn(random: np.random.Generator, name: str) -> Request:
    """Returns a request with some of the limits; one in four has none."""
    stops = random.choice(VOCAB, 12, replace=False).tolist()
    given = {
        "temperature": float(random.choice([0.0, 0.7, 1.3])),
        "seed": int(random.integers(1 << 40)),
        "stop_token_ids": tuple(stops[: random.integers(0, 12)]),
    }
    limits = {
        "min_tokens": int(random.integers(1, 20)),
        "repetition_context_size": int(random.integers(1, 8)),
        "allowed_token_ids": tuple(
            random.choice(VOCAB, random.integers(3, 40), replace=False).tolist()
        ),
        "top_k": int(random.integers(0, 20)),
        "frequency_penalty": 0.5,
    }
    plain = random.random() < 0.25
    given |= {n: value for n, value in limits.items() if not plain and random.random() < 0.5}
    given |= {"repetition_penalty": 4.0} if "repetition_context_size" in given else {}
    prompt = random.integers(4, VOCAB, random.integers(1, 20)).tolist()
    return request(name, prompt, SamplingParams(max_tokens=ANSWER, **given))


def without(wanted: Request, *words: str) -> Request:
    return dataclasses.replace(wanted, bad_words=bad_words(*words) if words else None)


@pytest.fixture(scope="module")
def answers(tiny_models):
    """Requests, their reference answers, and whether each ends in a dead end."""
    random, model, found = np.random.default_rng(14), tiny_models["qwen3_5"], []
    for n in range(24):
        wanted = drawn(random, f"r{n}")
        said = b"".join(texts()[token] for token in slow(model, wanted)[0].tokens)
        # For two in three, words of their unlimited answer are forbidden.
        starts = range(0, len(said), 7) if n % 3 else ()
        pieces = [said[start : start + 1 + n % 4] for start in starts]
        words = [piece.decode() for piece in pieces if piece.isascii()]
        found.append((without(wanted, *words), *slow(model, wanted, *words)))
    # With few tokens, those that have just left the penalty's context are often drawn again.
    for n in range(3):
        few = {"allowed_token_ids": (20, 21, 22, 23), "repetition_penalty": 9.0}
        sampling = SamplingParams(max_tokens=ANSWER, seed=n, repetition_context_size=n + 1, **few)
        wanted = request(f"few{n}", [20, 21, 22], sampling)
        found.append((wanted, *slow(model, wanted)))
    # With a grammar, which can allow only the end before `min_tokens`.
    grammar = compiled(GrammarSpec("regex", "(ab|tru|[0-9]){3}x"))
    for n, words in enumerate((("12", "3"), ("aba", "x1"), ())):
        sampling = SamplingParams(max_tokens=ANSWER, seed=n, min_tokens=9)
        wanted = request(f"g{n}", [5, n], sampling, grammar)
        found.append((without(wanted, *words), *slow(model, wanted, *words)))
    return found


@diagonal(depth=(0, 1, 2, 3), drafts=("head", "right", "mixed"))
def test_tokens_equal_the_slow_reference(tiny_models, answers, ties, depth, drafts):
    """Requests join one after the other, so that rows with and without limits run together."""
    known = {r.request_id: (*r.prompt_token_ids, *found.tokens) for r, found, _ in answers}
    rate = {"right": 1.0, "mixed": 0.6}.get(drafts)
    driver = Driver(
        tiny_models["qwen3_5"],
        vocab_size=VOCAB,
        stop_ids=(EOS,),
        config=EngineConfig(num_draft_tokens=depth, prefill_step_size=STEP),
        drafter=None if rate is None else OracleDrafter(known, VOCAB, rate),
    )
    threes = {n: [r for r, *_ in answers[3 * n : 3 * n + 3]] for n in range(10)}
    got = driver.run_arrivals(threes)
    for wanted, found, dead_end in answers:
        tokens, last = got[wanted.request_id], driver.outputs[wanted.request_id][-1]
        assert isinstance(last.error, GrammarError) == dead_end
        if dead_end:  # Tokens of the step that met the dead end are not delivered.
            found = Plain(found.tokens[: len(tokens)], found.gaps)
        ties.check(f"{drafts} {depth} {wanted.request_id}", tokens, found)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_dead_end_is_an_error_of_its_row_alone(tiny_models, depth):
    """A row without an allowed token fails, and does not deliver the sampler's token 0."""
    (a,), (b,), (one,) = ids("a"), ids("b"), ids("1")
    fixed, digits = (compiled(GrammarSpec("regex", regex)) for regex in ("1ab", "[0-9]+"))
    rows = {
        "grammar": without(request("grammar", [5], greedy(9), fixed), "ab"),
        "allowed": without(request("allowed", [5], greedy(9, allowed_token_ids=(0, b))), "b", "<"),
        "both": request("both", [5], greedy(9, allowed_token_ids=(0, a)), digits),
        "free": request("free", [5], greedy(9)),
    }
    config = EngineConfig(num_draft_tokens=depth)
    driver = Driver(tiny_models["qwen3_5"], vocab_size=VOCAB, config=config)
    got = driver.run_arrivals({0: list(rows.values())})
    for name, tokens in (("grammar", [one, a]), ("allowed", []), ("both", [])):
        error = driver.outputs[name][-1].error
        assert isinstance(error, GrammarError) and "allowed_token_ids" in str(error)
        assert got[name] == tokens[: len(got[name])]
    assert len(got["free"]) == 9
