"""What each process of `test_ranks.py` runs: rank 0 answers requests, the others follow it."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from mlx_mtp import backend

backend.prepare()

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.follow import follow
from mlx_mtp.engine.links import Link, connect
from mlx_mtp.models.loader import load_model
from mlx_mtp.world import world
from tests.engine.cases import EOS, STEP, Erratic, RandomChunks, make_requests
from tests.harness import Driver
from tests.tiny_models import VOCAB

# Model, drafts, kind of requests, whether some are cancelled.
CASES = (
    ("qwen3_next", "erratic", "sampled grammars", True),
    ("qwen3_next", 2, "greedy", False),
    ("qwen3_5", 1, "sampled", True),
    ("qwen3_5", 0, "greedy", False),
    ("qwen3_5_moe", 3, "greedy grammars", False),
)


def answers(model, links, depth, kind, cancelled):
    """Two rounds of requests that come and go, the second with the prefixes of the first."""
    requests = make_requests(kind)
    driver = Driver(
        model,
        vocab_size=VOCAB,
        stop_ids=(EOS,),
        config=EngineConfig(
            num_draft_tokens=0 if depth == "erratic" else depth,
            prefill_step_size=STEP,
            prefix_cache_size=1 << 20,
        ),
        depth=Erratic(seed=5) if depth == "erratic" else None,
        prefills=RandomChunks,
        links=links,
    )
    found, reused = {}, 0
    for turn in ("cold", "warm"):
        arriving = {
            2 * number: [replace(r, request_id=f"{turn} {r.request_id}") for r in requests[at::3]]
            for number, at in enumerate(range(3))
        }
        gone = f"{turn} {requests[3].request_id}"
        driver.run_arrivals(arriving, {4: [gone]} if cancelled else {})
        for name in driver.outputs:
            if name.startswith(turn) and not (cancelled and name == gone):
                found[name] = driver.tokens(name)
                reused += driver.reused(name)
    return found, reused


def give_up(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


def main(folder: Path, result: Path) -> None:
    """Run all cases; rank 0 writes the answers."""
    ranks, told = world(), []
    for family in dict.fromkeys(case[0] for case in CASES):
        part = ranks.rank, ranks.size
        model = load_model(folder / family, enable_mtp=True, part=part)
        links = connect(ranks, {"family": family}, 1 << 30)
        if isinstance(links, Link):
            links.on_lost = give_up
            follow(model, "mtp", links)
            continue
        links.on_failure = give_up
        for case in CASES:
            if case[0] == family:
                told.append(answers(model, links, *case[1:]))
        links.close()
    if ranks.rank == 0:
        result.write_text(json.dumps(told))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
