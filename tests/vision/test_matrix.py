"""20,000 tokens of answers to images and texts, each equal to the slow reference."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.speculative.host_sources import HostSources
from tests.support.cases import SAMPLED, SPECS, STEP, Erratic, RandomChunks
from tests.support.grammars import compiled
from tests.support.harness import greedy
from tests.support.tiny_models import IMAGE_IDS
from tests.vision.seeing import check_logprobs, picture, seeing, seeing_driver

NUM_TOKENS = 20_000
DEPTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, "erratic")


def drawn_requests(number: int):
    """Returns requests of all kinds, with up to four images anywhere except at the end."""
    random = np.random.default_rng(number)
    pictures = [picture(*random.integers(1, 6, 2).tolist(), seed) for seed in range(4)]
    requests = []
    for index in range(14):
        items = []
        for _ in range(random.integers(0, 5) if index % 3 else 0):
            items += random.integers(4, 90, random.integers(0, 9)).tolist()
            items.append(pictures[random.integers(0, 4)])
        items += random.integers(4, 90, random.integers(1, 30)).tolist()
        name = f"{number}.{index}"
        if index % 4 == 3:
            spec = SPECS[random.integers(0, len(SPECS))]
            requests.append(seeing(name, items, greedy(24), grammar=compiled(spec)))
            continue
        sampling = [greedy(18), *SAMPLED][index % 6]
        if index % 5 == 0:
            sampling = replace(sampling, top_logprobs=2)
        if index == 10:
            sampling = replace(sampling, prompt_logprobs=1)
        for choice in range(1 + index % 2):  # n > 1
            own = replace(sampling, choice=choice)
            requests.append(seeing(f"{name}.{choice}", items, own))
    return requests


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_thousand_tokens(seeing_models, slowly, ties):
    """Each depth runs with joins, leaves, copies, chunks of any length, cold and warm prefixes."""
    total = logprobs = reused = number = 0
    used = set()
    depths, families = itertools.cycle(DEPTHS), itertools.cycle(seeing_models)
    while total < NUM_TOKENS:
        number, family = number + 1, next(families)
        model, requests = seeing_models[family], drawn_requests(number)
        for depth in itertools.islice(depths, 3):
            used.add((family, depth))
            copies = depth in (3, "erratic")
            driver = seeing_driver(
                model,
                EngineConfig(
                    num_draft_tokens=0 if depth == "erratic" else depth,
                    prefill_step_size=STEP,
                    prefix_cache_size=1 << 24,
                    overlap=number % 3 > 0,
                    max_decode_pause=1e-6 if number % 2 else 0.0,
                ),
                depth=Erratic(seed=number) if depth == "erratic" else None,
                host_sources=HostSources(["copy"], 1 << 20) if copies else None,
                prefills=RandomChunks,
                min_gain=1,
            )
            for turn in ("cold", "warm"):
                named = [replace(r, request_id=f"{turn} {r.request_id}") for r in requests]
                leaves = {7: [named[2].request_id], 15: [named[9].request_id]}
                arrivals = {3 * first: named[first::5] for first in range(5)}
                driver.run_arrivals(arrivals, leaves)
                gone = {name for names in leaves.values() for name in names}
                for each, own in zip(requests, named):
                    name = own.request_id
                    got, reference = driver.tokens(name), slowly(family, each)
                    assert not set(got) & set(IMAGE_IDS.values())
                    if name in gone:
                        reference = reference._replace(tokens=reference.tokens[: len(got)])
                    ties.check(name, got, reference)
                    total += len(got)
                    reused += driver.reused(name)
                    if each.sampling.top_logprobs is not None and name not in gone:
                        logprobs += check_logprobs(model, each, driver.outputs[name])
    assert len(used) == 2 * len(DEPTHS) and logprobs > 1000 and reused > 1000
