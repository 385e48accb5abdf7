"""Warm equals cold: whatever is taken from the prefix cache, the tokens are plain decoding's."""

import gc
import itertools
from contextlib import closing

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.engine.step import InFlightStep
from mlx_mtp.prefix import cache as prefix_module
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.prefix.radix_tree import PrefixTree
from mlx_mtp.prefix.segments import Segment
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from tests.cache.prefixes import FINGERPRINT, nodes
from tests.engine.cases import EOS, SAMPLED, ask, check, check_head_cache, driver, words
from tests.grammars import compiled
from tests.harness import greedy, request
from tests.tiny_models import FAMILIES

QUICK = [("qwen3_next", 0, True), ("qwen3_5", 3, True), ("qwen3_5_moe", "auto", False)]
CORNERS = itertools.product(FAMILIES, (0, 1, 3, "auto"), (True, False))


@pytest.mark.parametrize(
    ("family", "depth", "overlap"),
    [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.full) for c in CORNERS],
)
def test_a_conversation_goes_on(tiny_models, ties, family, depth, overlap):
    """Each turn begins where the last answer ended; then it is asked again, and edited."""
    model = tiny_models[family]
    warm = driver(model, depth, overlap=overlap)
    history = [*words(1, 21), EOS, *words(2, 9), EOS, 5]
    held = 0
    for turn in range(3):
        sampling = SAMPLED[turn] if turn else greedy(13, ignore_eos=True)
        asked = request(f"turn {turn}", history, sampling)
        ask(warm, asked)
        check(warm, model, ties, asked)
        answer = warm.tokens(asked.request_id)
        assert warm.reused(asked.request_id) == held, "the end of the last answer was not found"
        held = len(history) + len(answer) - 1
        history = [*history, *answer, EOS, *words(10 + turn, 7), EOS, 5]
    again = request("again", asked.prompt_token_ids, greedy(9))
    edited = request("edited", [*history[:31], *words(20, 12)], greedy(9))
    ask(warm, again, edited)
    check(warm, model, ties, again, edited)
    assert warm.reused("again") == len(asked.prompt_token_ids)
    assert 16 <= warm.reused("edited") <= 31


def test_grammars_and_penalties_on_a_cached_prompt(tiny_models, ties):
    """And the choices of one prompt, which is computed once."""
    model, prompt = tiny_models["qwen3_next"], words(8, 35)
    grammar = compiled(GrammarSpec("regex", "[a-z]{4,9}[0-9]+"))
    warm = driver(model, 2)
    ask(warm, request("before", prompt, greedy(3)))
    # An exact hit, and one that goes on beside it.
    constrained = request("grammar", prompt, greedy(9), grammar)
    longer = request("longer", [*prompt, 5, 6, 7], SAMPLED[3])
    ask(warm, constrained, longer)
    check(warm, model, ties, constrained, longer)
    assert [warm.reused(name) for name in ("grammar", "longer")] == [len(prompt)] * 2
    warm = driver(model, 2)
    sampling = [SamplingParams(max_tokens=9, temperature=1.0, seed=3, choice=i) for i in range(4)]
    wanted = [request(f"choice {i}", words(7, 50), s) for i, s in enumerate(sampling)]
    ask(warm, *wanted)
    check(warm, model, ties, *wanted)
    assert warm.core.scheduler.stats().prompt_tokens == 50


@pytest.mark.parametrize(("family", "depth"), [("qwen3_next", 3), ("qwen3_5", 0)])
def test_the_heads_own_cache_is_complete_behind_a_prefix(tiny_models, family, depth):
    """The row that joins the prefix to what follows it, too; in an exact hit as well."""
    model = tiny_models[family]
    warm = driver(model, depth)
    prompt = words(12, 37)
    ask(warm, request("before", prompt, greedy(6, ignore_eos=True)))
    # Where they part the head's row depends on the token that follows, so each has its own.
    branch = [*prompt[:20], *words(14, 25)]
    ask(warm, request("parting", branch, greedy(6, ignore_eos=True)))
    for name, text in (
        ("branch", [*branch, 5, 6]),
        ("exact", prompt),
        ("longer", [*prompt, *words(13, 20)]),
        ("answer", [*prompt, *warm.tokens("before"), 5]),
    ):
        warm.add(request(name, text, greedy(30, ignore_eos=True)))
        while len(warm.tokens(name)) < 8:
            warm.step()
        assert warm.reused(name) >= len(prompt)
        check_head_cache(warm, model, name)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.full)])
