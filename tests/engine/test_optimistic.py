"""Optimistic acceptance: every step equals the rule applied to its drafts, position by position."""

import itertools
import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request, RequestOptions
from mlx_mtp.speculative.host_sources import HostSources
from tests.support.cases import (
    EOS,
    STEP,
    Erratic,
    ask,
    check_head_cache,
    drafter_for,
    driver,
    make_requests,
    words,
)
from tests.support.harness import TIE, Driver, PlainMask, greedy, request, slow_scores
from tests.support.quick import diagonal
from tests.support.tiny_models import VOCAB


def optimistic(wanted: Request, share: float, **more) -> Request:
    return replace(wanted, sampling=replace(wanted.sampling, optimistic=share), **more)


def replay(model, wanted: Request, outputs) -> int:
    """Check a traced request against mlx-lm on its text; returns its optimistic tokens."""
    p, prompt = wanted.sampling, wanted.prompt_token_ids
    cache, before = make_prompt_cache(model.model), prompt
    masks = PlainMask(wanted.grammar) if wanted.grammar is not None else None
    stops, done, found = (EOS, *p.stop_token_ids), [], 0
    for o in outputs:
        drafts = o.drafts
        assert all(place < o.num_accepted_tokens for place in o.optimistic)
        for place, token in enumerate(o.token_ids):
            logits = model.model(mx.array([before]), cache=cache)[0, -1, :VOCAB]
            raw, banned = np.array(logits.astype(mx.float32)), ()
            if masks is not None:
                bits = np.unpackbits(np.array(masks.mask())[0, 0], bitorder="little")[:VOCAB]
                banned = np.flatnonzero(bits == 0)
                masks.consume(token)  # The grammar allows it.
            parts = p, raw, prompt, done, stops, banned
            noisy, likely = slow_scores(*parts), slow_scores(*parts, noise=False)
            drawn = int(np.argmax(noisy))
            last, best = np.sort(noisy)[-2:]
            gap, kept = best - last, False
            if place < len(drafts):
                least = likely[drawn] + (math.log(p.optimistic) if p.optimistic else math.inf)
                draft = drafts[place]
                kept = draft == drawn or (likely[draft] > -np.inf and likely[draft] >= least)
                gap = min(gap, abs(likely[draft] - least))
            told = token, place < o.num_accepted_tokens, place in o.optimistic
            rule = (drafts[place] if kept else drawn), kept, kept and drafts[place] != drawn
            assert told == rule or gap < TIE, (wanted.request_id, len(done), gap, told, rule)
            is_last = place == len(o.token_ids) - 1
            assert is_last or kept
            assert not (is_last and kept) or o.finish_reason is not None
            if o.logprobs:
                # mlx-lm itself differed by 0.0025 between whole and token by token, on one CPU.
                own = logits[token] - mx.logsumexp(logits)
                assert o.logprobs[place].logprob == pytest.approx(own.item(), abs=5e-3)
            done.append(token)
            before = [token]
        found += len(o.optimistic)
    return found


