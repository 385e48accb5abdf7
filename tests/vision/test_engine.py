"""Rows with images give the tokens of a slow reference, which computes each alone in one piece."""

import dataclasses
import itertools

import mlx.core as mx
import pytest

from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.engine.request import RequestOptions
from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.speculative.host_sources import HostSources
from mlx_mtp.vision import tower
from mlx_mtp.vision.images import ImageSizes
from tests.support.cases import EOS, SAMPLED, SPECS, STEP, Erratic, RandomChunks
from tests.support.grammars import compiled
from tests.support.harness import greedy
from tests.support.prefixes import FINGERPRINT
from tests.support.quick import covering
from tests.support.tiny_models import IMAGE_IDS, VOCAB
from tests.vision.seeing import (
    A,
    B,
    C,
    check_logprobs,
    make_requests,
    picture,
    seeing,
    seeing_driver,
)

FACTORS = {
    "family": ("qwen3_5", "qwen3_5_moe"),
    "depth": (0, 1, 3, 8, "erratic", "auto"),
    "requests": ("greedy", "sampled"),
    "arrivals": ("together", "staggered", "cancelled"),
    "overlap": (True, False),
    "chunks": ("whole", "random"),
}
CASES = [
    # All these cases need only a few slow references.
    case | {"requests": "sampled" if case["family"] == "qwen3_5" else "greedy"}
    for case in covering({name: values[-2:] for name, values in FACTORS.items()})[:4]
]
CASES += [
    pytest.param(dict(zip(FACTORS, values)), marks=pytest.mark.full)
    for values in itertools.product(*FACTORS.values())
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_tokens_equal_the_slow_reference(seeing_models, slowly, ties, case):
    family, depth = case["family"], case["depth"]
    requests = make_requests(case["requests"])
    erratic = Erratic(seed=len(case["requests"])) if depth == "erratic" else None
    driver = seeing_driver(
        seeing_models[family],
        config=EngineConfig(
            num_draft_tokens=0 if erratic else depth,
            prefill_step_size=STEP,
            overlap=case["overlap"],
        ),
        depth=erratic,
        host_sources=HostSources(["copy"], 1 << 20) if erratic else None,
        prefills=RandomChunks if case["chunks"] == "random" else PrefillScheduler,
    )
    arrivals, cancels = {0: requests}, {}
    if case["arrivals"] != "together":
        arrivals = {2 * number: [each] for number, each in enumerate(requests)}
    if case["arrivals"] == "cancelled":
        cancels = {5: [requests[1].request_id], 9: [requests[4].request_id]}
    driver.run_arrivals(arrivals, cancels)
    gone = [name for names in cancels.values() for name in names]
    for each in requests:
        reference = slowly(family, each)
        got = driver.tokens(each.request_id)
        assert not set(got) & set(IMAGE_IDS.values())
        if each.request_id in gone:
            reference = reference._replace(tokens=reference.tokens[: len(got)])
        ties.check(each.request_id, got, reference)


class EveryChunk(PrefillScheduler):
    """Plans chunks of one length."""

    length = 1

    def most_tokens(self, context=0, left=0, *, beside):
        return self.length


@pytest.mark.parametrize(
    ("depth", "lengths"),
    [
        (3, (1, 5)),
        *(pytest.param(depth, range(1, 30), marks=pytest.mark.full) for depth in (0, 1, 3)),
    ],
)
def test_chunk_borders_at_every_place(seeing_models, slowly, ties, depth, lengths):
    wanted = seeing("borders", [5, 6, B, 7, A, C, 8, 9], greedy(5))
    reference = slowly("qwen3_5", wanted)
    for length in lengths:
        driver = seeing_driver(
            seeing_models["qwen3_5"],
            config=EngineConfig(num_draft_tokens=depth, prefill_step_size=64),
            prefills=lambda config: vary(EveryChunk(config), length),  # noqa: B023
        )
        driver.add(wanted)
        ties.check(f"chunks of {length}", driver.run()["borders"], reference)


def vary(prefills, length):
    prefills.length = length
    return prefills


@pytest.mark.parametrize("exact", [False, True])
def test_prefixes(seeing_models, slowly, ties, exact):
    """Cached prefixes end in, before or after an image; other images follow the same text."""
    text, more = [5, 9, 14, 7], [11, 12, 13]
    other, wide = picture(3, 4, 8), picture(4, 3, 1)
    prompts = {
        "cold": [*text, A, *more],
        "warm": [*text, A, *more],
        "longer": [*text, A, *more, B, *more],
        "other": [*text, other, *more],
        "another size": [*text, wide, *more],
        "twice": [*text, A, A, *more],
        "text": [*text, *[90] * 12, *more],
    }
    driver = seeing_driver(
        seeing_models["qwen3_5"],
        config=EngineConfig(
            num_draft_tokens=2, prefill_step_size=8, prefix_cache_size=1 << 24, exact=exact
        ),
        min_gain=1,
    )
    for name, items in prompts.items():
        wanted = seeing(name, items, greedy(6))
        driver.add(wanted)
        ties.check(name, driver.run()[name], slowly("qwen3_5", wanted))
    reused = {name: driver.reused(name) for name in prompts}
    assert reused["cold"] == 0 and reused["warm"] >= 16 and reused["longer"] >= 16
    assert max(reused[name] for name in ("other", "another size", "text")) <= 4
    assert reused["twice"] >= 8


def test_grammars_choices_and_logprobs(seeing_models, slowly, ties):
    """Several answers to one image run in a batch."""
    driver = seeing_driver(
        seeing_models["qwen3_5"],
        config=EngineConfig(num_draft_tokens=3, prefill_step_size=8),
    )
    items = [5, 6, A, 7]
    requests = []
    for number, spec in enumerate(SPECS[2:4]):
        requests.append(seeing(f"g{number}", items, greedy(12), grammar=compiled(spec)))
    for number in range(3):
        sampling = dataclasses.replace(SAMPLED[0], choice=number, top_logprobs=2)
        requests.append(seeing(f"n{number}", items, sampling))
    many = [9, A, B, 7, C, 8, 5]
    requests.append(seeing("prompt", many, greedy(9, top_logprobs=3, prompt_logprobs=2)))
    for each in requests:
        driver.add(each)
    driver.run()
    for each in requests:
        ties.check(each.request_id, driver.tokens(each.request_id), slowly("qwen3_5", each))
        if each.sampling.top_logprobs is not None:
            model, outputs = seeing_models["qwen3_5"], driver.outputs[each.request_id]
            assert check_logprobs(model, each, outputs) >= len(driver.tokens(each.request_id))


def test_copied_drafts_have_no_image_tokens(seeing_models, slowly, ties):
    """If an answer repeats the text before an image, drafts end there, and have no image ids."""
    wanted = seeing("copy", [5, 6, 7, 8, A, 5, 6, 7, 8], greedy(20))
    wanted = dataclasses.replace(wanted, options=RequestOptions(trace=True))
    driver = seeing_driver(
        seeing_models["qwen3_5"],
        config=EngineConfig(num_draft_tokens=2),
        depth=Erratic(seed=4),
        host_sources=HostSources(["copy"], 1 << 20),
    )
    sequence = driver.add(wanted)
    ties.check("copy", driver.run()["copy"], slowly("qwen3_5", wanted))
    (drafter,) = sequence.drafting.host.values()
    assert not sequence.drafting.unread  # It learns from the last tokens, too.
    assert not {90, -1} & set(drafter.next_run)
    assert sequence.copied[4:16] == (-1,) * 12


@pytest.mark.parametrize("limit", [0, pytest.param(1 << 20, marks=pytest.mark.full)])
def test_a_tower_in_parts(seeing_models, slowly, ties, monkeypatch, limit):
    """A step runs as many parts of the tower as the pause allows, and then no chunk.

    The clock counts parts; a part of a layer's keys takes as long as two others.
    """
    pause, now, costs = 9, [0.0], {}
    parts, async_eval = tower.VisionTower.parts, mx.async_eval

    def noted(self, rgb):
        for part in parts(self, rgb):
            costs[id(part)] = 1 + (len(part) > 1)
            yield part

    def evaluated(*arrays):
        now[0] += costs.pop(id(arrays[0]), 0) if arrays else 0
        async_eval(*arrays)

    monkeypatch.setattr(tower, "PART_TOKENS", 2)
    monkeypatch.setattr(tower.VisionTower, "parts", noted)
    monkeypatch.setattr(mx, "async_eval", evaluated)
    monkeypatch.setattr("mlx_mtp.engine.prompts.perf_counter", lambda: now[0])
    requests = [
        seeing("text", [5, 6, 7], greedy(99, ignore_eos=True)),
        seeing("one", [5, A, 7, B, 8, *range(20, 40)], greedy(9)),
        seeing("two", [6, B, 7, 9, C, 8], greedy(9)),
        seeing("three", [6, A, A, 7], greedy(9)),
    ]
    config = EngineConfig(
        num_draft_tokens=2,
        prefill_step_size=8,
        prefix_cache_size=1 << 24,
        max_decode_pause=1e3 * pause,
    )
    driver = seeing_driver(seeing_models["qwen3_5"], config, vision_limit=limit, min_gain=1)
    driver.add(requests[0])
    while driver.runner.batches.decoding is None:
        driver.step()
    for each in requests[1:]:
        driver.add(each)
    spent = []
    while not all(driver.outputs[r.request_id] for r in requests[1:]):
        before, told = now[0], len(driver.tokens("text"))
        driver.step()
        if now[0] > before:
            spent.append(now[0] - before)
            assert not any(s.is_prefill and s.rows for s in driver.core._in_flight)
            assert len(driver.tokens("text")) > told
    driver.run()
    for each in requests:
        ties.check(each.request_id, driver.tokens(each.request_id), slowly("qwen3_5", each))
    assert max(spent) <= pause + 1
    # Two steps together take more than the pause, unless an image ends.
    assert len(spent) <= 9 + 2 * sum(spent) / pause
    assert len(driver.prompts._rows) == (3 if limit else 1)


def test_prefixes_from_the_disk(seeing_models, slowly, ties, tmp_path):
    """After a restart the same image continues a stored prefix, and another one does not."""
    config = EngineConfig(num_draft_tokens=2, prefill_step_size=8, prefix_cache_size=1 << 24)
    reused = {}
    for name, image in (("first", A), ("again", A), ("other", picture(3, 4, 8))):
        store = PrefixStore(tmp_path, FINGERPRINT, 1 << 30)
        driver = seeing_driver(
            seeing_models["qwen3_5"],
            config=config,
            store=store,
            min_gain=1,
        )
        wanted = seeing(name, [5, 9, 14, 7, image, 11, 12], greedy(6))
        driver.add(wanted)
        ties.check(name, driver.run()[name], slowly("qwen3_5", wanted))
        reused[name] = driver.reused(name)
        store.close()
    assert reused["first"] == 0 and reused["again"] > 8 and reused["other"] <= 4


def test_ids_of_images_alone_are_no_choice(seeing_models):
    engine = build_engine(seeing_models["qwen3_5"], EngineConfig(), VOCAB, (EOS,))
    assert engine.info.images == ImageSizes(4, 2, token_id=90)
    only = {"allowed_token_ids": (90, 92)}
    with pytest.raises(InvalidRequestError, match="stand for images"):
        engine.submit(seeing("x", [5, 6], greedy(3, **only)))
