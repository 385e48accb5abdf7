"""Requests of `test_ranks.py`, and the program that its processes run."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from mlx_mtp import backend

backend.prepare()

from mlx_mtp.config import EngineConfig
from mlx_mtp.distributed import world
from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.models.loader import load_model
from mlx_mtp.ranks.follower import follow
from mlx_mtp.ranks.links import Link, connect
from tests.support.cases import EOS, STEP, Erratic, RandomChunks, make_requests
from tests.support.harness import Driver
from tests.support.tiny_models import VOCAB
from tests.vision import seeing


def requests_of(kind):
    """Returns the requests of all tests, and one that branches off inside the longest prompt."""
    if kind.endswith("images"):
        return seeing.make_requests(kind.split()[0])
    requests = make_requests(kind)
    longest = max(requests, key=lambda each: len(each.prompt_token_ids))
    prompt = (*longest.prompt_token_ids[:30], 5, 6, 7)
    return [*requests, replace(longest, request_id="branch", prompt_token_ids=prompt)]


def answers(model, depth, kind, *, links, few=False, cache=1 << 20, ids=None, pause=0.0):
    """Run two rounds of requests that come and go, the second with the prefixes of the first.

    Returns the tokens by round and request, and the number of reused prompt tokens.
    """
    requests = requests_of(kind)[5 if few else 0 :]
    driver = Driver(
        model,
        vocab_size=VOCAB,
        stop_ids=(EOS,),
        config=EngineConfig(
            num_draft_tokens=0 if depth == "erratic" else depth,
            prefill_step_size=STEP,
            prefix_cache_size=cache,
            max_decode_pause=pause,
        ),
        depth=Erratic(seed=5) if depth == "erratic" else None,
        prefills=PrefillScheduler if few else RandomChunks,
        links=links,
        draft_ids=ids,
    )
    driver.add(replace(requests[0], request_id="first"))
    while driver.runner.batches.decoding is None:
        driver.step()
    driver.runner.check_ranks_agree()
    tokens, reused = {}, 0
    for turn in ("cold", "warm"):
        named = [replace(each, request_id=f"{turn} {each.request_id}") for each in requests]
        gone = named[2].request_id
        arriving = {2 * number: named[number::3] for number in range(3)}
        driver.run_arrivals(arriving, {4 + len(requests) % 3: [gone]})
        for name in (each.request_id for each in named):
            if name != gone:
                tokens[name] = driver.tokens(name)
                reused += driver.reused(name)
    return tokens, reused


def main(path: Path, folder: Path, depth: int | str, kind: str) -> None:
    """Run one rank of a model; rank 0 writes the answers."""
    ranks = world()
    model = load_model(path, enable_mtp=True, part=(ranks.rank, ranks.size))
    links = connect(ranks, {"model": str(path)}, 1 << 30, _give_up)
    if isinstance(links, Link):
        follow(model, links)
    else:
        result = answers(model, depth, kind, links=links, few=True, cache=1 << 24)
        (folder / "answers.json").write_text(json.dumps(result))
        links.close()


def _give_up(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    path, folder, depth, kind = sys.argv[1:]
    main(Path(path), Path(folder), int(depth) if depth.isdigit() else depth, kind)
