"""Rows of any length side by side: each answer equals plain decoding, whatever other rows do."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.decoding import decoding_core
from mlx_mtp.cache import layout
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import runner
from mlx_mtp.engine.request import Request, RequestOptions
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.prefix.radix_tree import root_key
from tests.support.cases import EOS, ROOM, SAMPLED, SPECS, Erratic, words
from tests.support.grammars import compiled
from tests.support.harness import Driver, OracleDrafter, Plain, Ties, greedy, plain, request
from tests.support.tiny_models import FAMILIES, VOCAB


def make_requests(random: np.random.Generator, count: int, longest: int, most: int):
    """Yields requests with prompts of all lengths, many with equal prefixes; some fix the depth."""
    texts = [words(number, longest) for number in range(3)]
    for number in range(count):
        # Many prompts end shortly before a size class, so that an answer's window crosses it.
        border = int(layout.rounded_capacity(int(random.integers(1, longest))))
        length = [border - int(random.integers(0, 30)), int(random.integers(1, longest))][
            number % 2
        ]
        sampling = SAMPLED[number % 5] if number % 3 else greedy(1)
        grammar = compiled(SPECS[number % len(SPECS)]) if number % 5 == 4 else None
        sampling = dataclasses.replace(
            sampling,
            max_tokens=int(random.integers(1, most)),
            ignore_eos=bool(number % 4) and grammar is None,
        )
        depth = (None, 8, None, 0, None, 3, 1)[number % 7]
        prompt = tuple(texts[int(random.integers(3))][: min(length, longest)])
        wanted = request(f"r{number}", prompt, sampling, grammar)
        yield dataclasses.replace(wanted, options=RequestOptions(num_draft_tokens=depth))


def play(
    model: LoadedModel, seed: int, longest: int, most: int, ties: Ties, monkeypatch, oracle: bool
) -> Driver:
    random = np.random.default_rng(seed)
    requests = list(make_requests(random, 10, longest, most))
    stops = {r.request_id: () if r.sampling.ignore_eos else (EOS,) for r in requests}
    known: dict[str, Plain] = {
        r.request_id: plain(model, r, VOCAB, stops[r.request_id]) for r in requests
    }
    answers = {r.request_id: (*r.prompt_token_ids, *known[r.request_id].tokens) for r in requests}
    driver = Driver(
        model,
        vocab_size=VOCAB,
        stop_ids=(EOS,),
        config=EngineConfig(prefill_step_size=128, prefix_cache_size=ROOM, overlap=bool(seed % 2)),
        drafter=OracleDrafter(answers, VOCAB, 0.8, longest + most + 9) if oracle else None,
        depth=Erratic(seed),
    )
    left = int(random.integers(12, 25))
    verify_window = runner.verify_window

    def failing(*given, **more):
        nonlocal left
        left -= 1
        if left == 0:
            raise ValueError("a bug")
        return verify_window(*given, **more)

    monkeypatch.setattr(runner, "verify_window", failing)
    arrivals: dict[int, list[Request]] = {}
    for wanted in requests:
        arrivals.setdefault(int(random.integers(0, 40)), []).append(wanted)
    gone = [r.request_id for r in requests[:2]]
    for name in list(known)[::2]:  # as if answered before, so that they are copied
        driver.host_sources.keep(root_key(None), known[name].tokens)
    driver.run_arrivals(arrivals, {int(random.integers(5, 60)): gone})
    for name, reference in known.items():
        got = driver.tokens(name)
        if not driver.outputs[name] or driver.reason(name) in (None, "error"):
            reference = Plain(reference.tokens[: len(got)], reference.gaps)
        ties.check(f"{seed} {name}", got, reference)
    for source, accepted in driver.core.scheduler.stats().num_accepted_tokens_per_pos.items():
        ties.num_accepted[source] += sum(accepted)
    return driver


@pytest.mark.usefixtures("small_classes")
@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(f, marks=pytest.mark.full) for f in FAMILIES[1:])]
)
def test_ragged_rows(tiny_models, family, ties, monkeypatch):
    """Rows have random depths and copies, and grow, join, hit the prefix cache and fail."""
    number = FAMILIES.index(family)
    driver = play(tiny_models[family], number, 600, 40, ties, monkeypatch, oracle=number == 0)
    assert driver.reuse.num_hits > 0
    assert ties.num_accepted["copy"] > 0
    assert sum(out.finish_reason == "error" for outs in driver.outputs.values() for out in outs)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(36))
def test_ragged_rows_of_up_to_5000_tokens(tiny_models, seed, ties, monkeypatch):
    """The rows have some 20,000 tokens together."""
    family = FAMILIES[seed % len(FAMILIES)]
    play(tiny_models[family], seed, 5000, 200, ties, monkeypatch, oracle=bool(seed % 2))


@pytest.mark.full
@pytest.mark.parametrize("overlap", [True, False])
def test_a_long_row_is_written_in_place(demo_model, overlap):
    """The KV is not copied, even on the CPU, where a step in flight can read the old arrays."""
    core = decoding_core(demo_model, depth=2, contexts=[60_000], overlap=overlap)
    for _ in range(4):
        core.step()
    mx.synchronize()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    for _ in range(6):
        core.step()
    mx.synchronize()
    caches = core.runner.batches.decoding.cache.kv_caches()
    largest = max(array.nbytes for cache in caches for array in cache.arrays)
    assert mx.get_peak_memory() - held < largest / 2, "of keys or values alone"