def test_quantized_prefixes(demo_model, tmp_path, bits):
    """Smaller, found all the same, drafted for as before, and the same from the disk."""
    tokens = [int(t) for t in np.random.default_rng(4).integers(2, 4000, 100)]
    runs, sizes = [], []
    for name, quantization in (("plain", None), ("quantized", bits), ("quantized", bits)):
        with closing(PrefixStore(tmp_path / name, FINGERPRINT, 1 << 30)) as store:
            more = {"vocab_size": 4096, "prefill_step_size": 32}
            run = driver(demo_model, store=store, kv_cache_quantization=quantization, **more)
            if len(runs) < 2:
                # Saved in pieces, and split where the second parts from the first.
                ask(run, request("first token", tokens[:1], greedy(1)))
                ask(run, request("before", tokens, greedy(20)))
                ask(run, request("other", [*tokens[:50], *tokens[:30]], greedy(20)))
                answer = run.tokens("before")
                assert run.reused("other") == 32
            ask(run, request("after", [*tokens, *answer, 7, 8], greedy(30)))
        assert run.reused("after") == (119 if len(runs) < 2 else 122)
        runs.append(run)
        sizes.append(sum(n.kv.nbytes for n in nodes(run.prefixes.tree)))
    # A scale and a bias of 4 bytes each stand for 64 values.
    assert sizes[1] / sizes[0] == pytest.approx(bits / 32 + 8 / 64 / 4, abs=0.01)
    accepted = [sum(o.num_accepted_tokens for o in run.outputs["after"]) for run in runs]
    assert accepted[1] > 0.6 * accepted[0]
    assert runs[2].tokens("after") == runs[1].tokens("after")


def test_what_goes_wrong_with_the_cache_hits_no_request(tiny_models, ties, monkeypatch, caplog):
    model = tiny_models["qwen3_next"]
    prompt = words(16, 40)

    def broken(*parts, **more):
        raise MemoryError("no room for a copy")

    for owner, name in (
        (prefix_module, "take_segment"),
        (prefix_module, "take_snapshot"),
        (Segment, "cut"),
        (PrefixTree, "insert"),
        (prefix_module, "restore"),
    ):
        warm = driver(model, 2)
        if not name.startswith("take"):
            ask(warm, request("before", prompt, greedy(9)))
        parted = prompt[:20] if name == "cut" else prompt
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            wanted = [request(f"{name} {i}", [*parted, *prompt, i], greedy(9)) for i in range(2)]
            ask(warm, *wanted)
        check(warm, model, ties, *wanted)
        if name.startswith("take"):
            assert len(warm.prefixes.tree) == 0
    assert [warm.reused(r.request_id) for r in wanted] == [0, 0]
    # What could not be restored was forgotten, and has been saved anew.
    ask(warm, request("after", [*wanted[0].prompt_token_ids, 6], greedy(3)))
    assert warm.reused("after") == 81
    assert "could not be restored" in caplog.text


@pytest.mark.parametrize("where", ["read", "launch"])
def test_a_step_that_fails_saves_nothing(tiny_models, monkeypatch, where):
    """Nor does the chunk behind it, which is planned and launched before that is read."""
    model = tiny_models["qwen3_5"]
    warm = driver(model, 2, min_gain=20)  # nothing is saved after the first chunk
    owner, name = (InFlightStep, "read") if where == "read" else (type(model), "hidden")
    original, calls = getattr(owner, name), []

    def failing(*parts):
        calls.append(parts)
        if len(calls) == 1:
            raise RuntimeError("the device went away")
        return original(*parts)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        ask(warm, request("lost", words(17, 60), greedy(5)))
    assert warm.reason("lost") == "error"
    assert where == "launch" or len(calls) > 1
    assert len(warm.prefixes.tree) == warm.prefixes.tree.nbytes == 0


def test_the_bytes_that_are_counted_are_those_that_are_held(tiny_models):
    """No entry keeps a batch's whole buffer alive, or that of the node it was split from."""
    warm = driver(tiny_models["qwen3_next"], 2, prefill_step_size=64)

    def held() -> int:
        warm.runner.batches.decoding = None
        gc.collect()
        mx.synchronize()
        return mx.get_active_memory()

    ask(warm, request("warm up", words(19, 60), greedy(5)))
    warm.prefixes.tree.clear()
    before = held()
    for number in range(5):
        text = [*words(20, 400 - 80 * number), *words(number + 30, 70)]
        ask(warm, request(f"r{number}", text, greedy(2, ignore_eos=True)))
    assert warm.prefixes.tree.nbytes > 1_500_000
    # mlx copies no slice that leaves out less than 16 KB of its buffer.
    assert held() - before == pytest.approx(warm.prefixes.tree.nbytes, rel=0.1)