@diagonal(depth=(1, 2, 3, "erratic"), kind=("greedy grammars", "sampled grammars"))
def test_each_step_is_the_rule_on_its_drafts(tiny_models, references, ties, depth, kind):
    """Rows without optimistic acceptance equal plain decoding; copies and mixed depths occur."""
    family = {1: "qwen3_next", 2: "qwen3_5_moe"}.get(depth, "qwen3_5")
    model, reference = tiny_models[family], references(family, kind)
    plainly = make_requests(kind)
    shares = itertools.cycle((0.5, 0.0, 1e-3, 0.9))
    requests = [
        optimistic(r, x, options=RequestOptions(trace=True)) for r, x in zip(plainly, shares)
    ]
    requests[4] = replace(requests[4], sampling=replace(requests[4].sampling, min_tokens=9))
    requests = [replace(r, sampling=replace(r.sampling, top_logprobs=0)) for r in requests]
    requests[8] = replace(requests[8], options=RequestOptions(num_draft_tokens=1, trace=True))
    erratic = Erratic(3) if depth == "erratic" else None
    config = EngineConfig(0 if erratic else depth, prefill_step_size=STEP, overlap=depth != 1)
    sources = HostSources(["copy"], 1 << 20) if erratic else None
    settings = {"config": config, "depth": erratic, "host_sources": sources, "stop_ids": (EOS,)}
    run = Driver(model, vocab_size=VOCAB, **settings)
    run.run_arrivals({0: requests[:5], 4: requests[5:]})
    found = {}
    for wanted in requests:
        name = wanted.request_id
        found[name] = replay(model, wanted, run.outputs[name])
        if not wanted.sampling.optimistic:
            ties.check(name, run.tokens(name), reference[name])
            assert found[name] == 0
    assert sum(found.values()) == run.core.scheduler.stats().num_optimistic_tokens > 3
    if erratic:
        outputs = [o for outs in run.outputs.values() for o in outs]
        assert any(o.optimistic and o.draft_source == "copy" for o in outputs)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_share_of_one_changes_no_greedy_token(tiny_models, references, ties, depth):
    model, reference = tiny_models["qwen3_next"], references("qwen3_next", "greedy grammars")
    run = Driver(model, vocab_size=VOCAB, stop_ids=(EOS,), config=EngineConfig(depth))
    run.run_arrivals({0: [optimistic(r, 1.0) for r in make_requests("greedy grammars")]})
    for name, expected in reference.items():
        ties.check(name, run.tokens(name), expected)


def test_wrong_drafts_are_accepted_where_almost_anything_is(tiny_models, references):
    """With a tiny share most wrong drafts are accepted; without optimistic acceptance none is."""
    model, reference = tiny_models["qwen3_5"], references("qwen3_5", "greedy")
    for share in (0.0, 1e-30):
        requests = [
            optimistic(r, share, options=RequestOptions(trace=True))
            for r in make_requests("greedy")
        ]
        drafter = drafter_for("reject", model, reference, requests)
        settings = {"config": EngineConfig(3), "drafter": drafter, "stop_ids": (EOS,)}
        run = Driver(model, vocab_size=VOCAB, **settings)
        run.run_arrivals({0: requests})
        stats = run.core.scheduler.stats()
        for wanted in requests:
            replay(model, wanted, run.outputs[wanted.request_id])
        if not share:
            assert stats.num_accepted_tokens == 0
    assert stats.num_optimistic_tokens > 0.6 * stats.num_draft_tokens


def test_the_heads_cache_has_the_tokens_that_were_emitted(tiny_models):
    model = tiny_models["qwen3_next"]
    run = Driver(model, vocab_size=VOCAB, config=EngineConfig(3))
    run.add(request("a", range(2, 39), greedy(64, ignore_eos=True, optimistic=1e-3)))
    run.add(request("b", [5], greedy(30, ignore_eos=True)))
    for _ in range(9):
        run.step()
    assert run.core.scheduler.stats().num_optimistic_tokens > 0
    check_head_cache(run, model, "a")


def test_what_is_computed_is_shared_among_optimistic_requests_alone(tiny_models):
    """Optimistic requests share prefixes only with one another, and only under the same salt."""
    run, prompt = driver(tiny_models["qwen3_next"], "auto"), words(8, 40)
    base = replace(
        request("first", prompt, greedy(12, ignore_eos=True)),
        options=RequestOptions(cache_salt="s"),
    )
    ask(run, optimistic(base, 0.3))
    text = (*prompt, *run.tokens("first"), 5)
    for name, share, salt, reused in (
        ("plain", 0.0, "s", 0),
        ("other", 0.3, "", 0),
        ("alike", 0.7, "s", len(text) - 2),
    ):
        asked = replace(
            base, request_id=name, prompt_token_ids=text, options=RequestOptions(cache_salt=salt)
        )
        run.add(optimistic(asked, share))
        run.run()
        assert run.reused(name) == reused
